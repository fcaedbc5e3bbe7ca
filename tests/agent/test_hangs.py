"""When ranks hang and which one is to blame, over what agents may report of them."""

from __future__ import annotations

import random

import pytest

from craton.agent.coordination import HANG_STEPS, RankProgress
from craton.agent.coordination.hangs import HANG_SECONDS, LIMITS, MAX_DOUBLINGS, find_hang, find_sleeper
from craton.agent.processes.cpuwait import MAX_SHARE


def stepping(age: float, step: int = 10, **fields: object) -> RankProgress:
    return RankProgress("productive", step, age, **{"step_seconds": 0.2, **fields})  # type: ignore[arg-type]


def doing(kind: str, age: float, step: int = 10, **fields: object) -> RankProgress:
    return RankProgress(kind, step, age, **{"step_seconds": 0.2, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "ranks", "blamed"),
    [
        ("steady steps", [stepping(0.1), stepping(0.1)], None),
        ("all stand still", [stepping(4.1), stepping(4.2)], 1),
        ("just below the limit", [stepping(3.9), stepping(3.9)], None),
        ("a slow step just ended", [stepping(4.1, slowest_seconds=4.65)] * 2, None),
        ("much slower than the slowest one", [stepping(11.7, slowest_seconds=4.65)] * 2, 0),
        ("long steps", [stepping(24.0, step_seconds=10.0)] * 2, None),
        ("longer than long steps", [stepping(25.1, step_seconds=10.0)] * 2, 0),
        ("the first step of a generation", [stepping(100.0, step_seconds=0.0)] * 2, None),
        ("compilation", [doing("compile", 100.0), doing("compile", 90.0)], None),
        ("no CPU for the other rank", [stepping(9.0), stepping(8.9, starved_seconds=6.0)], None),
        ("no CPU, but too long for that", [stepping(10.1), stepping(10.1, starved_seconds=6.0)], 0),
        ("waits for data of the other", [stepping(20.0), doing("data", 19.0)], None),
        ("the other's data never comes", [stepping(121.0), doing("data", 121.0)], 1),
        ("the same for its first data", [doing("compile", 301.0), doing("data", 301.0, step_seconds=0.0)], 1),
        ("first data that may be slow", [doing("compile", 299.0), doing("data", 299.0, step_seconds=0.0)], None),
        (
            "first data after a restart",
            [doing("compile", 121.0), doing("data", 121.0, step_seconds=0.0, stay_seconds=1.0)],
            1,
        ),
        ("a first step after a restart", [doing("compile", 31.0, step_seconds=0.0, stay_seconds=2.0)] * 2, 0),
        ("one that took long before", [doing("compile", 299.0, step_seconds=0.0, stay_seconds=30.0)] * 2, None),
        (
            "a first step that is planned long",
            [doing("compile", 899.0, step_seconds=0.0, plan_step_seconds=20.0)] * 2,
            None,
        ),
        ("a first step without compilation", [doing("compile", 301.0, step_seconds=0.0, is_eager=True)] * 2, 0),
        (
            "only one is not in a collective",
            [stepping(4.2, is_waiting=True), stepping(4.1), stepping(4.2, is_waiting=True)],
            1,
        ),
        ("data came after all", [stepping(20.0), stepping(0.1)], None),
        ("a save by rank 0 alone", [doing("checkpoint", 30.0, step=9), stepping(31.0)], None),
        ("the save has ended", [stepping(0.2), stepping(31.0)], None),
        ("an evaluation by rank 0 alone", [doing("evaluate", 60.0, step=9), stepping(61.0)], None),
        ("a save that never ends", [doing("checkpoint", 901.0, step=9), stepping(900.5)], 0),
        ("stopped by a signal", [stepping(0.3), stepping(4.1, is_stopped=True)], 1),
        ("stopped after a slow step", [stepping(0.3), stepping(4.1, is_stopped=True, slowest_seconds=60.0)], 1),
        ("stopped a moment ago", [stepping(60.0), stepping(3.9, is_stopped=True)], None),
        ("two steps behind all others", [stepping(4.1, step=8), stepping(0.1), stepping(0.1)], 0),
        ("one step behind: the others wait", [stepping(4.1, step=9), stepping(0.1), stepping(0.1)], None),
        ("others report no steps", [stepping(4.1), RankProgress("productive", 0, 0.0, 0.0)], 0),
        ("a patience of its own", [stepping(59.0, patience=60.0), stepping(0.1, patience=60.0)], None),
        ("over its own patience", [stepping(61.0, patience=60.0), stepping(0.1, patience=60.0)], 0),
        ("nobody", [], None),
    ],
)
def test_who_hangs(name: str, ranks: list[RankProgress], blamed: int | None) -> None:
    assert find_hang(ranks) == blamed, name


def test_a_process_that_reports_nothing_and_sleeps_is_what_the_reporting_one_waits_for() -> None:
    waiting = stepping(61.0, patience=60.0, sleeps_in="futex_do_wait")
    silent = [RankProgress("start", 0, 0.0, 0.0, sleeps_in=channel) for channel in ("futex_do_wait", "anon_pipe_read")]
    assert find_hang([waiting, *silent]) == 0
    assert find_sleeper([waiting, *silent], 0) == 2
    assert find_sleeper([waiting, silent[0]], 0) is None
    itself = stepping(61.0, patience=60.0, sleeps_in="hrtimer_nanosleep")
    assert find_sleeper([itself, *silent], 0) is None, "it waits for no other rank"


@pytest.mark.parametrize("failures", range(MAX_DOUBLINGS + 3))
def test_a_step_may_take_longer_after_each_failure_without_progress(failures: int) -> None:
    limit = HANG_SECONDS * 2.0 ** min(failures, MAX_DOUBLINGS)
    assert find_hang([stepping(limit - 0.1)] * 2, failures) is None
    assert find_hang([stepping(limit + 0.1)] * 2, failures) == 0
    assert find_hang([doing("data", LIMITS["data"] + 1)] * 2, failures) == 0


def test_a_step_never_hangs_while_it_is_within_its_slowest_recent_one() -> None:
    """Whatever ranks report beside it."""
    draw = random.Random(16)
    for _ in range(2000):
        slowest = draw.uniform(0.0, 60.0)
        age = draw.uniform(0.0, HANG_STEPS * slowest)
        ranks = [
            stepping(draw.uniform(0.0, age), slowest_seconds=slowest, starved_seconds=draw.choice([0.0, 5.0]))
            for _ in range(draw.randint(1, 4))
        ]
        assert find_hang([*ranks, stepping(age, slowest_seconds=slowest)]) is None


def test_hung_ranks_of_an_idle_machine_are_noticed_in_time() -> None:
    """Steps take alike: whichever rank hangs, and however far the others came, it is blamed after four seconds or two
    and a half steps."""
    draw = random.Random(17)
    for _ in range(2000):
        usual = draw.uniform(0.01, 5.0)
        limit = max(HANG_SECONDS, HANG_STEPS * usual)
        hung = stepping(limit + usual + 0.1, step_seconds=usual, slowest_seconds=usual)
        waiting = [
            stepping(limit + 0.1 + draw.uniform(0.0, usual), step_seconds=usual, slowest_seconds=usual)
            for _ in range(draw.randint(0, 3))
        ]
        assert find_hang([*waiting, hung]) == len(waiting)


@pytest.mark.parametrize("load", [1.0, 2.0, 3.0, 6.0])
def test_a_busy_machine_stretches_the_limit_with_its_load(load: float) -> None:
    """A rank that gets one part in `load` of a CPU may take as many times longer, and not much more."""

    def hangs_at(age: float) -> bool:
        starved = min((1.0 - 1.0 / load) * age, MAX_SHARE * age)
        return find_hang([stepping(age, starved_seconds=starved), stepping(age)]) is not None

    assert not hangs_at(0.99 * load * HANG_SECONDS)
    assert hangs_at(1.01 * load * HANG_SECONDS)
