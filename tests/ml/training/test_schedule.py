"""The learning rate over a run, as a user would plot it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tiny import tiny_job

from craton.ml.training import Schedule
from craton.ml.training.optimizer import ScheduleError


def rates(shape: str, final: float = 0.1) -> list[float]:
    schedule = Schedule(shape, 100, 10, 1.0, final)  # type: ignore[arg-type]
    return [schedule.learning_rate(step) for step in range(1, 101)]


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_warms_up_to_its_peak_and_never_rises_again(shape: str) -> None:
    values = rates(shape)
    assert values[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(values) == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in pairwise(values[9:]))
    assert values[-1] == pytest.approx(1.0 if shape == "constant" else 0.1)


def test_halfway_points() -> None:
    assert rates("cosine")[54] == pytest.approx(0.55)
    assert rates("linear")[54] == pytest.approx(0.55)
    assert rates("wsd")[79] == pytest.approx(1.0)
    assert rates("wsd")[89] == pytest.approx(0.55)


def test_a_job_without_an_end_cannot_be_trained() -> None:
    job = tiny_job()
    assert job.train is not None
    endless = job.model_copy(update={"train": job.train.model_copy(update={"steps": None})})
    with pytest.raises(ScheduleError, match=r"neither steps nor tokens.*set train\.steps"):
        Schedule.of(endless)
