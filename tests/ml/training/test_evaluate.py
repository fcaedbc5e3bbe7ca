"""The evaluation loss: the same number on any number of ranks, and nothing of it left behind."""

from __future__ import annotations

import pytest
from gang import Gang
from tiny import Text, make_trainer, tiny_job

from craton.job.layout import Layout


class OtherText(Text):
    def sample(self, index: int):  # type: ignore[no-untyped-def]
        return super().sample(index + 1_000_000)


def losses(sizes: dict[str, int], evaluate: bool) -> tuple[list[float], dict[int, float]]:
    options = {"evaluate": "{every_steps: 2, sequences: 5}"} if evaluate else {}
    trainer, records = make_trainer(
        tiny_job(5, **options), Layout(precision="fp32", micro_batch=2, **sizes), validation=OtherText()
    )
    trainer.fit()
    found = {step: each.get("run_evaluation_loss") for step, each in records.metrics_by_step.items()}
    if evaluate:
        assert records.seconds["evaluate"] > 0
    return list(records.losses.values()), {step: loss for step, loss in found.items() if loss is not None}


def test_evaluation_is_the_same_on_any_world_and_changes_nothing(gang: Gang) -> None:
    trained, evaluated = gang.run(losses, {}, True, ranks=1)[0]
    assert list(evaluated) == [2, 4, 5], "every two steps, and after the last"
    assert evaluated[5] < evaluated[2]
    shared, on_two = gang.run(losses, {"fsdp": 2}, True, ranks=2)[0]
    assert on_two == pytest.approx(evaluated, rel=1e-5)
    assert shared == gang.run(losses, {"fsdp": 2}, False, ranks=2)[0][0]
    assert trained == pytest.approx(shared, rel=1e-5)
