"""What breaks on a cluster, on a real one: every run goes on by itself, and its last loss is that of a calm run."""

from __future__ import annotations

from pathlib import Path

from slurm_lab import SlurmLab, wait_until
from slurm_runs import (
    chain_job,
    events_of,
    expect_whole_chain,
    hosts_of,
    look,
    standing,
    submit,
    wait,
    wait_for_run,
    wait_for_step,
)

from craton.orchestration import release_run
from craton.telemetry import RunDirectory, read_lines

LIMIT = "gres: 'gpu:8', time_limit: 1m, save_before: 40s"


def test_runs_come_back_by_themselves(root: Path, slurm: SlurmLab) -> None:
    """A node killed, a node set down, the time limit and a preemption, side by side; beside them one that Slurm holds
    after a failed prolog, which goes on when it is let go."""
    held = hold_by_prolog(root, slurm)
    steps = {"killed": 100, "down": 100, "limited": 320, "preempted": 100}
    runs = {
        "killed": submit(root, chain_job("killed", 2, steps["killed"], 0.1, "gres: 'gpu:8'")),
        "limited": submit(root, chain_job("limited", 1, steps["limited"], 0.1, LIMIT)),
        "down": submit(root, chain_job("down", 2, steps["down"], 0.1, "gres: 'gpu:8'")),
        "preempted": submit(root, chain_job("preempted", 1, steps["preempted"], 0.1, "partition: low")),
    }
    # The second node: the batch script is on the first, which Slurm itself watches over.
    wait_for_step(runs["killed"], 12)
    lost = hosts_of(runs["killed"])["node-1"]
    slurm.kill_node(lost)
    wait_for_step(runs["down"], 12)
    taken_down = hosts_of(runs["down"])["node-1"]
    slurm.set_down(taken_down, "xid 79")
    wait_for_step(runs["preempted"], 12)
    wanted = hosts_of(runs["preempted"])["node-0"]
    slurm.submit(f"--nodelist={wanted}", "--exclusive", "--partition=urgent", "--time=5", command="sleep 3")
    wait(lambda: look(runs["preempted"]).state == "waiting", "it gave way", runs["preempted"], 40)

    assert release_run(held)
    wait_for_run(held, "done")
    assert not release_run(held), "it is not held any more"
    expect_whole_chain(held, 10)

    for name, run in runs.items():
        wait_for_run(run, "done", seconds=120)
        expect_whole_chain(run, steps[name])
        assert len(events_of(run, "allocated")) >= 2, f"{name} was not started again"
    assert events_of(runs["killed"], "nodes_lost"), "the agents saw it before Slurm did"
    assert lost not in hosts_of(runs["killed"]).values()
    assert taken_down not in hosts_of(runs["down"]).values()
    assert events_of(runs["limited"], "requeued")
    for name in ("limited", "preempted"):
        assert steps_done(runs[name]) == steps[name], f"{name} saved before it left, so that no step is done twice"


def hold_by_prolog(root: Path, slurm: SlurmLab) -> RunDirectory:
    """A run that Slurm holds, because the first node could not start it; the node is well again."""
    slurm.break_prolog("g1")
    run = submit(root, chain_job("held", 1, 10))
    wait(lambda: "launch_failed" in standing(run).reason, "Slurm holds it", run, 30)
    summary = look(run)
    assert summary.state == "waiting"
    assert "its prolog failed" in summary.message
    assert "craton resume" in summary.message
    slurm.mend_prolog("g1")
    return run


def steps_done(run: RunDirectory) -> int:
    """How often a step was done, again or not."""
    return sum("run_loss" in line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0])


def test_a_node_that_fails_its_health_check_is_drained_and_avoided(root: Path, slurm: SlurmLab) -> None:
    slurm.make_unhealthy("g2", "hc: ecc row remap")
    wait_until(lambda: "g2" in slurm.nodes_in("drain"), "g2 is drained")
    busy = slurm.occupy("g3", "g4", "g5", "g6", "g7", "g8", minutes=20)
    run = submit(root, chain_job("healthy", 2, 10))
    wait(lambda: "free" in standing(run).sentence, "Slurm has looked at it", run)
    assert "g2 is drained (hc: ecc row remap)" in standing(run).sentence
    assert f"when job {busy} ends" in standing(run).sentence
    slurm("scancel", busy)
    wait_for_run(run, "done")
    assert "g2" not in hosts_of(run).values()
