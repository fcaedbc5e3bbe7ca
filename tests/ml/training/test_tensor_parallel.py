"""Tensor parallelism trains the model that one process trains, whatever the model is made of."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gang import Gang
from tiny import VOCABULARY, Text, make_trainer, silenced, tiny_job
from torch import Tensor

from craton.job.layout import Layout
from craton.job.model import MlaShape, ModelShape
from craton.ml.collectives import local, own_slices
from craton.ml.models import Decoder, DecoderConfig, load_weights, save_folder
from craton.ml.models.config import RoutingConfig
from craton.ml.training import Batch, float8
from craton.ml.training.evaluate import evaluate
from craton.ml.training.objectives import CROSS_ENTROPY, Objective
from craton.ml.training.parallel import make_ranks, parallelize
from craton.ml.training.parallel.tensor import CutError

STEPS = 3
TOLERANCE = 1e-5  # relative, of every loss and every gradient norm
HALFWAY = 1  # the step after which a checkpoint changes its layout

MODELS = {
    "dense": DecoderConfig(ModelShape("dense", 2, 32, 64, 4, 4, 8, VOCABULARY), initializer_range=0.1),
    "biased, tied": DecoderConfig(
        ModelShape("biased", 2, 32, 64, 4, 2, 8, VOCABULARY, tied_embeddings=True), initializer_range=0.1, qkv_bias=True
    ),
    "normed": DecoderConfig(ModelShape("normed", 2, 32, 64, 4, 2, 8, VOCABULARY, qk_norm=True), initializer_range=0.1),
    "latent": DecoderConfig(
        ModelShape("latent", 2, 32, 64, 4, 4, 8, VOCABULARY, mla=MlaShape(16, 16, 8, 4, 8)), initializer_range=0.1
    ),
    "latent, direct queries": DecoderConfig(
        ModelShape("direct", 2, 32, 64, 4, 4, 8, VOCABULARY, mla=MlaShape(0, 16, 8, 4, 8)), initializer_range=0.1
    ),
    "experts": DecoderConfig(
        ModelShape("experts", 2, 32, 64, 4, 2, 8, VOCABULARY, experts=4, top_k=2, moe_ffn_hidden=32, shared_experts=1),
        initializer_range=0.1,
        routing=RoutingConfig(auxiliary_loss=0.01, bias_update=0.001),
    ),
    # what FSDP cuts behind tp 2 does not divide by 2
    "uneven": DecoderConfig(ModelShape("uneven", 2, 19, 42, 2, 2, 6, VOCABULARY + 2), initializer_range=0.1),
}
LORA = {"lora": "{rank: 3, targets: all}"}


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the layout it is tried with."""

    model: str
    sizes: dict[str, Any]
    train: dict[str, str] = field(default_factory=dict)
    nonlinear: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.model}: {sizes}{', adapters' if self.train else ''}{', nonlinear' if self.nonlinear else ''}"

    @property
    def layout(self) -> Layout:
        return Layout(**{"precision": "fp32", "micro_batch": 4, **self.sizes})


CASES = [
    Case("dense", {"tp": 2}),
    Case("dense", {"tp": 4}),
    Case("dense", {"fsdp": 2, "tp": 2, "micro_batch": 1}),
    Case("dense", {"replicate": 2, "tp": 2}),
    Case("dense", {"fsdp": 2, "tp": 2, "recompute": "selective"}),
    Case("dense", {"tp": 2, "recompute": "full"}, LORA),
    Case("dense", {"tp": 2}, nonlinear=True),
    Case("biased, tied", {"fsdp": 2, "tp": 2, "recompute": "full"}),
    Case("normed", {"tp": 2}),
    Case("latent", {"fsdp": 2, "tp": 2}),
    Case("latent", {"tp": 2, "recompute": "selective"}, LORA),
    Case("latent, direct queries", {"tp": 2}),
    Case("experts", {"tp": 2, "recompute": "selective"}),
    Case("experts", {"fsdp": 2, "tp": 2}),
]
RARE = [
    Case("dense", {"tp": 2, "recompute": "full"}, LORA),
    Case("dense", {"tp": 2}, nonlinear=True),
    Case("normed", {"tp": 2}),
    Case("latent, direct queries", {"tp": 2}),
]


def surprise(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective that is not linear in the log-probabilities."""
    loss = (batch.weight * log_probs.square()).sum()
    return loss, {"surprise": loss.detach()}


def curve(
    case: Case, removed: str = "", folder: str | None = None, until: int | None = None
) -> dict[int, tuple[float, float]]:
    """The loss and the gradient norm of every step as rank 0 records them; at step 0 the loss of an evaluation."""
    objective = Objective("surprise", surprise) if case.nonlinear else CROSS_ENTROPY
    trainer, records = make_trainer(
        tiny_job(STEPS, **case.train),
        case.layout,
        Path(folder) if folder else None,
        config=MODELS[case.model],
        objective=objective,
        steps=until,
    )
    ranks = trainer.parts.ranks
    with silenced(ranks.connections.tensor, removed) if removed else nullcontext():
        trainer.fit()
    evaluated = evaluate(trainer.parts.model, Text(), objective, ranks, 3)["loss"]
    found = {step: (loss, records.norms[step]) for step, loss in records.losses.items()}
    return found | {0: (evaluated, 0.0)}


@cache
def expected(model: str, adapted: bool = False, nonlinear: bool = False) -> dict[int, tuple[float, float]]:
    """The same in one process."""
    return curve(Case(model, {}, LORA if adapted else {}, nonlinear))


def assert_equal(found: dict[int, tuple[float, float]], case: Case) -> None:
    whole = expected(case.model, bool(case.train), case.nonlinear)
    for step, numbers in found.items():
        assert numbers == pytest.approx(whole[step], rel=TOLERANCE), f"step {step}"


# Layouts of four ranks are also tried, each with a deeper model, by test_every_layout.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case.layout.world > 2 or case in RARE else (), id=str(case))
        for case in CASES
    ],
)
def test_it_trains_as_one_process_does(gang: Gang, case: Case) -> None:
    found = gang.run(curve, case, ranks=case.layout.world)[0]
    assert len(found) == STEPS + 1
    assert_equal(found, case)


def curve_with_kernels(case: Case) -> dict[int, tuple[float, float]]:
    with mock.patch("craton.ml.kernels.elementwise.is_fused", return_value=True):
        return curve(case)


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"fsdp": 2, "tp": 2, "recompute": "full"}], ids=str)
def test_the_weights_of_qk_norm_get_their_gradients_from_the_kernels(gang: Gang, sizes: dict[str, Any]) -> None:
    case = Case("normed", sizes)
    assert_equal(gang.run(curve_with_kernels, case, ranks=case.layout.world)[0], case)


@pytest.mark.parametrize(
    "removed",
    ["start_gather", *(pytest.param(name, marks=pytest.mark.slow) for name in ("start_scatter_sum", "start_sum"))],
)
def test_it_goes_wrong_without_one_of_its_collectives(gang: Gang, removed: str) -> None:
    case = CASES[0]
    found = gang.run(curve, case, removed, ranks=2)[0]
    del found[0]  # evaluated with everything in place
    with pytest.raises(AssertionError):
        assert_equal(found, case)


def low_precision(sizes: dict[str, Any], precision: str) -> list[float]:
    job = tiny_job(STEPS, precision=precision)
    trainer, records = make_trainer(job, Layout(precision=precision, micro_batch=4, **sizes), config=MODELS["dense"])
    in_fp8 = [isinstance(module, float8.Float8Mlp) for module in trainer.parts.model.modules()]
    assert any(in_fp8) == (precision == "fp8")
    trainer.fit()
    return list(records.losses.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_low_precision_follows_fp32(gang: Gang, precision: str) -> None:
    losses = gang.run(low_precision, {"fsdp": 2, "tp": 2}, precision, ranks=4)[0]
    assert losses == pytest.approx([expected("dense")[step][0] for step in range(1, STEPS + 1)], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [({"tp": 2}, {"fsdp": 2, "tp": 2}), ({"fsdp": 2, "tp": 2}, {"fsdp": 2})], ids=str
)
def test_a_checkpoint_goes_on_in_another_layout(
    gang: Gang, tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    first, second = Case("uneven", before), Case("uneven", after)
    gang.run(curve, first, "", str(tmp_path), HALFWAY, ranks=first.layout.world)
    found = gang.run(curve, second, "", str(tmp_path), ranks=second.layout.world)[0]
    assert sorted(found) == [0, *range(HALFWAY + 1, STEPS + 1)]
    assert_equal(found, second)


def parts(name: str, folder: str | None) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
    """What this rank holds of every parameter of a model that was made without memory and then filled."""
    layout = Layout(fsdp=2, tp=2, precision="fp32")
    ranks = make_ranks(layout, torch.device("cpu"), torch.distributed.get_rank(), layout.world)
    with torch.device("meta"):
        model = Decoder(MODELS[name])
    parallelize(model, ranks, compile_blocks=False)
    model.to_empty(device="cpu")
    if folder is None:
        model.initialize(seed=3)
    else:
        load_weights(model, folder)
    return {name: (own_slices(value), local(value).clone()) for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "published"),
    [("uneven", False), ("uneven", True), ("latent", True), ("biased, tied", True), ("experts", False)],
)
def test_each_rank_gets_its_part_of_the_weights(gang: Gang, tmp_path: Path, name: str, published: bool) -> None:
    model = Decoder(MODELS[name])
    model.initialize(seed=3)
    folder = tmp_path / "published"
    if published:
        save_folder(dict(model.state_dict()), model.config, folder, dtype=torch.float32)
    held = gang.run(parts, name, str(folder) if published else None, ranks=4)
    for parameter, value in model.named_parameters():
        seen = torch.zeros_like(value)
        for of_rank in held:
            slices, part = of_rank[parameter]
            assert torch.equal(part, value[slices]), parameter
            seen[slices] = 1.0
        assert seen.all(), f"nobody holds all of {parameter}"


def cut(shape: ModelShape, fp8: bool) -> str:
    ranks = make_ranks(Layout(tp=2, precision="fp32"), torch.device("cpu"), torch.distributed.get_rank(), 2)
    with torch.device("meta"):
        model = Decoder(DecoderConfig(shape))
        if fp8:
            float8.convert(model, "tensorwise")
    try:
        parallelize(model, ranks, compile_blocks=False)
    except CutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sizes", "fp8", "said"),
    [
        ((32, 64, 3, 3, 8, 128), False, "does not divide the 3 query heads of blocks.0.attention"),
        ((32, 64, 4, 1, 8, 128), False, "does not divide the 1 key/value heads of blocks.0.attention"),
        ((32, 64, 4, 2, 8, 127), False, "embedding.weight is 127 × 32, which cannot be split into 2 parts"),
        ((32, 48, 4, 2, 8, 128), True, "split into 2 parts that are multiples of 16 (for fp8)"),
    ],
)
def test_what_cannot_be_cut_is_named(gang: Gang, sizes: tuple[int, ...], fp8: bool, said: str) -> None:
    assert said in gang.run(cut, ModelShape("model", 1, *sizes), fp8)[0]
