"""Every layout trains the same model: 20 steps in fp32 on 4 ranks against one process, with losses and gradient norms.

Sums are taken in another order on other ranks, so numbers agree to TOLERANCE, not to the bit; where the order is the
same, to the bit. With experts, a token whose scores are equal to the last bit may choose another one and change the
loss in its fourth digit: after the first steps TOLERANCE_OF_CHOICES holds there. Each case is also seen to fail when
one of its collectives brings nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from gang import Gang
from tiny import GLOBAL_BATCH, VOCABULARY, make_trainer, silenced, tiny_job
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.models import DecoderConfig
from craton.ml.models.config import RoutingConfig
from craton.ml.training import Trainer

STEPS = 20
TOLERANCE = 2e-5  # relative, of every loss and every gradient norm
TOLERANCE_OF_CHOICES = 1e-2
STRICT_STEPS = 5
HALFWAY = 2  # the step after which a checkpoint changes its layout
SABOTAGED_STEPS = 2

DENSE = DecoderConfig(ModelShape("dense", 4, 32, 64, 4, 2, 8, VOCABULARY), initializer_range=0.1)
EXPERTS = DecoderConfig(
    ModelShape(
        "experts",
        4,
        32,
        64,
        4,
        2,
        8,
        VOCABULARY,
        experts=8,
        top_k=2,
        moe_ffn_hidden=32,
        shared_experts=1,
        dense_layers=1,
    ),
    initializer_range=0.1,
    routing=RoutingConfig(auxiliary_loss=0.01, bias_update=0.001),
)
MODELS = {"dense": DENSE, "experts": EXPERTS}
LORA = {"lora": "{rank: 4, targets: all}"}


@dataclass(frozen=True)
class Case:
    """A layout, the model it is tried with, and the collective without which it must go wrong."""

    sizes: dict[str, Any]
    removed: str
    model: str = "dense"
    train: dict[str, str] = field(default_factory=dict)

    slow: bool = False

    @property
    def layout(self) -> Layout:
        """With two micro-batches a step where that can be: balancing losses of experts are means over a micro-batch, so
        their micro-batches have two sequences in every layout."""
        layout = Layout(precision="fp32", **self.sizes)
        return replace(layout, micro_batch=2 if self.model == "experts" else GLOBAL_BATCH // layout.data_parallel // 2)


CASES = {
    "fsdp 4": Case({"fsdp": 4}, "reduce over shards"),
    "replicate 2 · fsdp 2": Case({"replicate": 2, "fsdp": 2}, "reduce over replicas", slow=True),
    "fsdp 2 · tp 2": Case({"fsdp": 2, "tp": 2, "recompute": "selective"}, "tensor.start_gather", slow=True),
    "fsdp 2 · tp 2, adapters": Case({"fsdp": 2, "tp": 2}, "tensor.start_scatter_sum", train=LORA, slow=True),
    "replicate 2 · tp 2": Case({"replicate": 2, "tp": 2}, "tensor.start_sum", slow=True),
    "tp 2 · cp 2": Case({"cp": 2, "tp": 2}, "context.start_scatter_sum", slow=True),
    "cp 2 · fsdp 2": Case({"cp": 2, "fsdp": 2, "recompute": "full"}, "context.start_gather", slow=True),
    "pp 2 · fsdp 2": Case({"pp": 2, "fsdp": 2}, "sends", slow=True),
    "pp 2 · fsdp 2, adapters": Case({"pp": 2, "fsdp": 2, "recompute": "full"}, "sends", train=LORA, slow=True),
    "pp 2 · fsdp 2, interleaved": Case({"pp": 2, "fsdp": 2, "vpp": 2, "schedule": "interleaved"}, "sends"),
    "pp 2 · fsdp 2, zero-bubble": Case(
        {"pp": 2, "fsdp": 2, "schedule": "zero-bubble"}, "reduce over shards", slow=True
    ),
    "pp 2 · tp 2": Case({"pp": 2, "tp": 2, "recompute": "selective"}, "tensor.start_scatter_sum", slow=True),
    "pp 2 · cp 2": Case({"pp": 2, "cp": 2}, "context.start_gather", slow=True),
    "fsdp 4 · ep 2": Case({"fsdp": 4, "ep": 2}, "experts.start_exchange", "experts", slow=True),
    "fsdp 2 · tp 2 · ep 2": Case({"fsdp": 2, "tp": 2, "ep": 2}, "experts.start_exchange", "experts", slow=True),
    "replicate 2 · fsdp 2 · ep 4": Case(
        {"replicate": 2, "fsdp": 2, "ep": 4}, "experts.start_exchange", "experts", slow=True
    ),
    "fsdp 2 · cp 2 · ep 2": Case(
        {"fsdp": 2, "cp": 2, "ep": 2, "recompute": "full"}, "rows.start_sum", "experts", slow=True
    ),
    "pp 2 · fsdp 2 · ep 2": Case({"pp": 2, "fsdp": 2, "ep": 2}, "stage.start_sum", "experts", slow=True),
    "pp 2 · fsdp 2 · ep 2, zero-bubble": Case(
        {"pp": 2, "fsdp": 2, "ep": 2, "schedule": "zero-bubble"}, "sends", "experts", slow=True
    ),
    "fsdp 2 · tp 2, experts": Case({"fsdp": 2, "tp": 2}, "tensor.start_sum", "experts", slow=True),
}


every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if case.slow else name for name, case in CASES.items()]
)


def curve(
    case: Case, steps: int = STEPS, removed: str | None = None, folder: str | None = None, until: int | None = None
) -> dict[int, tuple[float, float]]:
    """The loss and the gradient norm of every step, as rank 0 records them."""
    trainer, records = make_trainer(
        tiny_job(steps, **case.train),
        case.layout,
        Path(folder) if folder else None,
        config=MODELS[case.model],
        steps=until,
    )
    with without(trainer, removed) if removed else nullcontext():
        trainer.fit()
    norms = records.norms
    return {step: (loss, norms[step]) for step, loss in records.losses.items()}


@contextmanager
def without(trainer: Trainer, removed: str) -> Iterator[None]:
    """One collective of this rank brings nothing from others."""
    ranks = trainer.parts.ranks
    if removed == "reduce over shards":
        for module in trainer.parts.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_OwnPart())
        yield
    elif removed == "reduce over replicas":
        assert ranks.meshes is not None
        replicas = ranks.meshes.weights.get_group("replicate")
        reduce = dist.all_reduce

        def reduce_others(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            return None if options.get("group") is replicas else reduce(tensor, *arguments, **options)

        with mock.patch.object(dist, "all_reduce", reduce_others):
            yield
    elif removed == "sends":
        send = dist.isend
        with mock.patch.object(dist, "isend", lambda tensor, *rest, **named: send(tensor * 0, *rest, **named)):
            yield
    else:
        dimension, _, operation = removed.partition(".")
        with silenced(getattr(ranks.connections, dimension), operation):
            yield


class _OwnPart(DefaultReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        output_tensor.copy_(
            input_tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)].view_as(output_tensor)
        )


@cache
def expected(model: str, adapters: bool = False) -> dict[int, tuple[float, float]]:
    """The same in one process, a sequence at a time."""
    return curve(Case({}, "", model, LORA if adapters else {}))


def assert_equal(found: dict[int, tuple[float, float]], case: Case) -> None:
    whole = expected(case.model, bool(case.train))
    for step, numbers in found.items():
        is_strict = case.model == "dense" or step <= STRICT_STEPS
        assert numbers == pytest.approx(whole[step], rel=TOLERANCE if is_strict else TOLERANCE_OF_CHOICES), (
            f"step {step}"
        )


@every_case
def test_the_layout_trains_as_one_process_does(gang: Gang, name: str) -> None:
    case = CASES[name]
    found = gang.run(curve, case, ranks=4)[0]
    assert len(found) == STEPS
    assert_equal(found, case)
    assert found[STEPS][0] < found[1][0] - 0.3, "it should learn something"


@every_case
def test_the_layout_goes_wrong_without_one_of_its_collectives(gang: Gang, name: str) -> None:
    case = CASES[name]
    found = gang.run(curve, case, STEPS, case.removed, None, SABOTAGED_STEPS, ranks=4)[0]
    with pytest.raises(AssertionError):
        assert_equal(found, case)


def own_norms() -> tuple[list[float], list[float]]:
    """The norm of the whole gradient (rank 0 records it) and that of this rank's part, at every step."""
    trainer, records = make_trainer(tiny_job(2), Layout(fsdp=4))
    trainer.fit()
    return list(records.norms.values()), [each["run_rank_gradient_norm"] for each in records.metrics_by_step.values()]


def test_the_parts_of_the_gradient_make_up_the_whole(gang: Gang) -> None:
    parts = gang.run(own_norms, ranks=4)
    (whole, _), *_ = parts
    for step, norm in enumerate(whole):
        assert sum(own[step] ** 2 for _, own in parts) == pytest.approx(norm**2, rel=1e-4)


def test_putting_off_weight_gradients_changes_no_bit(gang: Gang) -> None:
    plain, put_off = (
        gang.run(curve, CASES[name], STEPS, None, None, 4, ranks=4)[0]
        for name in ("pp 2 · fsdp 2", "pp 2 · fsdp 2, zero-bubble")
    )
    assert plain == put_off


def loads() -> list[float]:
    """The share of the busiest expert over the mean, of every layer with experts."""
    trainer, _ = make_trainer(tiny_job(1), Layout(precision="fp32"), config=EXPERTS)
    busiest = []
    for module in trainer._balanced:
        take = module.update_bias

        def update(module: Any = module, take: Any = take) -> None:
            busiest.append(float(module.expert_load.max() / module.expert_load.mean()))
            take()

        module.update_bias = update
    trainer.fit()
    return busiest


def test_the_routing_of_these_tests_is_uneven() -> None:
    assert min(loads()) > 1.2


def halves(case: Case, folder: str) -> None:
    curve(case, STEPS, folder=folder, until=HALFWAY)


def _continue(gang: Gang, tmp_path: Path, saved: str, restored: str) -> None:
    source, target = tmp_path / saved, tmp_path / f"{saved} to {restored}"
    if not source.exists():
        gang.run(halves, CASES[saved], str(source), ranks=4)
    shutil.copytree(source, target)
    found = gang.run(curve, CASES[restored], STEPS, None, str(target), HALFWAY + 2, ranks=4)[0]
    assert min(found) == HALFWAY + 1
    assert_equal(found, CASES[restored])


def _families(slow: bool) -> list[list[str]]:
    """Cases whose checkpoints hold the same names."""
    families: dict[tuple[str, bool], list[str]] = {}
    for name, case in CASES.items():
        if case.slow and not slow:
            continue
        families.setdefault((case.model, bool(case.train)), []).append(name)
    return list(families.values())


@pytest.mark.slow
def test_what_one_layout_saves_the_next_goes_on_from(gang: Gang, tmp_path: Path) -> None:
    for number, names in enumerate(_families(slow=False)):
        reached = 0
        for name in names:
            found = gang.run(curve, CASES[name], STEPS, None, str(tmp_path / str(number)), reached + HALFWAY, ranks=4)[
                0
            ]
            assert (min(found), max(found)) == (reached + 1, reached + HALFWAY)
            assert_equal(found, CASES[name])
            reached += HALFWAY


@pytest.mark.slow
def test_what_any_layout_saves_any_other_goes_on_from(gang: Gang, tmp_path: Path) -> None:
    for names in _families(slow=True):
        for saved in names:
            for restored in names:
                _continue(gang, tmp_path, saved, restored)
