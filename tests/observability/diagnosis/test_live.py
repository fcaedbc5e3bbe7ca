"""`craton why` of runs that live on this machine, while something is wrong with them: real agents and processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from craton.agent.processes import free_port
from craton.bench.recovery.rehearsal import Rehearsal, running
from craton.cli.app import app
from craton.job import parse_job
from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.observability.diagnosis.snapshot import Snapshot
from craton.orchestration.draft import draft_run
from craton.orchestration.start import start_run
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat, read_status

RANK = Path(__file__).with_name("lockstep.py")


def start(root: Path, nodes: int = 2, **environment: object) -> RunDirectory:
    env = ", ".join(f"{key}: '{value}'" for key, value in environment.items())
    job = parse_job(
        f"name: sick\nkind: command\ncommand: [{sys.executable}, {RANK}]\nprocesses: 2\ncluster: local x {nodes}\n"
        f"recover: {{tries: 0}}\nrun: {{env: {{{env}}}}}\n",
        folder=RANK.parent,
    )
    return start_run(draft_run(job, root / job.name, port=free_port()), root)


def wait_for_verdict(run: RunDirectory, is_right: Callable[[Snapshot, Verdict], bool]) -> tuple[Snapshot, Verdict]:
    seen: list[tuple[Snapshot, Verdict]] = []

    def look() -> bool:
        snapshot = take_snapshot(run)
        seen[:] = [(snapshot, diagnose(snapshot))]
        return is_right(*seen[0])

    wait_until(look, lambda: f"{seen[0][1].sentence}\n{seen[0][0].to_json()}", look_seconds=0.1)
    return seen[0]


def trains(snapshot: Snapshot, verdict: Verdict) -> bool:
    """Whether all ranks make steps; on a busy machine they may be slow."""
    is_moving = verdict.condition in ("healthy", "slow")
    return is_moving and all(rank.num_recent >= 10 and rank.pid for rank in snapshot.ranks)


def craton(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


def test_a_rank_that_is_stopped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(root)
    snapshot, _ = wait_for_verdict(run, trains)
    assert [rank.node for rank in snapshot.ranks] == ["node-0", "node-0", "node-1", "node-1"]
    assert snapshot.nodes[0].host is not None
    assert snapshot.nodes[0].mounts
    victim = snapshot.ranks[2]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)
    # Its agent ends it after four seconds; on a busy machine, a diagnosis may take as long.
    _, verdict = wait_for_verdict(run, lambda _, found: found.condition in ("hung", "dead"))
    assert (verdict.layer, verdict.cause, verdict.node, verdict.rank) == ("host", "rank_stopped", "node-1", 2)
    wait_for_verdict(run, lambda snapshot, _: snapshot.run.state == "failed")
    printed: dict[str, Any] = json.loads(craton(capsys, "why", "sick", "--json"))
    assert (printed["condition"], printed["cause"], printed["rank"]) == ("dead", "rank_stopped", 2)


def test_a_rank_that_is_stopped_and_continued(root: Path) -> None:
    run = start(root)
    snapshot, _ = wait_for_verdict(run, trains)
    victim = snapshot.ranks[2].pid
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    os.kill(victim, signal.SIGCONT)
    reached = snapshot.ranks[2].step or 0
    wait_for_verdict(run, lambda now, found: found.condition == "healthy" and (now.ranks[2].step or 0) > reached)


def test_a_rank_that_is_slow(root: Path) -> None:
    run = start(root, VICTIM=3, FAULT="slow")
    _, verdict = wait_for_verdict(run, lambda _, found: found.condition == "slow")
    assert (verdict.node, verdict.rank) == ("node-1", 3)
    # This machine may be busy with other tests, or share its CPUs with other virtual machines.
    assert verdict.cause in ("straggler", "processor_contention", "processor_stolen")
    assert "waits least" in " ".join(verdict.evidence)


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [("raise", "user_code_failed", "ValueError: the reward function broke"), ("disk", "storage_full", "[Errno 28]")],
)
def test_a_rank_that_fails(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str, cause: str, words: str
) -> None:
    run = start(root, VICTIM=1, FAULT=fault)
    _, verdict = wait_for_verdict(run, lambda snapshot, _: snapshot.run.state == "failed")
    assert (verdict.condition, verdict.cause, verdict.node, verdict.rank) == ("dead", cause, "node-0", 1)
    saved = tmp_path / "snapshot.json"
    out = craton(capsys, "why", "--save", str(saved))
    assert "sick has failed" in out
    assert words in out
    assert craton(capsys, "why", "--replay", str(saved)) == out


def test_a_node_that_is_lost(root: Path) -> None:
    run = start(root)
    wait_for_verdict(run, trains)
    beat = read_heartbeat(run, "node-1")
    assert beat is not None
    os.kill(beat.pid, signal.SIGKILL)
    _, verdict = wait_for_verdict(run, lambda _, found: found.condition == "dead")
    assert (verdict.layer, verdict.cause, verdict.node) == ("host", "node_lost", "node-1"), verdict.sentence


@pytest.mark.slow
def test_a_rank_that_is_killed(root: Path) -> None:
    run = start(root)
    snapshot, _ = wait_for_verdict(run, trains)
    status = read_status(run, "node-0")
    assert status is not None
    os.kill(status.ranks[1].pid, signal.SIGKILL)
    snapshot, verdict = wait_for_verdict(run, lambda snapshot, _: snapshot.run.state == "failed")
    assert (verdict.condition, verdict.layer, verdict.node, verdict.rank) == ("dead", "host", "node-0", 1)
    assert verdict.cause in ("rank_killed", "out_of_memory")
    assert snapshot.ranks[1].exit_code == -signal.SIGKILL


def test_a_loss_that_is_no_number(root: Path) -> None:
    run = start(root, nodes=1, FAULT="nan")
    _, verdict = wait_for_verdict(run, lambda _, found: found.condition == "wrong")
    assert (verdict.layer, verdict.cause) == ("framework", "not_a_number")


@pytest.mark.slow
def test_a_training_that_is_stopped_and_comes_back(root: Path) -> None:
    with running(root, Rehearsal("trains", steps=100_000)) as run:
        snapshot, _ = wait_for_verdict(run, trains)
        pid = snapshot.ranks[3].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        _, verdict = wait_for_verdict(run, lambda _, found: found.condition == "hung")
        assert (verdict.cause, verdict.node, verdict.rank) == ("rank_stopped", "node-1", 3)
        _, verdict = wait_for_verdict(run, lambda found, verdict: trains(found, verdict) and found.run.restarts > 0)
        assert "restarted once" in verdict.sentence


SOURCE = """
import os, sys
def samples(job):
    def sample(index):
        if index >= 80 and os.environ["RANK"] == "1":
            FAULT
        return [index % 16] * (job.sequence + 1)
    return sample
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        ("raise ValueError('no such row')", "user_code_failed", "ValueError: no such row"),
        ("os._exit(0)", "exited_early", "exited with code 0"),
        ("sys.exit(0)", "exited_early", "SystemExit"),
    ],
)
def test_a_training_whose_data_source_fails(root: Path, tmp_path: Path, fault: str, cause: str, words: str) -> None:
    (tmp_path / "failing_source.py").write_text(SOURCE.replace("FAULT", fault))
    job = parse_job(
        "name: sick\nkind: pretrain\nmodel: {name: tiny, layers: 1, hidden: 64, ffn_hidden: 128, heads: 2, vocab: 16}\n"
        "data: {source: 'failing_source:samples', sequence: 32}\n"
        "train: {global_batch_sequences: 4, steps: 60, precision: fp32, learning_rate: 1e-3}\n"
        "cluster: local x 2\nrecover: {tries: 1}\n",
        folder=tmp_path,
    )
    run = start_run(draft_run(job, root / job.name, port=free_port(), job_folder=tmp_path), root)
    _, verdict = wait_for_verdict(run, lambda snapshot, _: snapshot.run.state == "failed")
    assert (verdict.condition, verdict.cause, verdict.node, verdict.rank) == ("dead", cause, "node-1", 1)
    assert words in verdict.sentence
    assert words in run.marker_text("FATAL").splitlines()[0]
