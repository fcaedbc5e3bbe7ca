"""Which steps count as recent, and which as the past that they are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from craton.observability.diagnosis.collect.metrics import RECENT_SECONDS, RECENT_STEPS, Steps


def steps(*seconds: float) -> Steps:
    """The steps of a rank, one after the other."""
    lines: list[dict[str, Any]] = []
    moment = 0.0
    for number, value in enumerate(seconds):
        moment += value
        lines.append({"time": moment, "step": number, "run_step_seconds": value})
    return Steps("a", lines)


def test_recent_steps_of_a_slow_run_are_a_number_and_of_a_fast_one_seconds() -> None:
    assert steps(*[2.0] * 100).num_recent == RECENT_STEPS
    assert steps(*[0.05] * 500).num_recent == pytest.approx(RECENT_SECONDS / 0.05, abs=1)
    assert steps(*[0.05] * 30).num_recent == RECENT_STEPS
    assert steps(*[0.05] * 7).num_recent == 7


def test_a_burst_of_a_second_is_not_the_recent_speed() -> None:
    fast = steps(*[0.05] * 300, *[0.2] * 5)
    assert fast.median(recent=True)[0]["step"] == 0.05


@pytest.mark.parametrize("slow_seconds", [5.0, 20.0, 60.0])
def test_a_run_that_stays_slow_is_not_compared_with_itself(slow_seconds: float) -> None:
    found = steps(*[0.05] * 60, *[0.15] * round(slow_seconds / 0.15))
    assert found.median(recent=True)[0]["step"] == 0.15
    assert found.median(recent=False)[0]["step"] == 0.05


def test_a_run_that_became_faster_is_compared_with_its_better_self() -> None:
    found = steps(*[0.3] * 40, *[0.1] * 200, *[0.3] * 20)
    assert found.median(recent=True)[0]["step"] == 0.3
    assert found.median(recent=False)[0]["step"] == 0.1


def test_windows_reach_back_by_half_their_length() -> None:
    found = steps(*[1.0] * 75)
    assert [window.moment for window in found.windows()] == [56.0, 46.0, 36.0, 26.0, 16.0, 6.0]


def test_a_sudden_change_shows_after_a_few_steps() -> None:
    found = steps(*[0.08] * 200, *[2.0] * 5)
    assert found.median(recent=True)[0]["step"] == 2.0
    assert found.median(recent=False)[0]["step"] == 0.08
    assert steps(*[0.08] * 200, *[2.0] * 3).median(recent=True)[0]["step"] == 0.08
