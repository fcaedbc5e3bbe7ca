"""The ledger of incidents and actions: whole lines only, one writer at a time, nothing done that it cannot remember."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from waiting import PATIENCE_SECONDS

from craton.cli import main
from craton.cli.views import heal as heal_view
from craton.errors import CratonError
from craton.job.cluster import load_cluster
from craton.observability.healing import (
    Healing,
    HealingScope,
    Ledger,
    actions,
    heal,
    look,
    place_of,
    read_report,
    repeat_offenders,
    undo,
)
from craton.observability.healing.issues import Issue, of_doctor
from craton.observability.healing.ledger import LedgerEntry, LedgerError
from craton.observability.healing.policy import over_share
from craton.orchestration import NoAnswerError, ServiceNode
from craton.orchestration.errors import SchedulerError
from craton.telemetry import RunDirectory, RunSummary

NOW = 1_000_000_000.0


class Nodes:
    """A scheduler of ten nodes."""

    def __init__(self) -> None:
        self.out: dict[str, tuple[str, str]] = {}  # node → mark, reason
        self.refuses: set[str] = set()
        self.hands_over, self.keeps = True, False
        self.others: dict[str, tuple[str, str]] = {}  # that somebody else takes out as soon as we do
        self.yields: list[str] = []  # of those, what they take back when they have looked
        self.is_slow = False  # takes a node out, and does not answer
        self.answers = 1 << 30  # so many more questions

    def nodes(self) -> list[ServiceNode]:
        self.answers -= 1
        if self.answers < 0:
            raise SchedulerError("scontrol does not answer")
        names = [f"g{number}" for number in range(1, 11)]
        found = [ServiceNode(each, each in self.out, *_reason(self.out.get(each))) for each in names]
        for each in self.yields:
            if self.out.pop(each, ("", ""))[0]:
                self.out[each] = ("", "")  # resumed, and Slurm has yet to hear from it
        return found

    def take_out(self, node: str, mark: str, reason: str) -> None:
        if node in self.refuses:
            raise SchedulerError("scontrol update: Access/permission denied")
        self.out[node] = (mark, reason)
        self.out |= self.others
        if self.is_slow:
            raise NoAnswerError("scontrol did not answer within 30 s")

    def can_hand_over(self, action: str) -> bool:
        return self.hands_over

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        self.out[node] = (mark, f"Action:{action.title()}")
        return True

    def give_back(self, node: str, mark: str) -> str:
        if self.keeps:
            return "the scheduler is away"
        if self.out.get(node, ("", ""))[0] != mark:
            return f"{node} is not out by that"
        del self.out[node]
        return ""


def _reason(out: tuple[str, str] | None) -> tuple[str, bool, str]:
    return (out[1], False, out[0]) if out else ("", False, "")


@pytest.fixture
def cluster() -> Nodes:
    return Nodes()


def place(folder: Path, service: Nodes, hands_over: bool = False) -> HealingScope:
    return HealingScope("lab", service, (), folder, hands_over=hands_over)


def issue(node: str = "g1") -> Issue:
    return Issue(node, "reboot", "xid", "GPU 3: XID 79", device="GPU 3")


def test_advice_changes_no_node_and_remembers_what_it_saw_once(tmp_path: Path, cluster: Nodes) -> None:
    for _ in range(3):
        found = heal(place(tmp_path, cluster), [issue()], "advise", 0.1)
    assert [(each.node, each.node_action) for each in found.decisions] == [("g1", "take_out")]
    assert cluster.out == {}
    assert [entry.kind for entry in Ledger(tmp_path).entries()] == ["incident"]


def test_off_looks_at_nothing_and_writes_nothing(tmp_path: Path, cluster: Nodes) -> None:
    found = heal(place(tmp_path, cluster), [issue()], "off", 0.1)
    assert found.decisions == ()
    assert not Ledger(tmp_path).path.exists()


def test_an_action_is_written_down_and_undone_by_its_number(tmp_path: Path, cluster: Nodes) -> None:
    (action,) = heal(place(tmp_path, cluster), [issue()], "act", 0.1).actions
    assert cluster.out == {"g1": (action.id, "reboot: GPU 3: XID 79")}
    assert undo(place(tmp_path, cluster), action.id) == ["g1 is back in service"]
    assert cluster.out == {}
    assert [entry.kind for entry in Ledger(tmp_path).entries()] == ["incident", "take_out", "undo"]
    with pytest.raises(Exception, match="cannot be undone: g1 is not out by that"):
        undo(place(tmp_path, cluster), action.id)
    with pytest.raises(Exception, match="no action abc"):
        undo(place(tmp_path, cluster), "abc")


def test_what_is_not_approved_is_not_done(tmp_path: Path, cluster: Nodes) -> None:
    asked: list[str] = []
    found = heal(
        place(tmp_path, cluster),
        [issue()],
        "act",
        0.1,
        lambda wanted: bool(asked.extend([each.node for each in wanted])),
    )
    assert (asked, found.actions, cluster.out) == (["g1"], (), {})


def test_the_next_pass_hands_over_what_the_last_one_took_out(tmp_path: Path, cluster: Nodes) -> None:
    there = place(tmp_path, cluster, hands_over=True)
    (first,) = heal(there, [issue()], "act", 0.1).actions
    (second,) = heal(there, [], "act", 0.1).actions
    assert (first.kind, second.kind, second.id) == ("take_out", "hand_over", first.id)
    assert cluster.out["g1"][1] == "Action:Reboot"
    for _ in range(3):
        assert heal(there, [issue()], "act", 0.1).actions == ()
    assert [entry.kind for entry in Ledger(tmp_path).entries()] == ["incident", "take_out", "hand_over"]
    undo(there, first.id)
    assert cluster.out == {}


def test_where_nobody_reboots_machines_nothing_is_handed_over_nor_written(tmp_path: Path, cluster: Nodes) -> None:
    cluster.hands_over = False
    for _ in range(5):
        found = heal(place(tmp_path, cluster, hands_over=True), [issue()], "act", 0.1)
    assert [each.node_action for each in found.decisions] == ["none"]
    assert [entry.kind for entry in Ledger(tmp_path).entries()] == ["incident", "take_out"]


def test_what_was_undone_is_not_done_again_for_the_same_reason(tmp_path: Path, cluster: Nodes) -> None:
    there = place(tmp_path, cluster)
    (action,) = heal(there, [issue()], "act", 0.1).actions
    undo(there, action.id)
    for _ in range(3):
        found = heal(there, [issue()], "act", 0.1)
        assert (found.actions, found.decisions[0].action) == ((), "observe")
    (action,) = heal(there, [replace(issue(), moment=time.time())], "act", 0.1).actions
    assert action.action == "replace", "it happened again: reboot, one grade graver"


def test_an_operator_who_was_quicker_than_the_answer_is_left_alone(tmp_path: Path, cluster: Nodes) -> None:
    cluster.others, cluster.keeps = {"g9": ("", "fan")}, True
    found = heal(place(tmp_path, cluster), [issue()], "act", 0.1)
    assert "cannot be undone (the scheduler is away) although 2 of 10 nodes are out now" in found.failures[0]
    assert f"`--undo {cluster.out['g1'][0]}` puts it back in service" in found.failures[0]


@pytest.mark.parametrize(
    ("answers", "is_slow", "told"),
    [
        (2, False, "g1: out, but the nodes out of service cannot be counted"),
        (3, False, "runs on g1 stay there until the next look"),
        (4, True, "if it is out anyway"),
    ],
)
def test_a_node_that_is_out_has_its_number_told_whatever_fails_then(
    tmp_path: Path, cluster: Nodes, answers: int, is_slow: bool, told: str
) -> None:
    cluster.answers, cluster.is_slow = answers, is_slow
    found = heal(place(tmp_path, cluster), [issue()], "act", 0.1)
    number = cluster.out["g1"][0]
    assert told in found.failures[0]
    assert f"`--undo {number}`" in found.failures[0] or number in [action.id for action in found.actions]
    assert undo(place(tmp_path, cluster), number) == ["g1 is back in service"]


def test_one_xid_seen_before_two_starts_is_one(tmp_path: Path, cluster: Nodes) -> None:
    finding = {"layer": "infrastructure", "what": "xid", "severity": "note", "node": "g1", "action": "observe"}
    document = {"findings": [{**finding, "evidence": "GPU 3 (0000:53:00.0): XID 31, GPU memory page fault"}]}
    for measured in (NOW, NOW + 600):
        found = heal(place(tmp_path, cluster), of_doctor(document, measured), "act", 0.1)
        assert [(each.action, each.node_action) for each in found.decisions] == [("observe", "none")]


def test_advice_is_given_without_a_ledger_that_can_be_written(tmp_path: Path, cluster: Nodes) -> None:
    (tmp_path / "file").touch()
    there = place(tmp_path / "file" / "runs", cluster)
    found = heal(there, [issue()], "advise", 0.1)
    assert ([each.node_action for each in found.decisions], len(found.notes)) == (["take_out"], 1)
    assert "incidents are not recorded" in found.notes[0]
    with pytest.raises(LedgerError, match="--mode act requires a writable ledger"):
        heal(there, [issue()], "act", 0.1)


def test_a_place_that_cannot_be_locked_is_refused_in_words(
    tmp_path: Path, cluster: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", lacks)
    with pytest.raises(LedgerError, match=r"cannot be locked .*mount it with `-o flock`"):
        heal(place(tmp_path, cluster), [issue()], "act", 0.1)
    assert cluster.out == {}


def test_an_old_report_does_not_count_and_that_is_said(tmp_path: Path) -> None:
    report = tmp_path / "doctor.json"
    finding = {"layer": "infrastructure", "what": "gpu_count", "severity": "fail", "evidence": "7 of 8", "node": "g1"}
    report.write_text(json.dumps({"findings": [finding]}))
    notes: list[str] = []
    assert [each.node for each in read_report(report, notes)] == ["g1"]
    os.utime(report, (time.time() - 7 * 3600,) * 2)
    assert read_report(report, notes) == []
    assert "older than 6h" in notes[0]


def test_a_run_that_cannot_be_examined_hides_no_other(tmp_path: Path, cluster: Nodes) -> None:
    broken, other = (RunDirectory.create(tmp_path, name) for name in ("broken", "other"))
    notes: list[str] = []
    assert look(HealingScope("lab", cluster, (broken, other), tmp_path), notes=notes) == []
    assert [note.partition(" ")[0] for note in notes] == ["broken", "other"]


def test_a_share_that_others_exceed_at_the_same_moment_is_put_right(tmp_path: Path, cluster: Nodes) -> None:
    cluster.others = {"g9": ("", "fan")}
    found = heal(place(tmp_path, cluster), [issue()], "act", 0.1)
    assert found.actions == ()
    assert "undone: 2 of 10 nodes are out now" in found.failures[0]
    assert set(cluster.out) == {"g9"}, "what others took out stays"
    assert not found.is_well


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        ({"g9": ("", "fan")}, "1 of 10 nodes are out already"),
        ({"g9": ("cd34", "craton:cd34 reset: ECC")}, "1 of 10 nodes are out already"),
        ({"g1": ("cd34", "craton:cd34 reset: ECC")}, "already taken out by another process (craton:cd34 reset: ECC)"),
    ],
)
def test_what_others_took_out_while_somebody_was_asked_counts(
    tmp_path: Path, cluster: Nodes, meanwhile: dict[str, tuple[str, str]], told: str
) -> None:
    cluster.refuses = {"g1"}  # it is not even tried

    def approve(_: object) -> bool:
        cluster.out |= meanwhile
        return True

    found = heal(place(tmp_path, cluster), [issue()], "act", 0.1, approve)
    assert (found.actions, cluster.out, found.is_well) == ((), meanwhile, False)
    assert told in found.failures[0]
    assert [entry.kind for entry in Ledger(tmp_path).entries()] == ["incident", "failed"]


def test_a_node_that_another_takes_out_at_the_same_moment_is_theirs(tmp_path: Path, cluster: Nodes) -> None:
    cluster.others = {"g1": ("cd34", "craton:cd34 reset: ECC")}
    found = heal(place(tmp_path, cluster), [issue()], "act", 0.1)
    assert (found.actions, cluster.out) == ((), cluster.others)
    told = "g1: another process took it out at the same moment (craton:cd34 reset: ECC); left unchanged"
    assert found.failures == (told,)


@pytest.mark.parametrize(
    ("theirs", "yields", "left"),
    [
        ("00000000", False, {"g9"}),  # it comes first
        ("zzzzzzzz", True, {"g1"}),
        ("zzzzzzzz", False, {"g9"}),  # it should, and does not
    ],
)
def test_of_two_that_exceed_the_share_at_once_the_later_number_is_taken_back(
    tmp_path: Path, cluster: Nodes, monkeypatch: pytest.MonkeyPatch, theirs: str, yields: bool, left: set[str]
) -> None:
    monkeypatch.setattr(actions, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(actions, "YIELD_SECONDS", 10.0 if yields else 0.01)
    cluster.others, cluster.yields = {"g9": (theirs, f"craton:{theirs} reboot")}, ["g9"] if yields else []
    found = heal(place(tmp_path, cluster), [issue()], "act", 0.1)
    assert set(cluster.out) == left
    assert [action.node for action in found.actions] == ["g1"] * ("g1" in left)
    assert found.is_well == ("g1" in left)


def test_of_two_healers_without_a_ledger_in_common_one_acts(
    tmp_path: Path, cluster: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "LOOK_SECONDS", 0.001)
    both, take_out = threading.Barrier(2, timeout=PATIENCE_SECONDS), cluster.take_out

    def at_once(node: str, mark: str, reason: str) -> None:
        both.wait()  # each has counted, and may take one
        take_out(node, mark, reason)
        both.wait()

    monkeypatch.setattr(cluster, "take_out", at_once)

    def healed(node: str) -> Healing:
        return heal(place(tmp_path / node, cluster), [issue(node)], "act", 0.1)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(healed, ("g1", "g2")))
    ((action, *_),) = (each.actions for each in found if each.actions)
    assert {node: mark for node, (mark, _) in cluster.out.items()} == {action.node: action.id}
    (failure,) = (each.failures[0] for each in found if each.failures)
    assert "undone: 2 of 10 nodes are out now" in failure


def test_a_node_that_cannot_be_taken_out_keeps_no_other_from_it(tmp_path: Path, cluster: Nodes) -> None:
    cluster.refuses = {"g1"}
    found = heal(place(tmp_path, cluster), [issue("g1"), issue("g2")], "act", 0.2)
    assert [entry.node for entry in found.actions] == ["g2"]
    assert found.failures == ("g1: scontrol update: Access/permission denied",)
    assert [entry.kind for entry in Ledger(tmp_path).entries()][-3:] == ["take_out", "failed", "take_out"]


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append([LedgerEntry(NOW, "incident", "g1", action="reset")])
    with ledger.path.open("a") as file:
        file.write('[1]\n{"time": "noon", "kind": "incident", "node": "g1"}\n{"node": 7}\n{"time": 1.0, "kind": "inci')
    ledger.append([LedgerEntry(NOW + 1, "incident", "g2", action="reset")])
    assert [entry.node for entry in ledger.entries()] == ["g1", "g2"]


def test_one_at_a_time(tmp_path: Path, cluster: Nodes) -> None:
    holder = (
        "import sys\nfrom pathlib import Path\nfrom craton.observability.healing import Ledger\n"
        "with Ledger(Path(sys.argv[1])).held():\n print('held', flush=True)\n sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match="another `craton heal` is running"):
            heal(place(tmp_path, cluster), [issue()], "act", 0.1)
        assert cluster.out == {}
        process.kill()
        process.wait()
        assert heal(place(tmp_path, cluster), [issue()], "act", 0.1).actions, "a killed one holds nothing"
    finally:
        process.kill()
        process.communicate()


def test_an_undo_says_what_it_did_not_undo(tmp_path: Path, cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, "llama")
    there = HealingScope("lab", cluster, (run,), tmp_path)
    (action,) = heal(place(tmp_path, cluster), [issue()], "act", 0.1).actions
    cluster.out["g1"] = ("", "fan")
    monkeypatch.setattr("craton.observability.healing.actions.come_back", lambda run, number: ["node-0"])
    assert undo(there, action.id) == ["llama may use node-0 again, as a spare", "g1 is not out by that"]


def test_watching_goes_on_when_files_are_away_for_a_while(tmp_path: Path, cluster: Nodes) -> None:
    looks: list[OSError | KeyboardInterrupt] = [
        OSError(errno.ESTALE, "Stale file handle"),
        KeyboardInterrupt(),
        BrokenPipeError(),
    ]

    def place_now() -> HealingScope:
        raise looks.pop(0)

    options, told = heal_view.Options("advise", 0.1, 0.0, False), StringIO()

    def watch() -> None:
        heal_view.watch(place_now, options, None, None, None, Console(file=told), False)

    watch()
    assert "Stale file handle; retrying in 0 s" in told.getvalue()
    with pytest.raises(BrokenPipeError):
        watch()


def test_a_run_that_was_removed_while_it_was_looked_for_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "late"):
        RunDirectory.create(tmp_path / "runs", name).mark("FATAL", "rank 3 lost its card")

    def settled(summaries: list[RunSummary]) -> list[RunSummary]:
        shutil.rmtree(tmp_path / "runs" / "gone")
        return summaries

    monkeypatch.setattr("craton.observability.healing.places.settled_summaries", settled)
    monkeypatch.setattr("craton.observability.healing.places.service_of", lambda scheduler: None)
    file = tmp_path / "lab.yaml"
    file.write_text(json.dumps({"name": "lab", "instance": "local", "nodes": 8, "runs": str(tmp_path / "runs")}))
    assert [run.name for run, _ in place_of(str(file)).ended] == ["late"]


def test_nothing_is_done_that_cannot_be_remembered(small_disk: Path, cluster: Nodes) -> None:
    (small_disk / ".heal.lock").touch()
    with (small_disk / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    with pytest.raises(LedgerError, match="cannot be written"):
        heal(place(small_disk, cluster), [issue()], "act", 0.1)
    assert cluster.out == {}


def test_repeat_offenders_the_worst_first() -> None:
    entries = [
        LedgerEntry(NOW - days * 86400, "incident", node, action="reset")
        for node, days in (("a", 1), ("b", 1), ("b", 3))
    ]
    assert repeat_offenders([*entries, LedgerEntry(NOW, "incident", "c", action="observe")], NOW) == {"b": 2, "a": 1}


def test_entries_are_json_that_others_can_read(tmp_path: Path) -> None:
    Ledger(tmp_path).append([LedgerEntry(NOW, "move", "g1", "ab12", "lab", "llama", text="a\nb")])
    (line,) = (tmp_path / "heal.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a\nb"


@pytest.mark.parametrize(("written", "share"), [("5%", 0.05), (0.25, 0.25), ("12.5 %", 0.125), (1, 1.0)])
def test_the_cluster_file_says_what_may_be_done(tmp_path: Path, written: object, share: float) -> None:
    file = tmp_path / "cluster.yaml"
    health = {"policy": "replace", "heal": "act", "share": written}
    document = {"name": "lab", "instance": "local", "nodes": 8, "scheduler": {"kind": "slurm"}, "health": health}
    file.write_text(json.dumps({**document, "runs": str(tmp_path / "runs")}))
    found = load_cluster(file)
    assert (found.health.heal, found.health.share) == ("act", share)
    file.write_text(json.dumps({**document, "health": {}}))
    assert (load_cluster(file).health.heal, load_cluster(file).health.share) == ("advise", 0.1)


@pytest.mark.parametrize("written", ["0%", "120%", "a few", -0.1, True])
def test_a_share_that_is_none_is_refused(tmp_path: Path, written: object) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"name": "lab", "instance": "local", "nodes": 8, "health": {"share": written}}))
    with pytest.raises(CratonError, match=r"is not a share; write e\.g\. 10%"):
        load_cluster(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--mode", "fix"), "--mode fix is not known; allowed: off, advise, act"),
        (("--share", "0"), "'0' is not a share"),
        (("--report", "nowhere.json"), "cannot read --report nowhere.json"),
        (("--undo", "abc"), "no action abc"),
        (("--node", "g11"), "--node g11: lab has no such node; it has g1, g2, g3,"),
        (("--node", "nope", "--watch"), "--node nope: lab has no such node; it has g1, g2, g3,"),
        (("--mode", "act"), "no terminal to ask on"),
        (("--mode", "act", "--watch"), "no terminal to ask on"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cluster: Nodes,
    words: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setattr("craton.observability.healing.places.place_of", lambda target: place(tmp_path, cluster))
    monkeypatch.setattr("sys.argv", ["craton", "heal", "lab.yaml", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err
    assert (ended.value.code, errors.count("\n")) == (2, 1)
    assert told in errors
    assert cluster.out == {}


def test_a_table_says_what_is_needed_why_and_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cluster: Nodes
) -> None:
    finding = {"layer": "infrastructure", "what": "xid", "severity": "fail", "evidence": "XID 79", "action": "reboot"}
    report = tmp_path / "doctor.json"
    report.write_text(json.dumps({"findings": [{**finding, "node": node} for node in ("g1", "g2")]}))
    monkeypatch.setattr("craton.observability.healing.places.place_of", lambda target: place(tmp_path, cluster))
    monkeypatch.setenv("COLUMNS", "160")

    def heal_verb(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["craton", "heal", "lab.yaml", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, output = heal_verb("--report", str(report))
    assert code == 0
    assert "is taken out of service" in output
    assert "nothing was changed; `--mode act` applies the actions" in output
    code, output = heal_verb("--report", str(report), "--mode", "act", "--yes")
    (number,) = (mark for mark, _ in cluster.out.values())
    assert (code, f"--undo {number}" in output, "1 of 10 nodes are out already" in output) == (1, True, True)
    assert heal_verb("--undo", number) == (0, "g1 is back in service\n")
    code, output = heal_verb("--history")
    assert (code, "take out" in output, "undo" in output, "g1: had issues 1 time" in output) == (0, True, True, True)


def test_a_share_is_told_in_percent() -> None:
    assert "at most 10% of them (0) may be out; allow it with `--share 13%`" in over_share(0, 8, 0.1)


def test_a_table_says_of_what_was_refused_that_it_failed(tmp_path: Path, cluster: Nodes) -> None:
    cluster.refuses = {"g1"}
    healing = heal(place(tmp_path, cluster), [issue("g1"), issue("g2")], "act", 0.2)
    moves = {node: ["llama: goes on with its spare"] for node in ("g1", "g2")}
    screen = StringIO()
    heal_view.show(replace(healing, moves=moves), Console(file=screen, width=200))
    rows = {words[0]: line for line in screen.getvalue().splitlines() if (words := line.split())}
    assert "failed: see below" in rows["g1"]
    assert "is taken out of service (done" in rows["g2"]
    assert "g1: scontrol update: Access/permission denied" in rows["g1:"]  # and not that its run moves
    assert "goes on with its spare" in rows["g2:"]
    assert "1 of 10 nodes out of service (limit 20%)" in rows["lab:"]
    refused = replace(healing, actions=(), failures=())  # whoever was asked said no
    screen = StringIO()
    heal_view.show(refused, Console(file=screen, width=200))
    assert screen.getvalue().count("not done") == 2
