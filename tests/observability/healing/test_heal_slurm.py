"""Healing on a real Slurm: nodes drained and resumed, limits that hold, runs that move and lose nothing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from slurm_lab import NODES, SlurmLab
from slurm_runs import chain_job, expect_whole_chain, hosts_of, losses_of, submit, wait_for_run, wait_for_step
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.coordination import avoid_node, read_avoided
from craton.cli import main
from craton.job.cluster import SchedulerSettings
from craton.observability.healing import Healing, HealingScope, heal, place_of, undo
from craton.observability.healing.issues import Issue
from craton.orchestration import read_submission, service_of
from craton.orchestration.changes import working_nodes
from craton.orchestration.changes.evacuation import spare_nodes
from craton.orchestration.errors import SchedulerError
from craton.orchestration.slurm import SlurmService
from craton.orchestration.slurm import node_maintenance as slurm_service
from craton.orchestration.slurm.node_maintenance import default_partitions, service_nodes

SLURM = SchedulerSettings(kind="slurm", partition="train")


def cluster_file(folder: Path, **health: Any) -> str:
    document = {
        "name": "lab",
        "instance": "local",
        "nodes": 8,
        "scheduler": {"kind": "slurm", "partition": "train"},
        "health": {"share": "25%", **health},
        "runs": str(folder / "runs"),
    }
    path = folder / "lab.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def report(folder: Path, **actions: str) -> str:
    """As `craton doctor NODES --json` prints it."""
    findings = [
        {
            "layer": "infrastructure",
            "what": "xid",
            "severity": "fail",
            "evidence": 'GPU 3: XID 79, "off the bus"',
            "remedy": "",
            "node": node,
            "action": action,
        }
        for node, action in actions.items()
    ]
    path = folder / "doctor.json"
    path.write_text(json.dumps({"schema": 1, "findings": findings, "nodes": []}))
    return str(path)


def craton(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["craton", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


NODE = """\
NodeName={name} Arch=x86_64 CoresPerSocket=24
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions={partitions}
   Reason={reason} [root@2026-11-16T01:02:03]
"""


def shown(partitions: str = "train", reason: str = "none", **states: str) -> str:
    """As `scontrol show node` prints it."""
    return "\n".join(
        NODE.format(name=name, state=state, partitions=partitions, reason=reason) for name, state in states.items()
    )


def node_of(name: str) -> Any:
    return next(node for node in service_of(SLURM).nodes() if node.name == name)


def test_drained_up_to_the_share_and_resumed_by_the_number(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, found = cluster_file(tmp_path), report(tmp_path, g1="reset", g2="replace", g3="reboot")
    slurm.drain("g8", "fan")
    assert craton(monkeypatch, "heal", file, "--report", found, "--json") == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "advise"
    assert slurm.nodes_in("drain") == ["g8"], "advice changes nothing"
    assert craton(monkeypatch, "heal", file, "--report", found, "--mode", "act", "--yes", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    (action,) = told["deeds"]
    assert (action["node"], action["kind"], told["out"], told["nodes"]) == ("g2", "take_out", 2, 8)
    assert sorted(slurm.nodes_in("drain")) == ["g2", "g8"], "two of eight are a quarter"
    held = [each["why_not"] for each in told["decisions"] if each["node"] in ("g1", "g3")]
    assert all("2 of 8 nodes are out already" in why for why in held)
    assert node_of("g2").reason == f"craton:{action['id']} replace: GPU 3: XID 79, off the bus"
    assert craton(monkeypatch, "heal", file, "--report", found, "--mode", "act", "--json") == 2, "nobody can be asked"
    assert "no terminal to ask on" in capsys.readouterr().err
    assert sorted(slurm.nodes_in("drain")) == ["g2", "g8"]

    assert craton(monkeypatch, "heal", file, "--undo", action["id"], "--json") == 0
    assert slurm.nodes_in("drain") == ["g8"]
    assert json.loads(capsys.readouterr().out)["done"] == ["g2 is back in service"]
    assert craton(monkeypatch, "heal", file, "--history", "--json") == 0
    history = json.loads(capsys.readouterr().out)
    assert [entry["kind"] for entry in history["entries"]] == ["incident"] * 3 + ["take_out", "undo"]
    assert set(history["lemons"]) == {"g1", "g2", "g3"}


def test_names_without_a_machine_are_no_nodes_unless_they_were_taken_out() -> None:
    cloud = {f"c{number}": "IDLE+CLOUD+POWERED_DOWN" for number in range(96)}
    real = {f"g{number}": "ALLOCATED+CLOUD" for number in range(4)}
    assert [node.name for node in service_nodes(shown(**real, **cloud), ())] == list(real)
    others = shown(
        going="IDLE+CLOUD+NOT_RESPONDING+POWERING_DOWN",
        planned="FUTURE",
        drained="IDLE+CLOUD+DRAIN+POWERED_DOWN",
        idle="IDLE+CLOUD",
        silent="IDLE+NOT_RESPONDING",
    )
    found = {node.name: node.is_out for node in service_nodes(others, ("train",))}
    assert found == {"drained": True, "idle": False, "silent": True}


def test_without_a_partition_the_default_one_is_meant() -> None:
    partitions = "".join(
        f"PartitionName={name}\n   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL\n"
        f"   AllocNodes=ALL Default={default} QoS=N/A\n   State=UP TotalCPUs=96 TotalNodes=4\n\n"
        for name, default in {"cpu": "NO", "train": "YES"}.items()
    )
    assert default_partitions(partitions) == {"train"}
    assert default_partitions(partitions.replace("YES", "NO")) == frozenset()
    text = shown("cpu", c1="IDLE", c2="IDLE") + "\n" + shown("train,low", g1="IDLE")
    assert [node.name for node in service_nodes(text, default_partitions(partitions))] == ["g1"]
    assert len(service_nodes(text, ())) == 3


def test_what_an_operator_took_over_meanwhile_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    reasons = ["craton:cd34 replace: XID 79", "disk swap"]

    def answer(*words: str) -> str:
        asked.append(words)
        return shown(reason=reasons.pop(0), g6="IDLE+DRAIN") if words[1] == "show" else ""

    monkeypatch.setattr("craton.orchestration.slurm.node_maintenance.ask", answer)
    service = SlurmService(SLURM, is_hyperpod=True)
    assert service.hand_over("g6", "cd34", "replace")
    asked.clear()
    with pytest.raises(
        SchedulerError, match="not handed over to HyperPod: meanwhile it is taken out by someone else: disk swap"
    ):
        service.hand_over("g6", "cd34", "replace")
    assert [words[1] for words in asked] == ["show"], "nothing was changed"


def test_what_somebody_else_has_drained_since_is_not_resumed(slurm: SlurmLab, root: Path) -> None:
    service = service_of(SLURM)
    service.take_out("g4", "ab12", "reset: ECC")
    assert (node_of("g4").is_out, node_of("g4").mark) == (True, "ab12")
    slurm.drain("g4", "the power supply smells")
    assert service.give_back("g4", "ab12") == "g4 is taken out by someone else: the power supply smells"
    assert slurm.nodes_in("drain") == ["g4"]
    assert service.give_back("g5", "ab12") == "g5 is already in service"
    assert service.give_back("g99", "ab12") == "Slurm has no node g99"


def test_what_an_operator_has_drained_meanwhile_keeps_its_reason(slurm: SlurmLab) -> None:
    slurm.drain("g4", "disk swap")
    with pytest.raises(SchedulerError, match=r"taken out by someone else meanwhile .*disk swap"):
        service_of(SLURM).take_out("g4", "ab12", "reset: ECC")
    assert node_of("g4").reason == "disk swap"


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(("g1", "g1"), id="one node"),
        pytest.param(("g1", "g2"), id="one share", marks=pytest.mark.slow),  # until a resumed node answers
    ],
)
def test_of_two_healers_that_act_at_the_same_moment_one_has_its_way(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[str, str]
) -> None:
    """Each with a ledger of its own, as on two machines; Slurm is all that they share."""
    both, update = threading.Barrier(2, timeout=PATIENCE_SECONDS), slurm_service._update

    def at_once(node: str, *words: str) -> None:
        if "state=drain" not in words:
            update(node, *words)
            return
        both.wait()  # each has counted, and has seen its node in service
        update(node, *words)
        both.wait()

    monkeypatch.setattr(slurm_service, "_update", at_once)

    def healed(number: int) -> Healing:
        place = HealingScope("lab", service_of(SLURM), (), tmp_path / str(number))
        return heal(place, [Issue(nodes[number], "reboot", "xid", "XID 79")], "act", 0.125)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(healed, (0, 1)))
    ((action,),) = (each.actions for each in found if each.actions)
    assert (slurm.nodes_in("drain"), node_of(action.node).mark) == ([action.node], action.id)
    (failure,) = (each.failures[0] for each in found if each.failures)
    assert ("left unchanged" if nodes[0] == nodes[1] else "undone: 2 of 8 nodes are out now") in failure


def test_a_job_may_name_several_partitions(slurm: SlurmLab) -> None:
    both = service_of(SchedulerSettings(kind="slurm", partition="train,nosuch")).nodes()
    assert {node.name for node in both} == {node.name for node in service_of(SLURM).nodes()} != set()
    assert default_partitions(slurm("scontrol", "show", "partition")) == {"train"}


def test_hyperpod_is_asked_in_its_own_words_and_that_is_undone_too(slurm: SlurmLab) -> None:
    service = SlurmService(SLURM, is_hyperpod=True)
    assert not SlurmService(SLURM, is_hyperpod=False).hand_over("g6", "cd34", "replace")
    for action, reason in {"replace": "Action:Replace", "reboot": "Action:Reboot", "reset": "Action:Reboot"}.items():
        service.take_out("g6", "cd34", f"{action}: XID 79")
        assert service.hand_over("g6", "cd34", action)
        found = next(node for node in service.nodes() if node.name == "g6")
        assert (found.reason, found.mark, found.is_out) == (reason, "cd34", True)
        assert "FAIL" in slurm("scontrol", "show", "node", "g6")
        assert service.give_back("g6", "cd34") == ""
        wait_until(lambda: "g6" in slurm.nodes_in("idle"), "g6 is idle again")


def test_one_node_is_one_node(slurm: SlurmLab) -> None:
    with pytest.raises(Exception, match="is not a single Slurm node name"):
        service_of(SLURM).take_out("g[1-8]", "ab12", "all of them")
    assert len(slurm.nodes_in("idle")) == len(NODES)


@pytest.mark.slow
def test_a_run_without_a_spare_saves_and_goes_on_elsewhere(slurm: SlurmLab, root: Path) -> None:
    run = submit(root, chain_job("mover", nodes=2, steps=150, run="partition: train"))
    wait_for_step(run, 12)
    bad = hosts_of(run)["node-1"]
    avoid_node(run, "node-0", "ab12")
    place = place_of(str(run.path))
    issue = Issue(bad, "reboot", "gpu_lost", "GPU 3 fell off the bus", "why", run=run.name)
    found = heal(place, [issue], "act", 0.25)
    assert [(entry.kind, entry.node) for entry in found.actions] == [("take_out", bad), ("move", bad)], found
    wait_until(lambda: bad not in hosts_of(run).values(), "it is on other nodes")
    assert read_avoided(run) == {}, "names mean other machines now"
    wait_for_run(run, "done")
    expect_whole_chain(run, 150)
    assert bad in [*slurm.nodes_in("drain"), *slurm.nodes_in("drng")]
    undo(place, found.actions[0].id)
    wait_until(lambda: bad in slurm.nodes_in("idle"), f"{bad} is idle")


@pytest.mark.slow
def test_a_run_with_a_spare_stays_in_its_allocation(slurm: SlurmLab, root: Path) -> None:
    run = submit(root, chain_job("spared", nodes=2, steps=250, run="partition: train", more="recover: {spares: 1}\n"))
    wait_for_step(run, 12)
    wait_until(lambda: spare_nodes(run), "the spare is there")
    (good, own), (spare,) = working_nodes(run), spare_nodes(run)
    bad, job = hosts_of(run)[own], read_submission(run).job
    issue = Issue(bad, "reboot", "gpu_lost", "GPU 3 fell off the bus", "why", run=run.name)
    found = heal(place_of(str(run.path)), [issue], "act", 0.25)
    assert f"{spare}, a spare, takes the place of {own}" in found.actions[1].text
    wait_until(lambda: working_nodes(run) == [good, spare], "the spare has its place")
    wait_for_run(run, "done")
    expect_whole_chain(run, 250)
    assert read_submission(run).job == job
    assert len(losses_of(run)) == 250
