"""What is read of a run's files: steps, what ranks do, checkpoints, logs; and what the verb does with it."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_snapshots import healthy, with_run, with_scheduler

from craton.agent.coordination import avoid_node
from craton.cli.app import app
from craton.errors import CratonError
from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect import chosen_run, read_snapshot, take_snapshot
from craton.observability.diagnosis.collect.metrics import collective_seconds, read_steps, series_of, thinned
from craton.observability.diagnosis.collect.processes import read_py_spy
from craton.observability.diagnosis.collect.records import read_logs, read_restarts, read_serving, tiers_of
from craton.observability.diagnosis.collect.scheduler import node_words
from craton.observability.diagnosis.collect.snapshot import _serving
from craton.observability.diagnosis.snapshot import Serving, SnapshotError
from craton.observability.diagnosis.symptoms.wrong import find_wrong
from craton.observability.diagnosis.tables import log_patterns
from craton.orchestration import ServerState
from craton.telemetry import RunDirectory, RunNotFoundError
from craton.telemetry.node import Heartbeat, NodeStatus, RankStatus, write_heartbeat, write_status

NOW = time.time()
PHASES = {"data": 0.01, "compute": 0.8, "communication": 0.15, "optimizer": 0.03, "checkpoint": 0.01}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def step_line(step: int, rank: int, generation: int = 0, **changes: float | None) -> dict[str, Any]:
    seconds = {**PHASES, **{name: value for name, value in changes.items() if name in PHASES}}
    values = {f"run_{phase}_seconds": value for phase, value in seconds.items()}
    step_seconds = sum(value for value in seconds.values() if value is not None)
    more = {name: value for name, value in changes.items() if name not in PHASES}
    stamp = {"time": NOW - 200.0 + step, "step": step, "generation": generation, "rank": rank}
    return {**stamp, "run_step_seconds": step_seconds, "run_loss": 2.0, **values, **more}


def write_run(root: Path, name: str = "made", steps: int = 150, now: float = NOW, **slow: float) -> RunDirectory:
    """A run of two nodes with two ranks each, as its agents would have left it; `slow` changes the last 20 steps of
    rank 3, for which the others wait."""
    run = RunDirectory.create(root, name)
    launch = {"generation": 0, "nodes": ["a", "b"], "ranks_per_node": 2, "gpus": True, "leaves": {"a": "l1", "b": "l1"}}
    run.launch_path.write_text(json.dumps(launch), encoding="utf-8")
    plan = {"kind": "pretrain", "steps": 1000, "step_seconds": 1.0, "step_seconds_low": 0.9, "step_seconds_high": 1.1}
    plan |= {"phases": PHASES, "layout": {"fsdp": 4, "pp": 1}, "cost": {"dollars_per_day": 2400.0}}
    plan |= {
        "storage": {"tiers": [{"tier": "shared", "every_seconds": 600.0}, {"tier": "nvme", "every_seconds": None}]}
    }
    run.plan_path.write_text(json.dumps(plan), encoding="utf-8")
    behind = sum(value - PHASES[name] for name, value in slow.items())
    for place, node in enumerate("ab"):
        lines = []
        for step in range(1, steps + 1):
            for rank in (2 * place, 2 * place + 1):
                first = {"compute": 9.0} if step <= 3 else {}
                is_slow = bool(slow) and step > steps - 20
                late = slow if is_slow and rank == 3 else {"communication": 0.15 + behind} if is_slow else {}
                lines.append(step_line(step, rank, **{**first, **late}))
        write_lines(run.metrics_path(node), lines)
        write_heartbeat(run, node, Heartbeat(0, "running", 1, 0, host="elsewhere"))
        ranks = tuple(
            RankStatus(rank, 100 + rank, "productive", (), steps + 1, 0.2, 1.0, False)
            for rank in (2 * place, 2 * place + 1)
        )
        write_status(run, NodeStatus(now, 0, node, ranks))
        write_lines(run.events_path(node), [{"time": NOW - 250.0, "event": "agent_started", "generation": 0}])
    return run


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked says that the run runs."""
    from craton.orchestration import Standing

    standing = Standing("running", job="7", nodes=("a", "b"))
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.standing_of", lambda run: standing)


@pytest.mark.usefixtures("running")
def test_steps_of_all_ranks(root: Path) -> None:
    snapshot = take_snapshot(write_run(root), now=NOW + 1.0)
    run = snapshot.run
    assert (run.name, run.kind, run.nodes, run.world, run.step, run.steps) == (
        "made",
        "pretrain",
        ("a", "b"),
        4,
        150,
        1000,
    )
    assert (run.dollars_per_hour, run.leaves, run.layout) == (100.0, {"a": "l1", "b": "l1"}, {"pp": 1, "fsdp": 4})
    rank = snapshot.ranks[3]
    assert (rank.node, rank.gpu, rank.pid, rank.kind) == ("b", 1, 103, "productive")
    assert (rank.num_recent, rank.num_earlier) == (20, 100)
    assert rank.recent == pytest.approx({**PHASES, "step": 1.0})
    assert rank.progress_age_seconds == pytest.approx(1.2, abs=0.01)
    assert diagnose(snapshot).condition == "healthy"


@pytest.mark.usefixtures("running")
def test_a_straggler_is_seen_in_the_files(root: Path) -> None:
    verdict = diagnose(take_snapshot(write_run(root, compute=1.2), now=NOW + 1.0))
    assert (verdict.condition, verdict.cause, verdict.node, verdict.rank) == ("slow", "cannot_tell", "b", 3)
    assert any("GPU health" in each for each in verdict.would_tell)
    assert verdict.cost_dollars_per_day == pytest.approx(2400.0 * 0.4 / 1.4, rel=0.05)


@pytest.mark.usefixtures("running")
def test_a_rank_that_stands_in_its_data(root: Path) -> None:
    run = write_run(root)
    for node, kinds in (("a", ("productive", "productive")), ("b", ("productive", "data"))):
        first = 0 if node == "a" else 2
        ranks = tuple(
            RankStatus(first + place, 1, kind, (), 151, 400.0 + (kind == "data"), 1.0, False)
            for place, kind in enumerate(kinds)
        )
        write_status(run, NodeStatus(NOW, 0, node, ranks))
    verdict = diagnose(take_snapshot(run, now=NOW + 1.0))
    assert (verdict.condition, verdict.cause, verdict.rank) == ("hung", "data_hung", 3)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("age", "pace", "condition"), [(60.0, 1.0, "healthy"), (301.0, 1.0, "hung"), (60.0, 0.0, "hung")]
)
def test_a_command_may_be_silent_for_as_long_as_it_says(root: Path, age: float, pace: float, condition: str) -> None:
    """While it evaluates, nobody can tell it from one that hangs. Where its agent does not know its pace, the limit is
    that of a start, and says nothing of steps."""
    run = write_run(root)
    for node, first in (("a", 0), ("b", 2)):
        ranks = tuple(
            RankStatus(rank, 1, "productive", (), 151, age, pace, False, progress_limit_seconds=300.0)
            for rank in (first, first + 1)
        )
        write_status(run, NodeStatus(NOW, 0, node, ranks))
    assert diagnose(take_snapshot(run, now=NOW)).condition == condition


@pytest.mark.usefixtures("running")
def test_steps_of_an_earlier_generation_do_not_count(root: Path) -> None:
    run = write_run(root)
    lines = [step_line(step, 0, generation=0, compute=5.0) for step in range(1, 100)]
    lines += [step_line(step, 0, generation=3) for step in range(100, 140)]
    write_lines(run.metrics_path("a"), lines)
    made = {"number": 3, "nodes": ["a", "b"], "ranks_per_node": 2, "store": "", "time": NOW - 100.0, "reason": "x"}
    run.generation_path(3).write_text(json.dumps(made), encoding="utf-8")
    snapshot = take_snapshot(run, now=NOW + 1.0)
    assert snapshot.run.generation == 3
    rank = snapshot.ranks[0]
    assert (rank.num_recent, rank.num_earlier) == (20, 15)  # the first five of a generation warm up
    assert rank.earlier["compute"] == pytest.approx(0.8)
    assert snapshot.ranks[2].kind == ""  # its status is of another generation


@pytest.mark.usefixtures("running")
def test_losses_that_were_no_number(root: Path) -> None:
    run = write_run(root)
    lines = [step_line(step, 0, run_loss=None if step > 140 else 2.0) for step in range(1, 151)]
    write_lines(run.metrics_path("a"), lines)
    snapshot = take_snapshot(run, now=NOW + 1.0)
    verdict = diagnose(snapshot)
    assert (verdict.condition, verdict.cause) == ("wrong", "not_a_number")
    assert verdict.evidence[0] == "the loss has been NaN or Inf since step 141"


@pytest.mark.usefixtures("running")
def test_the_network_that_nccl_says_it_uses(root: Path) -> None:
    run = write_run(root)
    plan = json.loads(run.plan_path.read_text(encoding="utf-8"))
    plan["cluster"] = {"instance": {"efa_version": 2, "network_interfaces": 32}}
    run.plan_path.write_text(json.dumps(plan), encoding="utf-8")
    for rank in (0, 2):
        run.log_path(rank).write_text("h:1:1 [0] NCCL INFO Using network Socket\n", encoding="utf-8")
    snapshot = take_snapshot(run, now=NOW + 1.0)
    assert [node.nccl_network for node in snapshot.nodes] == ["Socket", "Socket"]
    verdict = diagnose(snapshot)
    assert (verdict.condition, verdict.layer, verdict.cause) == ("healthy", "fabric", "tcp_fallback")


@pytest.mark.usefixtures("running")
def test_a_file_that_cannot_be_read_is_noted_and_ends_nothing(root: Path) -> None:
    run = write_run(root)
    for path in (run.metrics_path("b"), run.events_path("a"), run.ledger_path("b")):
        path.unlink(missing_ok=True)
        path.mkdir()  # open() is refused, as it is by a file system that fails
    snapshot = take_snapshot(run, now=NOW + 1.0)
    assert snapshot.notes == ("3 files of the run could not be read: metrics/b.jsonl: is a folder, not a regular file",)
    assert [rank.num_recent for rank in snapshot.ranks] == [20, 20, 0, 0]


def test_a_thousand_nodes_still_have_a_past_to_compare_with(root: Path) -> None:
    run = RunDirectory.create(root, "wide")
    nodes = [f"node-{number}" for number in range(1000)]
    for place, node in enumerate(nodes[:2]):  # the others have written nothing yet
        more = {"run_text": "x" * (120 if place else 0)}
        ranks = range(8 * place, 8 * place + 8)
        write_lines(run.metrics_path(node), [step_line(step, rank) | more for step in range(1, 301) for rank in ranks])
    steps = read_steps(run, nodes, 0)
    for rank in (0, 15):
        assert [steps[rank].median(recent)[1] >= least for recent, least in ((True, 20), (False, 16))] == [True, True]
        assert steps[rank].lines[0]["step"] == pytest.approx(181, abs=3)
        assert len(steps[rank].lines) < 80
    assert collective_seconds(steps) == (pytest.approx(0.15), pytest.approx(0.15))


def test_rank_0_is_read_where_it_was(root: Path) -> None:
    run = RunDirectory.create(root, "moved")
    for number, node in enumerate("abc"):
        write_lines(run.metrics_path(node), [step_line(step, 0) for step in range(10 * number, 10 * number + 10)])
    assert [step for step, _ in series_of(run, ["a", "b", "c"]).loss] == list(range(10))
    made = {"number": 0, "nodes": ["b", "a", "c"], "ranks_per_node": 1, "store": ""}
    run.generation_path(0).write_text(json.dumps(made), encoding="utf-8")
    assert [step for step, _ in series_of(run, ["a", "b", "c"]).loss] == list(range(20))


def test_what_a_run_did_before_it_was_started_again_is_not_its_state(root: Path) -> None:
    """It failed at step 120 with a loss that is no number; it goes on from step 100, where the loss was fine."""
    run = RunDirectory.create(root, "again")
    launch = {"nodes": ["a"], "ranks_per_node": 1, "generation": 0}
    bad = {"event": "bad_step", "step": 118, "reason": "the loss is NaN", "time": NOW - 80, "generation": 0, "rank": 0}
    before = [step_line(step, 0, run_loss=None if step > 110 else 2.0) for step in range(1, 121)]
    write_lines(run.metrics_path("a"), before)
    write_lines(run.events_path("a"), [bad])
    run.launch_path.write_text(json.dumps(launch), encoding="utf-8")
    failed = take_snapshot(run, now=NOW)
    assert [symptom.sign for symptom in find_wrong(failed)] == ["not_a_number"]
    run.launch_path.write_text(json.dumps({**launch, "generation": 1}), encoding="utf-8")
    started = take_snapshot(run, now=NOW)
    assert (started.series.loss, started.bad_steps, find_wrong(started)) == ((), (), [])
    after = [{**step_line(step, 0, 1), "time": NOW - 50.0 + step / 100} for step in range(101, 104)]
    write_lines(run.metrics_path("a"), [*before, *after])
    going_on = take_snapshot(run, now=NOW)
    assert [step for step, _ in going_on.series.loss] == list(range(1, 104))
    assert find_wrong(going_on) == [], "the steps that it has not reached again are not its newest ones"


def test_what_slurm_says_of_nodes() -> None:
    silent = "n2|down*|Not responding\n"  # once for each of its partitions
    text = f"n1|allocated|none\n{silent}{silent}n3|drained|bad gpu\nn4|idle~|none\nn9|down|x\n"
    words = node_words(text, {name: name for name in ("n1", "n2", "n3", "n4")})
    assert [(word.node, word.is_bad, word.reason) for word in words] == [
        ("n1", False, ""),
        ("n2", True, "Not responding"),
        ("n3", True, "bad gpu"),
        ("n4", False, ""),
    ]


def generation(run: RunDirectory, number: int, ago: float, **changes: Any) -> None:
    made = {"number": number, "nodes": ["a", "b"], "ranks_per_node": 2, "store": "", "time": NOW - ago, **changes}
    run.generation_path(number).write_text(json.dumps(made), encoding="utf-8")


def test_a_run_that_failed_names_the_collective_on_which_its_ranks_disagreed(root: Path) -> None:
    run = write_run(root)
    generation(run, 1, 100.0)
    shared = {"event": "rank_stuck", "generation": 1, "stuck_step": 151}
    for place, node in enumerate("ab"):
        ranks = (2 * place, 2 * place + 1)
        stuck = [{**shared, "time": NOW - 5.0, "rank": rank, "waits": rank != 2, "message": "m"} for rank in ranks]
        ended = [
            {"event": "rank_ended", "generation": 1, "time": NOW - 1.0, "rank": rank, "step": 151, "code": -9}
            for rank in ranks
        ]
        started = {"time": NOW - 250.0, "event": "agent_started", "generation": 0}
        write_lines(run.events_path(node), [started, *stuck, *ended])
        write_heartbeat(run, node, Heartbeat(1, "failed", 1, 0, host="elsewhere"))
    run.mark("FATAL", "rank 2 hangs in productive at step 151: no progress for 4.1 s")
    run.recording_prefix.parent.mkdir(exist_ok=True)
    for rank in range(4):
        called = "nccl:all_reduce" if rank == 2 else "nccl:_all_gather_base"
        entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 9, "profiling_name": called}
        recording = {"entries": [{**entry, "state": "scheduled", "input_sizes": [[4]]}], "pg_config": {}}
        Path(f"{run.recording_prefix}{rank}").write_bytes(pickle.dumps(recording))
    verdict = diagnose(take_snapshot(run, now=NOW + 1.0))
    assert (verdict.condition, verdict.cause, verdict.rank) == ("dead", "collective_mismatch", 2)
    assert "rank 2 calls nccl:all_reduce" in verdict.because


@pytest.mark.usefixtures("running")
def test_restarts_of_the_last_hour(root: Path) -> None:
    """Those that somebody asked for do not count, nor those of before it was started again."""
    run = write_run(root)
    launch = json.loads(run.launch_path.read_text(encoding="utf-8"))
    run.launch_path.write_text(json.dumps({**launch, "generation": 2}), encoding="utf-8")
    reason = "rank 3 on b exited with code 1 (generation 1): KeyError\nthe end of its log:\n  KeyError"
    generation(run, 1, 3000.0, broke_at=NOW - 3005.0, reason=reason)
    generation(run, 2, 2900.0, reason="start")
    for number, ago in ((3, 800.0), (4, 700.0), (6, 300.0), (7, 200.0)):
        generation(run, number, ago, broke_at=NOW - ago - 5.0, reason=reason)
    generation(run, 5, 500.0, is_planned=True, reason="a left for a spare")
    for number in (3, 7):  # 20 s of the seventh went to coming back, as the ledger has it
        booked = {"regroup": 4.0, "redo": 16.0, "productive": 100.0}
        line = {"time": NOW - 50.0 * (8 - number), "rank": 0, "generation": number, "step": 1, "seconds": booked}
        with open(run.ledger_path("a"), "a", encoding="utf-8") as ledger:
            ledger.write(json.dumps(line) + "\n")
    restarts, previous = read_restarts(run, 2, NOW)
    assert [(each.moment - NOW, each.broke_at - NOW) for each in restarts] == [
        (pytest.approx(-ago, abs=1e-3), pytest.approx(-ago - 5.0, abs=1e-3)) for ago in (800.0, 700.0, 300.0, 200.0)
    ]
    assert restarts[0].reason == "rank 3 on b exited with code 1 (generation 1): KeyError"
    assert previous == pytest.approx(NOW - 300.0)
    assert restarts[3].lost_seconds == pytest.approx(20.0)
    assert len(read_restarts(run, 2, NOW + 3000.0)[0]) == 2
    assert read_restarts(run, 7, NOW)[1] is None
    assert take_snapshot(run, now=NOW).run.recent_restarts == restarts
    generation(run, 8, 100.0, broke_at=NOW - 105.0, reason=f"{reason}; b is lost: its agent is gone; nobody is lost: x")
    assert read_restarts(run, 8, NOW)[0][0].reason == "b is lost: its agent is gone"


@pytest.mark.usefixtures("running")
def test_a_spare_that_falls_silent_is_seen(root: Path) -> None:
    run = write_run(root)
    launch = json.loads(run.launch_path.read_text(encoding="utf-8"))
    nodes = ["a", "b", "c", "d", "e"]
    run.launch_path.write_text(json.dumps({**launch, "nodes": nodes, "num_nodes": 2}), encoding="utf-8")
    for node in "cde":
        write_heartbeat(run, node, Heartbeat(0, "spare", 1, 0, host="elsewhere"))
        os.utime(run.heartbeat_path(node), (NOW - 28.0, NOW - 28.0) if node != "d" else (NOW, NOW))
    avoid_node(run, "e")  # is out to be mended, and may be switched off
    for node in "ab":
        os.utime(run.heartbeat_path(node), (NOW, NOW))
    snapshot = take_snapshot(run, now=NOW + 0.5)
    assert [node.name for node in snapshot.spares] == ["c", "d"]
    assert [node.name for node in snapshot.nodes] == ["a", "b"]
    verdict = diagnose(snapshot)
    assert (verdict.condition, verdict.cause, verdict.node) == ("healthy", "spare_lost", "c")
    assert "the spare c is lost: no heartbeat for 28 s" in verdict.sentence


def queue_line(ago: float, waiting: int) -> dict[str, Any]:
    return {"time": NOW - ago, "step": 1, "rank": 0, "serve_running": 8, "serve_waiting": waiting}


def test_the_queue_of_a_server(root: Path) -> None:
    run = RunDirectory.create(root, "served")
    assert read_serving(run, ["a"], NOW) is None
    write_lines(run.metrics_path("a"), [queue_line(ago, 44) for ago in (40.0, 20.0, 1.0)])
    assert read_serving(run, ["a"], NOW) == Serving(8, 44, None)  # it may be a burst
    write_lines(run.metrics_path("a"), [queue_line(ago, 20 + int(ago)) for ago in (200.0, 70.0, 20.0, 1.0)])
    assert read_serving(run, ["a"], NOW) == Serving(8, 21, 21)
    write_lines(run.metrics_path("a"), [queue_line(3000.0, 0), queue_line(10.0, 44), queue_line(1.0, 44)])
    assert read_serving(run, ["a"], NOW) == Serving(8, 44, 0)  # before the burst nobody waited


@pytest.mark.usefixtures("running")
def test_a_server_is_asked_for_what_it_does_not_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(root)
    plan = json.loads(run.plan_path.read_text(encoding="utf-8"))
    run.plan_path.write_text(json.dumps({**plan, "kind": "serve"}), encoding="utf-8")
    with open(run.metrics_path("a"), "a", encoding="utf-8") as metrics:
        metrics.writelines(json.dumps(queue_line(ago, 30)) + "\n" for ago in (90.0, 2.0))
    state = ServerState(16, 44, 900.0, 2.5, 0.99, 7)
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.server_of", lambda run: None)
    monkeypatch.setattr(
        "craton.observability.diagnosis.collect.snapshot.ServerWatch.__init__", lambda self, address: None
    )
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.ServerWatch.look", lambda self: state)
    refusal = "craton.observability.diagnosis.collect.snapshot.ServerWatch.refusal"
    monkeypatch.setattr(refusal, lambda self: "")
    snapshot = take_snapshot(run, now=NOW + 1.0)
    assert snapshot.serving == Serving(16, 44, 30, 0.99, 7, 2.5)
    assert diagnose(snapshot).cause == "server_memory_full"
    monkeypatch.setattr(refusal, lambda self: "the engine is paused; POST /resume")
    assert diagnose(take_snapshot(run, now=NOW + 1.0)).cause == "server_paused"
    monkeypatch.setattr(refusal, lambda self: "")
    updating = replace(state, stall_seconds=30.0, admin_seconds=42.0)
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.ServerWatch.look", lambda self: updating)
    verdict = diagnose(take_snapshot(run, now=NOW + 1.0))
    assert (verdict.condition, verdict.cause) == ("waiting", "server_paused")
    assert "such as POST /update_weights, has been under way for 42 s; if the sender" in verdict.sentence
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.ServerWatch.look", lambda self: None)
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.ServerWatch.responds", lambda self: True)
    silent = take_snapshot(run, now=NOW + 1.0)
    assert silent.serving == Serving(8, 30, 30)
    assert "the server returns no metrics" in silent.notes[0]
    monkeypatch.setattr("craton.observability.diagnosis.collect.snapshot.ServerWatch.responds", lambda self: False)
    snapshot = take_snapshot(run, now=NOW + 1.0)
    assert snapshot.serving == Serving(8, 30, 30)  # its nodes are elsewhere: a firewall may be between
    here, _ = _serving(run, snapshot.run, NOW, asks=True, is_here=True)
    assert here is not None
    assert here.is_silent
    for stage, ago, loads in (("loading weights", 60.0, True), ("ready", 2.0, True), ("ready", 60.0, False)):
        line = {"event": "serving", "stage": stage, "time": NOW - ago, "generation": 9}
        (run.path / "events" / "a.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        here, _ = _serving(run, snapshot.run, NOW, asks=True, is_here=True)
        assert here is not None
        assert (here.is_loading, here.is_silent) == (loads, not loads)


def save(step: int, event: str = "checkpoint_saved", **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": NOW - 1000.0 + step, "step": step, "tier": "shared", **fields}


def test_checkpoints_by_tier() -> None:
    good = [save(step, seconds=10.0, bytes=1e9) for step in range(10, 60, 10)]
    bad = [save(70, "checkpoint_failed", reason="disk"), save(80, "checkpoint_skipped"), save(90, "checkpoint_failed")]
    (tier, other) = tiers_of([*good, save(60, seconds=90.0, bytes=1e9), *bad], {"shared": 600.0, "nvme": 60.0})
    assert (tier.tier, tier.last_step, tier.last_seconds, tier.usual_seconds) == ("shared", 60, 90.0, 10.0)
    assert (tier.failures, tier.skipped, tier.interval_seconds) == (2, 1, 600.0)
    assert (other.tier, other.last_step, other.failures) == ("nvme", None, 0)


LINES: Mapping[str, str] = {
    "cuda_out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...",
    "cuda_uncorrectable_ecc": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "cuda_device_lost": "Unable to determine the device handle for GPU0: GPU is lost.",
    "nvlink_uncorrectable": "CUDA error: uncorrectable NVLink error detected during the execution",
    "token_out_of_range": "craton: data.source mine:rows: sample 3 has token id 900, outside the vocabulary of 512",
    "cuda_illegal_access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "no_space": "OSError: [Errno 28] No space left on device: '/fsx/ckpt'",
    "read_only": "OSError: [Errno 30] Read-only file system: '/fsx/x'",
    "stale_files": "OSError: [Errno 116] Stale file handle",
    "input_output_error": "OSError: [Errno 5] Input/output error: '/fsx/x'",
    "shared_memory": "RuntimeError: unable to open shared memory object </torch_1> in read-write mode",
    "host_out_of_memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0.",
    "loader_killed": "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
    "collective_mismatch": "RuntimeError: Detected mismatch between collectives on ranks.",
    "collective_timeout": "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "peer_closed": "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1",
    "nccl_error": "torch.distributed.DistBackendError: NCCL error: ncclSystemError: System call failed",
    "network_socket": "a:7:7 [0] NCCL INFO Using network Socket",
    "recompiling": "W torch._dynamo hit config.recompile_limit (8)",
    "segmentation_fault": "Fatal Python error: Segmentation fault",
    "killed": "Killed",
    "exception": "[rank0]: mypackage.errors.RewardError: the reward is empty",
}


@pytest.mark.parametrize("name", [pattern.name for pattern in log_patterns()])
def test_lines_of_logs_that_mean_something(root: Path, name: str) -> None:
    run = RunDirectory.create(root, "logs")
    run.log_path(2).write_text(f"step 1 loss 2.0\n{LINES[name]}\nbye\n", encoding="utf-8")
    (match,) = read_logs(run, [0, 2], 0.0, [])
    assert (match.pattern, match.rank, match.count) == (name, 2, 1)
    assert read_logs(run, [2], time.time() + 60.0, []) == ()


def test_ordinary_lines_mean_nothing(root: Path) -> None:
    run = RunDirectory.create(root, "logs")
    text = "step 5/9 loss 2.1 norm 0.3\nerrors: 0\nNCCL INFO Using network AWS Libfabric\nno Exception here, all fine\n"
    run.log_path(0).write_text(text * 50, encoding="utf-8")
    assert read_logs(run, [0], 0.0, []) == ()


def test_long_series_are_thinned_but_for_their_end() -> None:
    points = thinned([(step, float(step)) for step in range(5000)])
    assert len(points) <= 301
    assert points[-60:] == tuple((step, float(step)) for step in range(4940, 5000))


def test_the_stack_of_a_main_thread() -> None:
    text = (
        'Process 7: python train.py\nPython v3.11\n\nThread 7 (idle): "MainThread"\n    get (queue.py:171)\n'
        '    _next_data (torch/utils/data/dataloader.py:1)\nThread 9 (idle): "pin"\n    wait (threading.py:1)\n'
    )
    assert read_py_spy(text) == ("get (queue.py:171)", "_next_data (torch/utils/data/dataloader.py:1)")


# -- the verb ---------------------------------------------------------------------------------------------------


def why(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    app(["why", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_a_run_that_waits_says_what_its_scheduler_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "needs 4 nodes on one leaf; leaf2 has 3 free"
    waits = with_scheduler(with_run(healthy(4), state="waiting"), condition="waiting", job="4711", sentence=sentence)
    saved = tmp_path / "saved.json"
    saved.write_text(waits.to_json(), encoding="utf-8")
    action = "Wait, or request what is available: fewer nodes, another run.partition, or no placement."
    paragraph = f"llama-8b waits as job 4711: {sentence}. {action}"
    assert why(capsys, "--replay", str(saved)) == f"{paragraph}\n"
    told = json.loads(why(capsys, "--replay", str(saved), "--json"))
    assert (told["condition"], told["job"], told["sentence"]) == ("waiting", "4711", paragraph)


def test_without_a_name_it_is_the_newest_run(root: Path) -> None:
    with pytest.raises(RunNotFoundError, match="there are no runs in"):
        chosen_run(None)
    for place, name in enumerate(("old", "new")):
        run = RunDirectory.create(root, name)
        run.job_path.touch()
        os.utime(run.job_path, (NOW + place, NOW + place))
    assert chosen_run(None).name == "new"
    assert chosen_run("old").name == "old"


@pytest.mark.parametrize("address", ["nonsense", "localhost:9090", "http://"])
def test_what_is_no_address_of_a_prometheus_is_refused(root: Path, address: str) -> None:
    write_run(root)
    with pytest.raises(CratonError, match="is not an address; write"):
        app(["why", "made", "--prometheus", address], standalone_mode=False)


def test_what_cannot_be_replayed_is_told(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"missing\.json cannot be read"):
        read_snapshot(tmp_path / "missing.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SnapshotError):
        read_snapshot(tmp_path / "bytes")


@pytest.mark.usefixtures("running")
def test_what_is_saved_is_judged_the_same(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root, now=time.time(), compute=1.2)
    saved = tmp_path / "saved.json"
    told = why(capsys, "made", "--save", str(saved))
    assert "made is slow: it loses" in told
    assert "  · rank 3 on b spends" in told
    assert why(capsys, "--replay", str(saved)) == told


def test_nodes_have_the_names_of_their_scheduler(root: Path) -> None:
    run = write_run(root)
    (run.path / "backend.json").write_text(json.dumps({"on": "slurm", "job": "7", "details": {}}), encoding="utf-8")
    hosts = [{"name": name, "host": f"gpu-{name}", "address": "10.0.0.1"} for name in "ab"]
    document = {"job": "7", "restarts": 0, "nodes": hosts}
    launch = {**json.loads(run.launch_path.read_text(encoding="utf-8")), "command": ["train"]}
    run.launch_path.write_text(json.dumps(launch), encoding="utf-8")
    (run.path / "allocation.json").write_text(json.dumps(document), encoding="utf-8")
    assert [node.host_name for node in take_snapshot(run, now=NOW).nodes] == ["gpu-a", "gpu-b"]
