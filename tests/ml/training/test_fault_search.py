"""Where a number that is not finite began: in the data, the weights, a module, the objective or the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gang import Gang
from tiny import GLOBAL_BATCH, Records, Text, make_trainer, moe_config, tiny_job

from craton.job.layout import Layout
from craton.ml.data.sample import Sample
from craton.ml.training import Batch
from craton.ml.training.measure import BatchStatistics
from craton.ml.training.objectives import CROSS_ENTROPY, Objective

STEPS, BAD_STEP = 6, 4
BAD_SAMPLE = (BAD_STEP - 1) * GLOBAL_BATCH + GLOBAL_BATCH - 2
RARE = 7  # a token of one sample only


class OneBadSample(Text):
    """Text with one sample whose weight is NaN, or that has a rare token."""

    def __init__(self, nan: bool = True) -> None:
        self.nan = nan

    def sample(self, index: int) -> Sample:
        sample = super().sample(index)
        tokens, weight = np.where(sample.tokens == RARE, RARE + 1, sample.tokens), sample.weight
        if index == BAD_SAMPLE and self.nan:
            weight = np.where(np.arange(len(weight)) == 3, np.nan, weight).astype(np.float32)
        elif index == BAD_SAMPLE:
            tokens = np.where(np.arange(len(tokens)) == 3, RARE, tokens)
        return Sample(tokens, sample.labels, sample.positions, weight, sample.documents)


def bad_steps(records: Records) -> list[dict[str, Any]]:
    return [{"step": step, **fields} for name, step, fields in records.events if name == "bad_step"]


def _overflow(_module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.masked_fill((inputs[0] == RARE).unsqueeze(-1), float("inf"))


def fit(
    sizes: dict[str, int], nan: bool = True, overflows: bool = False, objective: Objective = CROSS_ENTROPY
) -> list[dict[str, Any]]:
    """Train, perhaps with an embedding that overflows for the rare token; return the bad steps that this rank
    recorded."""
    layout = Layout(**{"precision": "fp32", **sizes})  # type: ignore[arg-type]
    trainer, records = make_trainer(tiny_job(STEPS), layout, None, OneBadSample(nan), objective)
    embedding = getattr(trainer.parts.model, "embedding", None)
    if overflows and embedding is not None:  # the first stage of a pipeline has it
        embedding.register_forward_hook(_overflow)
    assert trainer.fit() == "done"
    return bad_steps(records)


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2},
        pytest.param({"fsdp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"replicate": 2, "cp": 2}, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "tp", "pp", "cp"],
)
def test_a_sample_with_nan_is_named(gang: Gang, sizes: dict[str, int]) -> None:
    found = gang.run(fit, {"micro_batch": 1, **sizes}, ranks=Layout(**sizes).world)
    (bad,) = found[0]
    assert (bad["step"], bad["origin"], bad["part"], bad["sample"]) == (BAD_STEP, "data", "weight", BAD_SAMPLE)
    assert bad["first_sample"] == (BAD_STEP - 1) * GLOBAL_BATCH
    assert bad["last_sample"] == BAD_STEP * GLOBAL_BATCH - 1
    assert not any(found[1:]), "only rank 0 records it"


@pytest.mark.parametrize("sizes", [pytest.param({"fsdp": 2}, marks=pytest.mark.slow), {"pp": 2}], ids=["fsdp", "pp"])
def test_a_module_whose_output_overflows_is_named_with_its_sample(gang: Gang, sizes: dict[str, int]) -> None:
    (bad,) = gang.run(fit, {"micro_batch": 2, **sizes}, False, True)[0]
    assert (bad["step"], bad["origin"], bad["sample"]) == (BAD_STEP, "activations", BAD_SAMPLE)
    assert bad["part"] == "embedding"


def first_logarithm(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """NaN for the rare token only."""
    rare = (batch.tokens == RARE).float()
    return -(batch.weight * log_probs).sum() + torch.log(1.0 - rare.amax() * 2.0) * log_probs.sum() * 0.0, {}


def root(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A finite loss whose gradient is not, for the rare token only."""
    distance = (1.0 - (batch.tokens == RARE).float().amax()) + log_probs.sum() * 0.0
    return -(batch.weight * log_probs).sum() + torch.sqrt(distance) * 1e-6, {}


def test_an_objective_that_is_not_finite_is_named() -> None:
    (bad,) = fit({"micro_batch": 4}, nan=False, objective=Objective("mine:first_logarithm", first_logarithm))
    assert (bad["step"], bad["origin"], bad["part"]) == (BAD_STEP, "objective", "mine:first_logarithm")


def test_the_parameter_with_the_first_bad_gradient_is_named() -> None:
    (bad,) = fit({"micro_batch": 4}, nan=False, objective=Objective("mine:root", root))
    assert (bad["step"], bad["origin"]) == (BAD_STEP, "gradients")
    assert "norm" in bad["part"] or "head" in bad["part"], bad


def test_weights_that_are_not_finite_are_named() -> None:
    trainer, records = make_trainer(tiny_job(3), Layout(micro_batch=8, precision="fp32"))
    with torch.no_grad():
        trainer.parts.model.get_parameter("blocks.1.mlp.down.weight")[0, 0] = float("inf")
    trainer.fit()
    bad = bad_steps(records)
    assert [item["step"] for item in bad] == [1, 2, 3]
    assert bad[0]["origin"] == "weights"
    assert bad[0]["part"] == "blocks.1.mlp.down.weight"


def test_good_steps_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, records = make_trainer(tiny_job(3), Layout(micro_batch=8, precision="fp32"))
    monkeypatch.setattr(trainer.search, "find", None)
    trainer.fit()
    assert bad_steps(records) == []
    metrics = records.metrics_by_step[3]
    assert 0.9 < metrics["run_label_share"] <= 1.0
    assert metrics["run_distinct_row_share"] == 1.0
    assert metrics["run_distinct_tokens"] > 2
    assert metrics["run_copied_label_share"] < 0.5
    assert "run_idle_expert_share" not in metrics


def test_experts_without_tokens_are_counted() -> None:
    layout = Layout(micro_batch=8, precision="fp32")
    trainer, records = make_trainer(tiny_job(4), layout, config=moe_config())
    for module in trainer._balanced:
        with torch.no_grad():  # all scores equal: the first experts win every tie
            module.router.weight.zero_()
    trainer.fit()
    first = records.metrics_by_step[1]
    assert 0.0 < first["run_idle_expert_share"] < 1.0
    assert first["run_expert_load_ratio"] > 1.0


def test_labels_that_are_the_tokens_themselves_are_counted() -> None:
    statistics = BatchStatistics()
    tokens, weight = np.arange(40).reshape(4, 10), np.ones((4, 10), np.float32)
    shifted = {"tokens": tokens, "labels": tokens + 1, "weight": weight}
    assert statistics.add([shifted])["copied_label_share"] == 0.0
    assert statistics.add([{**shifted, "labels": tokens}])["copied_label_share"] == 1.0
    half = np.where(tokens % 2, tokens, -100)
    assert statistics.add([{**shifted, "labels": half}])["copied_label_share"] == 1.0, "masked labels do not count"
    assert "copied_label_share" not in statistics.add([{**shifted, "weight": 0 * weight}])


def test_rows_that_repeat_are_counted() -> None:
    statistics = BatchStatistics()
    rows = np.arange(40).reshape(4, 10)
    assert statistics.add([{"tokens": rows}]) == {"distinct_row_share": 1.0, "distinct_tokens": 10.0}
    for _ in range(100):
        again = statistics.add([{"tokens": rows[:1]}])
    assert again["distinct_row_share"] == pytest.approx(4 / 104)
    for _ in range(300):
        last = statistics.add([{"tokens": rows[:1] * 0, "image": np.ones((1, 3))}])
    assert last == {"distinct_row_share": 1 / 256}
    own = [{"tokens": rows[:1] * 0, "image": np.full((1, 3), number)} for number in range(256)]
    assert [statistics.add([arrays]) for arrays in own][-1] == {"distinct_row_share": 1.0}
