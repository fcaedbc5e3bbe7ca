"""Whether a run moves, and which rank the others wait for, over what agents may report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craton.telemetry.node import NodeStatus, RankStatus
from craton.telemetry.progress import (
    MIN_STUCK_SECONDS,
    RankActivity,
    activities_of,
    assess_progress,
    find_culprits,
)
from craton.telemetry.rank import LEDGER_KINDS

NOW = 1_800_000_000.0
SHORT = {"data": 0.0}  # how long the other ranks stayed


def rank(number: int, kind: str = "productive", age: float = 0.1, step: int = 10, **fields: object) -> RankActivity:
    known = {"step_seconds": 0.2, "slowest_seconds": 0.3, "node": f"node-{number}", **fields}
    return RankActivity(number, kind, step, age, **known)  # type: ignore[arg-type]


def silent(number: int, sleeps_in: str) -> RankActivity:
    """A process of a command whose progress is read from another one."""
    return RankActivity(number, "start", 0, 0.0, node=f"node-{number}", sleeps_in=sleeps_in)


def first(number: int, kind: str, age: float, **fields: object) -> RankActivity:
    """A rank in its first step."""
    return rank(number, kind, age, **{"step": 1, "step_seconds": 0.0, "slowest_seconds": 0.0, **fields})  # type: ignore[arg-type]


def saving(age: float, **phase_seconds: float) -> list[RankActivity]:
    return [rank(0, "checkpoint", age, 9, phase_seconds=phase_seconds), rank(1, age=age)]


@pytest.mark.parametrize(
    ("name", "ranks", "state", "named"),
    [
        ("steady steps", [rank(0), rank(1)], "moving", ()),
        ("data never comes", [rank(0, age=6.0), rank(1, "data", 6.0)], "stuck", (1,)),
        ("data is late", [rank(0, age=4.9), rank(1, "data", 4.9)], "moving", ()),
        ("long steps", [rank(n, "data", 29.0, 10 + n, slowest_seconds=3.0) for n in (0, 1)], "moving", (0,)),
        ("no CPU", [rank(0, age=9.0, starved_seconds=4.5), rank(1, "data", 9.0)], "moving", ()),
        (
            "unlike the other",
            [first(0, "compile", 11.0, phase_seconds={"data": 0.0}), first(1, "data", 11.0)],
            "stuck",
            (1,),
        ),
        ("first data of all", [first(0, "data", 50.0), first(1, "data", 50.0)], "starting", ()),
        ("first data of one", [first(0, "compile", 8.0), first(1, "data", 8.0)], "starting", (1,)),
        ("a compilation", [first(0, "compile", 300.0), first(1, "compile", 300.0)], "starting", ()),
        ("an eager first step", [first(n, "compile", 61.0, is_eager=True) for n in (0, 1)], "stuck", (0, 1)),
        ("a usual save", saving(50.0, checkpoint=20.0), "moving", (0,)),
        ("a save that is too long", saving(61.0, checkpoint=20.0), "stuck", (0,)),
        ("a first save", saving(300.0), "moving", (0,)),
        (
            "sleeps on a timer",
            [rank(0, age=6.0, sleeps_in="futex_do_wait"), rank(1, age=6.0, sleeps_in="hrtimer_nanosleep")],
            "stuck",
            (1,),
        ),
        (
            "another process of the command sleeps",
            [rank(0, age=6.0, sleeps_in="futex_do_wait"), silent(1, "anon_pipe_read"), silent(2, "futex_do_wait")],
            "stuck",
            (1,),
        ),
        (
            "the only one that reports sleeps itself",
            [rank(0, age=6.0, sleeps_in="hrtimer_nanosleep"), silent(1, "hrtimer_nanosleep")],
            "stuck",
            (0,),
        ),
        (
            "all sleep on timers",
            [rank(n, age=6.0, sleeps_in="hrtimer_nanosleep") for n in (0, 1)],
            "stuck",
            (0, 1),
        ),
        (
            "waits for a lock on a file",
            [rank(0, age=6.0, sleeps_in="locks_lock_inode_wait"), rank(1, age=6.0, sleeps_in="ep_poll")],
            "stuck",
            (0,),
        ),
        ("a stopped rank", [rank(0, age=2.0), rank(1, age=2.0, is_stopped=True)], "stuck", (1,)),
        ("stopped a moment ago", [rank(0, age=0.5), rank(1, age=0.5, is_stopped=True)], "moving", ()),
        ("spins, by its stack", [rank(0, age=6.0, is_waiting=True), rank(1, age=6.0)], "stuck", (1,)),
        ("spins", [rank(0, age=6.0, process_state="S"), rank(1, age=6.0, process_state="R")], "stuck", (1,)),
        ("nobody stands out", [rank(0, age=6.0), rank(1, age=6.2)], "stuck", (1, 0)),
        ("while one of them moves", [rank(0, age=60.0), rank(1, age=0.2)], "moving", ()),
        ("behind", [rank(0, age=6.0, step=11), rank(1, age=6.0)], "stuck", (1,)),
        ("its own patience", [rank(0, age=59.0, patience_seconds=60.0)], "moving", (0,)),
        ("beyond its patience", [rank(0, age=61.0, patience_seconds=60.0)], "stuck", (0,)),
        ("regroups", [rank(0, "regroup", 2.0), rank(1, "restore", 2.0)], "recovering", ()),
        ("reports nothing", [rank(0, age=0.0, step=0)], "unknown", ()),
        ("has ended", [rank(0, "idle", 900.0)], "unknown", ()),
        ("nobody", [], "unknown", ()),
    ],
)
def test_movement(name: str, ranks: list[RankActivity], state: str, named: tuple[int, ...]) -> None:
    progress = assess_progress(ranks, NOW)
    assert (progress.state, progress.ranks) == (state, named), name


def test_a_stuck_run_is_described_in_one_line() -> None:
    frame = "source.py:14 in read: time.sleep(60)"
    stuck = assess_progress([rank(0, age=125.0), rank(1, "data", 125.0, limit_seconds=300.0, frame=frame)], NOW)
    assert stuck.text == "stuck 2m 5s: rank 1 in data"
    assert stuck.sentence == (
        f"stuck 2m 5s: rank 1 in data at step 10, 625 times its usual step ({frame}); 1 other rank waits for it; "
        "not yet ended by its agent (limit 5m)"
    )
    assert stuck.since == NOW - 125.0


def test_a_first_step_after_a_restart_is_judged_by_the_one_before() -> None:
    before = {"compile": 4.0, "data": 0.1}
    ranks = [rank(n, "compile", 21.0, 7, step_seconds=0.0, slowest_seconds=0.0, phase_seconds=before) for n in (0, 1)]
    assert (
        assess_progress([replace(one, age_seconds=19.0) for one in ranks], NOW, is_restarted=True).state == "recovering"
    )
    assert assess_progress(ranks, NOW, is_restarted=True).is_stuck


def test_an_agent_that_does_not_report_stops_the_clock() -> None:
    """Its machine may be frozen, or its disk full: nothing is known about its ranks."""
    status = NodeStatus(NOW - 60.0, 0, "node-0", (RankStatus(0, 1, "productive", (), 5, 0.2, 1.0, False, 4.0, 1.0),))
    assert not assess_progress(activities_of([status], NOW), NOW).is_stuck


activities = st.builds(
    RankActivity,
    rank=st.integers(0, 7),
    kind=st.sampled_from(LEDGER_KINDS),
    step=st.integers(1, 12),
    age_seconds=st.floats(0.01, 2000.0),
    step_seconds=st.sampled_from([0.0, 0.1, 2.0]),
    slowest_seconds=st.sampled_from([0.0, 0.1, 5.0]),
    starved_seconds=st.sampled_from([0.0, 3.0, 100.0]),
    is_stopped=st.booleans(),
    process_state=st.sampled_from(["", "R", "S", "D"]),
    is_waiting=st.booleans(),
)


@given(st.lists(activities, min_size=1, max_size=8, unique_by=lambda one: one.rank))
def test_any_report_is_judged_alike(ranks: list[RankActivity]) -> None:
    """Ranks at rest are never named, and culprits are never all ranks. Neither starved ranks are stuck, nor ranks that
    moved within the last second."""
    progress = assess_progress(ranks, NOW)
    awake = [one for one in ranks if one.kind != "idle"]
    assert set(progress.ranks) <= {one.rank for one in awake}
    assert len(awake) == 1 or len(find_culprits(awake)) < max(1, len(awake))
    if progress.is_stuck:
        assert progress.seconds == max(one.age_seconds for one in ranks if one.rank in progress.ranks)
        assert progress.is_stopped or progress.seconds > MIN_STUCK_SECONDS
    starving = [replace(one, starved_seconds=one.starved_seconds + 1e6, is_stopped=False) for one in ranks]
    assert not assess_progress(starving, NOW).is_stuck
    young = [replace(one, age_seconds=min(one.age_seconds, 0.9), is_stopped=False) for one in ranks]
    assert not assess_progress(young, NOW).is_stuck
