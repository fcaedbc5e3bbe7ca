"""The last save of a run fails: real runs whose tier is a file system that is full, and whose ranks are killed then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from listeners import LOOPBACK, listeners_of
from rehearsed import events, finish, losses, processes_of, wait_until

from craton.agent import write_launch
from craton.bench.recovery.rehearsal import Rehearsal, end_rehearsal, write_rehearsal
from craton.orchestration import start_agents
from craton.orchestration.start import newest_checkpoint
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.node import process_start, read_heartbeat, read_status

STEPS = 6
ROOM = "64m"  # more than the state needs; the small disk has less


def rehearsal(name: str, disk: Path, nodes: int = 2, chaos: tuple[str, ...] = ()) -> Rehearsal:
    checkpoint = f"{{peer: 1 steps, tiers: [{{to: {disk}}}]}}"
    return Rehearsal(name, nodes=nodes, ranks_per_node=1, steps=STEPS, checkpoint=checkpoint, chaos=chaos)


@contextmanager
def running_without_rescue(root: Path, wanted: Rehearsal, stop_grace_seconds: float = 120.0) -> Iterator[RunDirectory]:
    """A run whose directory has no room for a checkpoint either."""
    run, launch = write_rehearsal(root, wanted)
    folder = run.path / "checkpoints" / "rescue"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)], check=True)
    try:
        write_launch(run, replace(launch, stop_grace_seconds=stop_grace_seconds))
        start_agents(run, launch)
        yield run
    finally:
        end_rehearsal(run)
        subprocess.run(["umount", str(folder)], check=True)


def make_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,size={ROOM}", str(disk)], check=True)


def held(run: RunDirectory, generation: int = 0) -> bool:
    found = [event for event in events(run, "state_unsaved") if event["generation"] >= generation]
    return bool(found) and bool(summarize(run).unsaved)


@pytest.mark.slow
def test_a_rank_killed_in_a_last_save_that_fails_costs_nothing(tmp_path: Path, small_disk: Path) -> None:
    chaos = (f"kill rank=1@step={STEPS},during=saving",)
    run, launch = write_rehearsal(tmp_path / "runs", rehearsal("killed", small_disk, chaos=chaos))
    try:
        start_agents(run, launch)
        finish(run)
    finally:
        end_rehearsal(run)
    assert [event["fault"] for event in events(run, "chaos_fired")] == list(chaos)
    assert sorted(losses(run)) == [*range(1, STEPS + 1)]
    saved = newest_checkpoint(run)
    assert saved is not None
    assert (saved.step, saved.tier) == (STEPS, "rescue")
    (recovered,) = events(run, "recovered")
    assert recovered["restored_from"] == "peer"


def test_a_state_that_no_disk_takes_stays_up_and_outlives_a_rank(tmp_path: Path, small_disk: Path) -> None:
    with running_without_rescue(tmp_path / "runs", rehearsal("full", small_disk)) as run:
        wait_until(lambda: held(run), "the ranks hold the state", run)
        summary = summarize(run)
        assert summary.state == "running"
        assert f"step {STEPS} is only in memory" in summary.unsaved
        assert f"{small_disk}" in summary.unsaved, "it says which tier"
        assert "craton stop full --now" in summary.unsaved
        if Path("/proc/net/tcp").exists():
            seen = listeners_of(processes_of(run))
            assert len(seen) >= 10, "2 agents, metrics, stores, keepers, and gloo of 2 ranks"
            assert {address for address, _ in seen} <= LOOPBACK, seen
        status = read_status(run, "node-1")
        assert status is not None
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        wait_until(lambda: held(run, generation=1), "the next generation holds it too", run)
        (restored,) = [event for event in events(run, "restored") if event["generation"] == 1]
        assert (restored["step"], restored["tier"]) == (STEPS, "peer")
        make_room(small_disk)
        finish(run)
        assert sorted(path.name for path in (small_disk / "full").glob("step-*")) == [f"step-{STEPS:08d}"]


@pytest.mark.slow
def test_a_stop_does_not_kill_ranks_whose_state_no_disk_takes(tmp_path: Path, small_disk: Path) -> None:
    grace = 8.0
    with running_without_rescue(tmp_path / "runs", rehearsal("stopped", small_disk, nodes=1), grace) as run:
        wait_until(lambda: held(run), "the rank holds the state", run)
        run.mark("STOP", "craton stop")
        told = wait_until(lambda: events(run, "ranks_told_to_end"), "the agent sees the marker", run)[0]
        wait_until(lambda: agent_time(run) > told["time"] + grace + 2.0, "the grace is long over", run)
        summary = summarize(run)
        assert (summary.state, bool(summary.unsaved)) == ("stopping", True)
        assert not events(run, "rank_killed")
        kill_rank(run)
        wait_until(lambda: held(run, generation=1), "the next generation holds it too", run)
        assert summarize(run).state == "stopping"
        make_room(small_disk)
        wait_until(lambda: not processes_of(run), "it stops", run)
        assert not run.has("FATAL"), run.marker_text("FATAL")
        saved = newest_checkpoint(run)
        assert saved is not None
        assert (saved.step, saved.tier) == (STEPS, str(small_disk))


@pytest.mark.slow
@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_stop_whose_state_no_disk_takes_outlives_an_agent(tmp_path: Path, small_disk: Path, node: str) -> None:
    with running_without_rescue(tmp_path / "runs", rehearsal("agentless", small_disk)) as run:
        wait_until(lambda: held(run), "the ranks hold the state", run)
        run.mark("STOP", "craton stop")
        wait_until(lambda: len(events(run, "ranks_told_to_end")) == 2, "both agents see the marker", run)
        beat = read_heartbeat(run, node)
        assert beat is not None
        os.kill(beat.pid, signal.SIGKILL)
        wait_until(lambda: held(run, generation=1), "the next generation holds it too", run)
        assert events(run, "agent_restarted")
        assert summarize(run).state == "stopping"
        make_room(small_disk)
        wait_until(lambda: not processes_of(run), "it stops", run)
        assert not run.has("FATAL"), run.marker_text("FATAL")
        assert sorted(losses(run)) == [*range(1, STEPS + 1)]
        saved = newest_checkpoint(run)
        assert saved is not None
        assert (saved.step, saved.tier) == (STEPS, str(small_disk))


@pytest.mark.slow
def test_a_stop_fails_when_the_last_copy_of_its_state_is_gone(tmp_path: Path, small_disk: Path) -> None:
    with running_without_rescue(tmp_path / "runs", rehearsal("gone", small_disk, nodes=1)) as run:
        wait_until(lambda: held(run), "the rank holds the state", run)
        run.mark("STOP", "craton stop")
        wait_until(lambda: events(run, "ranks_told_to_end"), "the agent sees the marker", run)
        keeper, before = events(run, "keeper_ready")[-1]["pid"], agent_time(run)
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not process_start(keeper) and agent_time(run) > before, "the agent goes on without it", run)
        assert summarize(run).unsaved, "the rank has the state still"
        kill_rank(run)
        wait_until(lambda: not processes_of(run), "it ends", run)
        assert f"the state of step {STEPS} was only in memory, and no copy of it is left" in run.marker_text("FATAL")
        assert "`craton resume gone` resumes from the beginning" in run.marker_text("FATAL")


def kill_rank(run: RunDirectory) -> None:
    status = read_status(run, "node-0")
    assert status is not None
    os.kill(status.ranks[0].pid, signal.SIGKILL)


def agent_time(run: RunDirectory) -> float:
    """When the agent last wrote the status of its ranks."""
    status = read_status(run, "node-0")
    return status.time if status is not None else 0.0


@pytest.mark.slow
def test_the_table_of_faults_has_a_row_of_this_fault(small_disk: Path) -> None:
    """`small_disk` skips the test where nothing can be mounted."""
    script = Path(__file__).parents[2] / "benchmarks" / "faults.py"
    done = subprocess.run(
        [sys.executable, str(script), "--fault", "full-tier-end"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| `full-tier-end` | saved to tier rescue, done |" in done.stdout
