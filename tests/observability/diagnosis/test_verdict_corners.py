"""Verdicts that the scored bench, or a live run, once showed to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_snapshots import (
    MOMENT,
    healthy,
    slowed,
    slowed_all,
    with_host,
    with_nodes,
    with_rank,
    with_run,
    with_scheduler,
)

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect.records import signalled_ranks, stuck_ranks
from craton.observability.diagnosis.rules.resources import more_work
from craton.observability.diagnosis.snapshot import (
    LogMatch,
    Snapshot,
    SnapshotBadStep,
    SnapshotRank,
    SnapshotStuckRank,
)
from craton.telemetry.node import ProcessResources


def ended(snapshot: Snapshot, message: str, **kinds: str) -> Snapshot:
    """All ranks were ended by their agents; `kinds` are what some were in, by r0, r1, ..."""
    ranks = tuple(
        replace(rank, is_alive=False, exit_code=-15, ended_at=MOMENT, ended_in=kinds.get(f"r{rank.rank}", "productive"))
        for rank in snapshot.ranks
    )
    return with_run(replace(snapshot, ranks=ranks), state="failed", message=message)


@pytest.mark.parametrize("who", ["rank 1 hangs", "all 16 ranks hang"])
def test_ranks_that_agents_end_for_a_hang_were_not_killed_by_somebody(who: str) -> None:
    verdict = diagnose(ended(healthy(2), f"{who} in productive at step 46: no progress for 4.0 s", r9="data"))
    assert (verdict.condition, verdict.cause, verdict.rank) == ("dead", "data_hung", 9)
    verdict = diagnose(ended(healthy(2), f"{who} in productive at step 46: no progress for 4.0 s"))
    assert (verdict.cause, verdict.rank, verdict.node) == ("rank_hung", None, "")


@pytest.mark.parametrize(("slower", "cause"), [(2.0, "processor_contention"), (8.0, "compute_slow")])
def test_waiting_for_a_cpu_explains_only_as_much_as_was_waited(slower: float, cause: str) -> None:
    run = slowed_all(healthy(1, 2, on="local", is_accelerated=False), slower, "compute")
    half = ProcessResources(cpus=2, node_cpus=2, waited_share=0.5)
    run = replace(run, ranks=tuple(replace(rank, resources=half) for rank in run.ranks))
    assert diagnose(with_host(run, processors=2, load=4.0, foreign_processor_share=0.5)).cause == cause


@pytest.mark.parametrize(("more", "cause"), [(1.2, "processor_contention"), (3.0, "compute_slow")])
def test_steps_that_do_more_are_not_blamed_on_other_processes(more: float, cause: str) -> None:
    run = slowed_all(healthy(1, 2, on="local", is_accelerated=False), 4.0, "compute")
    used = ProcessResources(
        cpus=2, node_cpus=2, waited_share=0.7, step_cpu_seconds=0.1 * more, usual_step_cpu_seconds=0.1
    )
    run = replace(run, ranks=tuple(replace(rank, resources=used) for rank in run.ranks))
    verdict = diagnose(with_host(run, processors=2, load=4.0, foreign_processor_share=0.5))
    assert verdict.cause == cause
    assert ("300 ms of CPU time, 100 ms before" in verdict.sentence) == (more == 3.0)


def test_a_step_that_was_too_short_for_a_measurement_used_at_most_all_cpus() -> None:
    (rank,) = healthy(1, 1).ranks
    steps = {"recent": {"step": 1.1}, "earlier": {"step": 0.036}}
    heavy = replace(rank, **steps, resources=ProcessResources(cpus=2, step_cpu_seconds=0.5))
    light = replace(heavy, resources=ProcessResources(cpus=2, step_cpu_seconds=0.09))
    run = healthy(1, 1, on="local", is_accelerated=False)
    assert more_work(run, [heavy]) == "a step of rank 0 takes 500 ms of CPU time, 72.0 ms at most before"
    assert more_work(run, [light]) == ""


def test_the_cpu_time_of_ranks_that_poll_their_gpus_is_not_work() -> None:
    used = ProcessResources(cpus=2, node_cpus=2, step_cpu_seconds=0.3, usual_step_cpu_seconds=0.1)
    cpus = slowed_all(healthy(1, 2, on="local", is_accelerated=False), 2.0, "compute")
    cpus = replace(cpus, ranks=tuple(replace(rank, resources=used) for rank in cpus.ranks))
    gpus = with_run(cpus, is_accelerated=True)
    assert more_work(cpus, cpus.ranks) == "a step of rank 0 takes 300 ms of CPU time, 100 ms before"
    assert more_work(gpus, gpus.ranks) == ""
    assert ["of CPU time" in diagnose(run).sentence for run in (cpus, gpus)] == [True, False]


def with_series(**series: Sequence[float]) -> Snapshot:
    run = healthy(1, 2)
    points = {name: tuple(enumerate(values, start=1)) for name, values in series.items()}
    return replace(run, series=replace(run.series, **points))


@pytest.mark.parametrize(
    "losses",
    [
        [0.5, 0.3, *[0.0001] * 150],  # few digits are printed
        [0.7106] * 150,  # it may have begun a moment ago
        [value for value in (0.7311, 0.7204, 0.7106) for _ in range(120)],  # one loss of many steps
    ],
)
def test_losses_that_a_command_prints_may_be_equal(losses: list[float]) -> None:
    assert diagnose(with_run(with_series(loss=losses), kind="command")).condition != "wrong"


def test_a_loss_that_diverges_is_not_blamed_on_the_limit_that_skips_its_steps() -> None:
    run = with_series(
        loss=[2.0 + 0.01 * (step % 5) for step in range(160)] + [9.0 + 0.01 * (step % 5) for step in range(40)]
    )
    skipped = tuple(SnapshotBadStep(step, "the loss is 9, over 3 times", "skip", 0, MOMENT) for step in range(160, 200))
    verdict = diagnose(with_run(replace(run, bad_steps=skipped), generation=0))
    assert verdict.cause == "diverged"


@pytest.mark.parametrize(
    ("waits", "saves"),
    [
        ([0.1] * 200, [6.0 if step % 50 == 0 else 0.0 for step in range(200)]),  # the pauses are saves
        ([4.7 if step % 20 == 0 and step < 120 else 0.001 for step in range(200)], [0.0] * 200),  # they are over
    ],
)
def test_pauses_that_are_not_for_data(waits: list[float], saves: list[float]) -> None:
    steps = [0.15 + wait + save for wait, save in zip(waits, saves, strict=True)]
    assert "long pause" not in diagnose(with_series(step_seconds=steps, data_seconds=waits)).sentence


def test_a_pod_that_waits_is_not_the_prolog_of_slurm() -> None:
    starts = replace(healthy(4), ranks=tuple(SnapshotRank(rank.rank, rank.node) for rank in healthy(4).ranks))
    starts = with_run(starts, on="kubernetes", state="starting", step=None)
    starts = with_scheduler(starts, sentence="1 of 4 pods waits: the image is being pulled")
    assert diagnose(starts).cause != "job_not_begun"


def test_the_stacks_of_a_hang_name_the_rank_that_the_others_waited_for() -> None:
    """By the message alone it would be rank 1, which only waited."""
    run = ended(healthy(2), "rank 1 hangs in productive at step 46: no progress for 6.0 s")
    verdict = diagnose(
        with_run(run, stuck=(SnapshotStuckRank(9, "rank 9 has been in productive for 6 s (model.py:3 in forward)"),))
    )
    assert (verdict.condition, verdict.cause, verdict.rank, verdict.node) == ("dead", "rank_hung", 9, "node-1")
    verdict = diagnose(
        with_run(run, stuck=(SnapshotStuckRank(9, "rank 9 has been in productive (reward.py:3)", is_user_frame=True),))
    )
    assert (verdict.cause, verdict.rank) == ("user_code_blocked", 9)


def test_which_ranks_stacks_show_as_stuck() -> None:
    def stuck(rank: int, step: int = 46, **more: object) -> dict[str, object]:
        line = {"event": "rank_stuck", "rank": rank, "generation": 0, "stuck_step": step, "frame": "a.py:1 in f"}
        return {**line, "waits": True, **more}

    ends = [{"event": "rank_ended", "rank": rank, "generation": 0, "step": 46} for rank in range(4)]
    waiting = [stuck(rank) for rank in (0, 2, 3)]
    assert stuck_ranks([*waiting, stuck(1, waits=False, message="m"), *ends], 0, 4) == (SnapshotStuckRank(1, "m"),)
    assert stuck_ranks([*waiting, stuck(1, 12, waits=False, message="m"), *ends], 0, 4) == ()  # it has gone on since
    assert stuck_ranks([stuck(1, waits=False), stuck(2, waits=False), *ends], 0, 4) == ()  # no rank waited
    own = stuck(1, waits=False, is_user_frame=True, message="m")  # no rank waited by its stack, and one is in user code
    assert stuck_ranks([own, stuck(2, waits=False), *ends], 0, 4) == (SnapshotStuckRank(1, "m", True),)
    frozen = stuck(1, waits=False, frame="", message="m", channels=["__refrigerator"])
    (found,) = stuck_ranks([*waiting, frozen, *ends], 0, 4)
    assert found.sentence == "m; in the kernel: __refrigerator"
    assert {rank.rank for rank in stuck_ranks([*waiting, stuck(1), *ends], 0, 4)} == {
        0,
        1,
        2,
        3,
    }  # all waited for each other
    assert stuck_ranks([*waiting, stuck(1, waits=False, message="m"), *ends], 1, 4) == ()


def test_whose_signal_stopped_a_run() -> None:
    def event(name: str, **more: object) -> dict[str, object]:
        return {"event": name, "generation": 0, **more}

    foreign, own = event("stop_signal", rank=1), event("stop_signal", rank=2)
    told, started = event("ranks_told_to_end", node="a"), event("agent_started", node="a")
    assert signalled_ranks([started, foreign], 0) == (1,)
    assert signalled_ranks([started, foreign, told, own], 0) == (1,)
    assert signalled_ranks([started, told, own], 0) == ()
    assert signalled_ranks([started, foreign, started, told, own], 0) == ()  # resumed, then stopped
    assert signalled_ranks([started, told, own, started, foreign], 0) == (1,)


def test_a_rank_that_was_stopped_until_its_run_was_ended() -> None:
    verdict = diagnose(ended(healthy(2), "rank 9 is stopped by a signal at step 40: no progress for 4.1 s"))
    assert (verdict.condition, verdict.layer, verdict.cause, verdict.rank) == ("dead", "host", "rank_stopped", 9)


def test_a_rank_that_is_stopped_for_an_instant_goes_on() -> None:
    run = with_rank(healthy(2), 3, is_stopped=True, progress_age_seconds=0.4, recorded_at=MOMENT - 0.4)
    assert diagnose(run).condition == "healthy"
    run = with_rank(healthy(2), 3, is_stopped=True, progress_age_seconds=60.0, recorded_at=MOMENT - 60.0)
    assert (diagnose(run).condition, diagnose(run).cause) == ("hung", "rank_stopped")


def test_whose_connection_broke_is_not_to_blame() -> None:
    run = with_rank(healthy(2), 3, is_alive=False, exit_code=1, ended_at=MOMENT - 5.0)
    run = with_run(run, state="failed", message="rank 3 on node-0 ended with code 1")
    line = LogMatch("peer_closed", "ConnectionError: Connection closed by peer", 3, "", MOMENT)
    assert diagnose(run).cause == "rank_failed"
    assert diagnose(replace(run, logs=(line,))).layer == "collective"


def dead(exit_codes: list[int], lines: dict[int, tuple[str, str]]) -> Snapshot:
    """A run whose ranks ended so, rank 0 first; `lines` are the pattern and the line of a rank's log."""
    run = with_run(healthy(2, 2), state="failed", message="rank 0 on node-0 exited with code 1")
    for rank, code in enumerate(exit_codes):
        run = with_rank(run, rank, is_alive=False, exit_code=code, ended_at=MOMENT - 5.0 + rank)
    logs = tuple(LogMatch(pattern, line, rank, "", MOMENT) for rank, (pattern, line) in lines.items())
    return replace(run, logs=logs)


def test_whom_all_others_lost_is_named() -> None:
    closed = ("peer_closed", "ConnectionError: Connection closed by peer")
    verdict = diagnose(dead([1, 1, -15, 1], dict.fromkeys((0, 1, 3), closed)))
    assert (verdict.layer, verdict.node, verdict.rank) == ("collective", "node-1", 2)
    two = diagnose(dead([1, -15, -15, 1], dict.fromkeys((0, 3), closed)))
    assert (two.layer, two.rank) == ("collective", 0)  # nobody stands out but who said so first


def test_who_calls_another_collective_is_named() -> None:
    text = "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: {}"
    called = "CollectiveFingerPrint(SequenceNumber=3, OpType={}, TensorShape=[8], TensorDtypes=Float"
    lines = {
        rank: ("collective_mismatch", text.format(rank, called.format("ALLGATHER" if rank == 1 else "ALLREDUCE")))
        for rank in range(4)
    }
    verdict = diagnose(dead([1, 1, 1, 1], lines))
    assert (verdict.cause, verdict.node, verdict.rank) == ("collective_mismatch", "node-0", 1)
    alike = dict.fromkeys(range(4), lines[0])
    assert diagnose(dead([1, 1, 1, 1], alike)).rank == 0


def test_a_crowd_that_others_live_with_does_not_explain_one_slow_rank() -> None:
    run = with_run(slowed(healthy(2), {11: 1.5}), is_accelerated=False)
    for node in ("node-0", "node-1"):
        run = with_host(run, node, processor_pressure=0.9, foreign_processor_share=0.8)
    verdict = diagnose(run)
    assert (verdict.condition, verdict.cause, verdict.rank) == ("slow", "straggler", 11)


def test_two_groups_of_slow_ranks_are_two_symptoms() -> None:
    run = slowed(healthy(4), {11: 2.0, **dict.fromkeys(range(24, 32), 1.3)})
    run = with_host(run, "node-3", steal_share=0.4)
    verdict = diagnose(run)
    assert verdict.rank == 11
    assert [(each.cause, each.node) for each in verdict.others] == [("processor_stolen", "node-3")]


def test_agents_that_live_on_a_disk_that_takes_no_heartbeat_are_not_lost() -> None:
    old = with_nodes(healthy(2), lambda node: replace(node, heartbeat_age_seconds=60.0, agent_is_alive=True))
    assert diagnose(old).condition == "dead"
    verdict = diagnose(with_run(old, storage="/fsx/runs/words is read-only: make its file system writable again"))
    assert (verdict.condition, verdict.cause) == ("healthy", "storage_read_only")
