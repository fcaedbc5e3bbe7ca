"""Every layout on NCCL, with 2, 4 and 8 ranks that share one GPU, against one rank on the same GPU.

fp32 agrees to TOLERANCE: sums are taken in another order. With experts a token whose scores are nearly equal may choose
another one, so that later steps agree to TOLERANCE_OF_CHOICES only. bf16 rounds every product; its losses follow those
of fp32 within LOW_TOLERANCE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gang import Gang
from test_every_layout import CASES, LORA, MODELS, TOLERANCE_OF_CHOICES, Case
from tiny import make_trainer, tiny_job

STEPS = 6
TOLERANCE = 1e-4  # relative, of every loss and every gradient norm
LOW_TOLERANCE = 0.02
STRICT_STEPS = 2
SMALLEST = {
    "fsdp 2": Case({"fsdp": 2}, ""),
    "replicate 2": Case({"replicate": 2}, ""),
    "tp 2 with sequence": Case({"tp": 2}, ""),
    "cp 2": Case({"cp": 2}, ""),
    "ep 2": Case({"fsdp": 2, "ep": 2}, "", "experts"),
    "pp 2": Case({"pp": 2}, ""),
    "pp 2, interleaved": Case({"pp": 2, "vpp": 2, "schedule": "interleaved"}, ""),
    "pp 2, zero-bubble": Case({"pp": 2, "schedule": "zero-bubble"}, ""),
}
OF_EIGHT = {
    "replicate 2 · fsdp 2 · tp 2": Case({"replicate": 2, "fsdp": 2, "tp": 2}, ""),
    "fsdp 2 · cp 2 · tp 2": Case({"fsdp": 2, "cp": 2, "tp": 2}, ""),
    "pp 2 · fsdp 2 · tp 2": Case({"pp": 2, "fsdp": 2, "tp": 2}, ""),
    "pp 2 · fsdp 4 · ep 2": Case({"pp": 2, "fsdp": 4, "ep": 2}, "", "experts"),
    "pp 4 · fsdp 2, zero-bubble": Case({"pp": 4, "fsdp": 2, "schedule": "zero-bubble"}, ""),
}
LOW = ("fsdp 4", "fsdp 2 · tp 2", "pp 2 · fsdp 2, interleaved", "fsdp 4 · ep 2")

Curve = dict[int, tuple[float, float]]


def curve(case: Case, precision: str = "fp32") -> Curve:
    """The loss and the gradient norm of every step on the GPU, as rank 0 records them."""
    torch.cuda.set_device(0)
    job = tiny_job(STEPS, **{**case.train, "precision": precision})
    layout = replace(case.layout, precision=precision)
    trainer, records = make_trainer(job, layout, config=MODELS[case.model], device="cuda")
    trainer.fit()
    norms = records.norms
    return {step: (loss, norms[step]) for step, loss in records.losses.items()}


@pytest.fixture(scope="module")
def of_one_rank(nccl_gang: Gang) -> dict[tuple[str, bool], Curve]:
    """Model and whether it trains adapters → the curve of one rank, a sequence at a time."""
    kinds = [("dense", False), ("dense", True), ("experts", False)]
    return {
        (model, adapters): nccl_gang.run(curve, Case({}, "", model, LORA if adapters else {}), ranks=1)[0]
        for model, adapters in kinds
    }


def check(found: Curve, case: Case, whole: dict[tuple[str, bool], Curve]) -> None:
    expected = whole[case.model, bool(case.train)]
    assert len(found) == STEPS
    for step, numbers in found.items():
        is_strict = case.model == "dense" or step <= STRICT_STEPS
        tolerance = TOLERANCE if is_strict else TOLERANCE_OF_CHOICES
        assert numbers == pytest.approx(expected[step], rel=tolerance), f"step {step}"


def _named(cases: dict[str, Case]) -> Any:
    return pytest.mark.parametrize("name", list(cases))


@_named(SMALLEST)
def test_the_smallest_world_of_each_dimension(nccl_gang: Gang, of_one_rank: Any, name: str) -> None:
    check(nccl_gang.run(curve, SMALLEST[name], ranks=2)[0], SMALLEST[name], of_one_rank)


@_named(CASES)
def test_mixtures_of_four_ranks(nccl_gang: Gang, of_one_rank: Any, name: str) -> None:
    check(nccl_gang.run(curve, CASES[name], ranks=4)[0], CASES[name], of_one_rank)


@_named(OF_EIGHT)
def test_mixtures_of_eight_ranks(nccl_gang: Gang, of_one_rank: Any, name: str) -> None:
    check(nccl_gang.run(curve, OF_EIGHT[name], ranks=8)[0], OF_EIGHT[name], of_one_rank)


@pytest.mark.parametrize("name", LOW)
def test_low_precision_follows_fp32(nccl_gang: Gang, of_one_rank: Any, name: str) -> None:
    case = CASES[name]
    found = nccl_gang.run(curve, case, "bf16", ranks=4)[0]
    expected = of_one_rank[case.model, bool(case.train)]
    assert [loss for loss, _ in found.values()] == pytest.approx(
        [loss for loss, _ in expected.values()], rel=LOW_TOLERANCE
    )
