"""What breaks on a cluster, on a real one: every run goes on by itself, and its last loss is that of a calm run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from slurm_lab import NODES, SlurmLab
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
from waiting import wait_until

from craton.orchestration.start import release_run
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

GPUS = "gres: 'gpu:8', preflight: quick, preflight_ignore: [gpu_driver, gpu_count]"  # which no driver knows
LIMIT = "time_limit: 1m, save_before: 40s"
ONE = "processes: 1\n"  # and not one for each of them


@pytest.mark.slow
def test_runs_come_back_by_themselves(root: Path, slurm: SlurmLab) -> None:
    """A node killed, a node set down, the time limit and a preemption, side by side."""
    steps = {"killed": 100, "down": 100, "limited": 320, "preempted": 100}
    runs = {
        "killed": submit(root, chain_job("killed", 2, steps["killed"], 0.1, GPUS, ONE)),
        "limited": submit(root, chain_job("limited", 1, steps["limited"], 0.1, LIMIT)),
        "down": submit(root, chain_job("down", 2, steps["down"], 0.1, GPUS, ONE)),
    }
    # The second node: the batch script is on the first, which Slurm itself watches over.
    wait_for_step(runs["killed"], 12)
    lost = hosts_of(runs["killed"])["node-1"]
    slurm.kill_node(lost)
    wait_for_step(runs["down"], 12)
    taken_down = hosts_of(runs["down"])["node-1"]
    slurm.set_down(taken_down, "xid 79")
    # Not before: without GPUs there is no pre-flight, and it would be done by now.
    runs["preempted"] = submit(root, chain_job("preempted", 1, steps["preempted"], 0.1, "partition: low"))
    wait_for_step(runs["preempted"], 12)
    wanted = hosts_of(runs["preempted"])["node-0"]
    slurm.submit(f"--nodelist={wanted}", "--exclusive", "--partition=urgent", "--time=5", command="sleep 3")
    wait(lambda: look(runs["preempted"]).state == "waiting", "it gave way", runs["preempted"])

    for name, run in runs.items():
        wait_for_run(run, "done")
        expect_whole_chain(run, steps[name])
        assert len(events_of(run, "allocated")) >= 2, f"{name} was not started again"
    assert events_of(runs["killed"], "nodes_lost"), "the agents saw it before Slurm did"
    assert lost not in hosts_of(runs["killed"]).values()
    assert taken_down not in hosts_of(runs["down"]).values()
    assert events_of(runs["limited"], "requeued")
    for name in ("limited", "preempted"):
        assert steps_done(runs[name]) == steps[name], f"{name} saved before it left, so that no step is done twice"


def started_more_than(run: RunDirectory, times: int) -> bool:
    return len(events_of(run, "allocated")) > times


def steps_done(run: RunDirectory) -> int:
    """How often a step was done, again or not."""
    return sum("run_loss" in line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0])


@pytest.mark.slow
def test_a_failing_prolog_costs_a_run_nothing(root: Path, slurm: SlurmLab) -> None:
    """Its node is set down, and the next one it is given cannot start it: it goes on from its checkpoint on a third."""
    run = submit(root, chain_job("prolog", 1, 60, 0.05))
    wait_for_step(run, 12)
    (first,) = hosts_of(run).values()
    slurm.break_prolog(second := next(node for node in NODES if node != first))
    slurm.set_down(first, "xid 79")
    wait_for_run(run, "done")
    expect_whole_chain(run, 60)
    (last,) = hosts_of(run).values()
    assert last not in (first, second)
    assert second in slurm.nodes_in("drain"), "it was given the node, and Slurm drained it"
    assert len(events_of(run, "allocated")) == 2


@pytest.mark.slow
def test_a_held_run_is_let_go_by_whoever_looks(root: Path, slurm: SlurmLab) -> None:
    """Where Slurm holds what a prolog failed for: once for a run that may be started again, not at all for another."""
    slurm.hold_after_prolog()
    slurm.break_prolog("g1")
    run = submit(root, chain_job("held", 1, 10))
    told = ""

    def is_let_go() -> bool:
        nonlocal told
        told = look(run).message
        return "released it" in told

    wait(is_let_go, "it is let go", run)
    assert "the prolog failed" in told
    assert "(1 of at most 10 times, run.restarts)" in told
    wait_for_run(run, "done")
    expect_whole_chain(run, 10)

    for node in NODES:
        slurm.break_prolog(node)
    once = submit(root, chain_job("once", 1, 10, run="restarts: 0"))
    wait(lambda: "launch_failed" in standing(once).reason, "Slurm holds it", once)
    assert "`craton resume` releases it" in look(once).message
    slurm.mend_prologs()
    assert release_run(once)
    wait_for_run(once, "done")
    assert not release_run(once), "it is not held any more"
    expect_whole_chain(once, 10)


@pytest.mark.slow
def test_slices_of_the_time_limit_are_not_counted(root: Path, slurm: SlurmLab) -> None:
    """Three times the warning that comes before a time limit, where one start for nothing would be one too many."""
    run = submit(root, chain_job("sliced", 1, 100, 0.05, "restarts: 1, time_limit: 5m, save_before: 2m"))
    for number in range(1, 4):
        wait_for_step(run, 20 * number)
        slurm("scancel", "--batch", "--signal=USR1", standing(run).job)
        wait(partial(started_more_than, run, number), "it is started again", run)
    wait_for_run(run, "done")
    expect_whole_chain(run, 100)
    assert steps_done(run) == 100
    assert len(events_of(run, "requeued")) == 3


@pytest.mark.slow
def test_too_few_nodes_left_of_a_job_that_slurm_does_not_kill(root: Path, slurm: SlurmLab) -> None:
    """With spares the job is submitted with --no-kill, so that Slurm leaves it alone when nodes die; when more die than
    there are spares, it is requeued by itself, and not onto those."""
    run = submit(root, chain_job("thinned", 2, 200, 0.1, GPUS, f"{ONE}recover: {{spares: 1}}\n"))
    assert "#SBATCH --no-kill\n" in (run.path / "job.sbatch").read_text()
    wait_for_step(run, 12)
    lost = [hosts_of(run)[node] for node in ("node-1", "node-2")]
    for host in lost:
        slurm.kill_node(host)
    wait(lambda: events_of(run, "requeued"), "it is requeued", run)
    (event,) = events_of(run, "nodes_lost")
    assert "too few nodes are left" in str(event["message"])
    wait_for_run(run, "done")
    expect_whole_chain(run, 200)
    assert not set(hosts_of(run).values()) & set(lost)
    assert len(events_of(run, "requeued")) == 1


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
