"""Where the seconds of a step are booked."""

from __future__ import annotations

import pytest

from craton.ml.training.measure.timing import MeasuredStepTimes


def test_a_wait_is_taken_from_the_phase_it_was_in() -> None:
    marks = [("data", 1.0), ("compute", 5.0), ("optimizer", 7.0), ("checkpoint", 7.5)]
    times = MeasuredStepTimes(0.0, marks, [(1, 2.0, 3.0), (1, 4.0, 4.5), (2, 5.5, 6.0)]).seconds()
    assert times == {"data": 1.0, "compute": 2.5, "communication": 2.0, "optimizer": 1.5, "checkpoint": 0.5}
    assert sum(times.values()) == pytest.approx(7.5)


def test_rollouts_are_taken_from_loading_data_and_never_more_than_it_took() -> None:
    marks = [("data", 4.0), ("compute", 5.0)]
    parts = [("data", "rollout", 2.5), ("data", "reward", 1.0), ("data", "sync", 1.0)]
    times = MeasuredStepTimes(0.0, marks, parts=parts).seconds()
    assert {name: times[name] for name in ("data", "rollout", "reward", "sync")} == {
        "data": 0.0,
        "rollout": 2.5,
        "reward": 1.0,
        "sync": 0.5,
    }
    assert sum(times.values()) == pytest.approx(5.0)
