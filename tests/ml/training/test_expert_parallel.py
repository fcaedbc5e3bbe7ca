"""Experts on several ranks train as those of one: losses, gradient norms, balance, and weights that change layouts.

The router is skewed, so that some experts get a multiple of what others get and rows travel in uneven numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from tiny import VOCABULARY, make_trainer, silenced, tiny_job
from torch import Tensor
from torch.distributed.tensor import DTensor

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.models import Decoder, DecoderConfig, load_weights, save_folder
from craton.ml.models.config import RoutingConfig
from craton.ml.models.moe import MoE
from craton.ml.training import Trainer
from craton.ml.training.parallel import make_ranks, parallelize

STEPS = 6
TOLERANCE = 1e-5
SHAPE = ModelShape("experts", 2, 32, 64, 4, 2, 8, VOCABULARY, experts=8, top_k=2, moe_ffn_hidden=16, shared_experts=1)
CONFIG = DecoderConfig(SHAPE, initializer_range=0.1, routing=RoutingConfig(auxiliary_loss=0.1, bias_update=0.01))


@dataclass(frozen=True)
class Case:
    """A layout, and what else differs."""

    sizes: dict[str, Any] = field(default_factory=dict)
    experts: int = 8
    train: str = ""
    routing: RoutingConfig = CONFIG.routing

    @property
    def layout(self) -> Layout:
        return Layout(precision="fp32", micro_batch=2, **self.sizes)

    @property
    def on_one_rank(self) -> Case:
        return replace(self, sizes={})


CASES = {
    "fsdp 2 · ep 2": Case({"fsdp": 2, "ep": 2}),
    "fsdp 2 · ep 2, adapters": Case({"fsdp": 2, "ep": 2, "recompute": "full"}, train="lora: {rank: 4, targets: all}"),
    "fsdp 4 · ep 4": Case({"fsdp": 4, "ep": 4}),
    "fsdp 4 · ep 2": Case({"fsdp": 4, "ep": 2}),
    # each rank of ep has 3: FSDP cuts through every expert instead of between them
    "fsdp 4 · ep 2, 6 experts": Case({"fsdp": 4, "ep": 2, "recompute": "selective"}, experts=6),
    "fsdp 4, 6 experts": Case({"fsdp": 4}, experts=6),
    "replicate 2 · ep 2": Case({"replicate": 2, "ep": 2}),
    "replicate 2 · fsdp 2 · ep 2": Case({"replicate": 2, "fsdp": 2, "ep": 2}),
    "cp 2 · ep 2": Case({"cp": 2, "ep": 2}),
    "fsdp 2 · cp 2 · ep 4": Case({"fsdp": 2, "cp": 2, "ep": 4, "recompute": "full"}),
    "fsdp 2 · tp 2 · ep 2": Case({"fsdp": 2, "tp": 2, "ep": 2}),
}
SLOW = ("fsdp 2 · ep 2, adapters", "cp 2 · ep 2")


@dataclass
class Course:
    """What rank 0 saw of a training."""

    numbers: list[float]  # the loss and the gradient norm of every step
    bias: list[Tensor]
    busiest: float  # the load of the busiest expert in the last step, as a multiple of the mean


def course(case: Case, removed: str | None = None, folder: Path | None = None, until: int | None = None) -> Course:
    config = replace(CONFIG, shape=replace(SHAPE, experts=case.experts), routing=case.routing)
    key, _, value = case.train.partition(": ")
    job = tiny_job(STEPS, **({key: value} if key else {}))
    trainer, records = make_trainer(job, case.layout, folder, config=config, steps=until)
    mixtures = [module for module in trainer.parts.model.modules() if isinstance(module, MoE)]
    loads: list[Tensor] = []
    for module in mixtures:
        skew(module)
        module.update_bias = partial(_remember, module, module.update_bias, loads)  # type: ignore[method-assign]
    with without(trainer, removed) if removed else nullcontext():
        trainer.fit()
    numbers = [number for step, loss in records.losses.items() for number in (loss, records.norms[step])]
    bias = [module.router_bias for module in mixtures if module.router_bias is not None]
    return Course(numbers, bias, max((load.max() / load.mean()).item() for load in loads[-len(mixtures) :]))


@torch.no_grad()
def skew(module: MoE) -> None:
    """Some experts are chosen far more often than others, whatever the token."""
    assert module.router_bias is not None
    module.router_bias[:3] = torch.tensor([0.3, 0.2, 0.1])


def _remember(module: MoE, update: Any, loads: list[Tensor]) -> None:
    assert module.expert_load is not None
    loads.append(module.expert_load.clone())
    update()


@contextmanager
def without(trainer: Trainer, removed: str) -> Iterator[None]:
    """One collective brings nothing from others."""
    dimension, _, operation = removed.partition(".")
    with silenced(getattr(trainer.parts.ranks.connections, dimension), operation):
        yield


@pytest.fixture(scope="module")
def alone(gang: Gang) -> Callable[[Case], Course]:
    """The same on one rank, trained once."""
    known: dict[tuple[int, str], Course] = {}

    def train(case: Case) -> Course:
        key = (case.experts, case.train)
        if key not in known:
            known[key] = gang.run(course, case.on_one_rank, ranks=1)[0]
        return known[key]

    return train


# Layouts of four ranks are also tried, each with a deeper model, by test_every_layout.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if case.layout.world > 2 or name in SLOW else ())
        for name, case in CASES.items()
    ],
)
def test_experts_on_several_ranks_train_as_those_of_one(gang: Gang, name: str, alone: Callable[[Case], Course]) -> None:
    case = CASES[name]
    expected = alone(case)
    got = gang.run(course, case, ranks=case.layout.world)
    assert got[0].numbers == pytest.approx(expected.numbers, rel=TOLERANCE)
    for each in got:
        torch.testing.assert_close(each.bias, expected.bias, rtol=0, atol=1e-6)
        assert each.busiest > 1.5  # the most there can be is experts / top_k
    assert expected.numbers[-2] < expected.numbers[0] - 0.03  # adapters learn slowly


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("fsdp 2 · ep 2", "experts.start_exchange"),
        pytest.param("fsdp 2 · ep 2", "stage.start_sum", marks=pytest.mark.slow),
        pytest.param("cp 2 · ep 2", "rows.start_sum", marks=pytest.mark.slow),
    ],
)
def test_it_goes_wrong_without_a_collective(
    gang: Gang, name: str, removed: str, alone: Callable[[Case], Course]
) -> None:
    expected = alone(CASES[name])
    got = gang.run(course, CASES[name], removed, ranks=2)
    same_numbers = got[0].numbers == pytest.approx(expected.numbers, rel=TOLERANCE)
    same_bias = all(
        torch.allclose(bias, wanted, rtol=0, atol=1e-6)
        for each in got
        for bias, wanted in zip(each.bias, expected.bias, strict=True)
    )
    assert not (same_numbers and same_bias)


def test_balance_has_a_share_in_the_gradient_and_none_in_the_loss(gang: Gang, alone: Callable[[Case], Course]) -> None:
    case = Case(routing=replace(CONFIG.routing, auxiliary_loss=0.0))
    without_it, with_it = gang.run(course, case, ranks=1)[0].numbers, alone(Case()).numbers
    assert without_it[0] == with_it[0]
    assert without_it[1] != pytest.approx(with_it[1], rel=TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_moves_between_layouts_of_experts(
    gang: Gang, tmp_path: Path, alone: Callable[[Case], Course]
) -> None:
    numbers = []
    for until, case in ((2, Case()), (4, CASES["fsdp 4 · ep 2"]), (STEPS, CASES["replicate 2 · ep 2"])):
        numbers += gang.run(course, case, None, tmp_path, until, ranks=case.layout.world)[0].numbers
    assert numbers == pytest.approx(alone(Case()).numbers, rel=TOLERANCE)


def filled_right(case: Case, folder: str) -> dict[str, bool]:
    """By parameter: whether its parts make up that of a whole model, read from a folder and drawn from a seed."""
    config = _published(case)
    ranks = make_ranks(
        case.layout, torch.device("cpu"), torch.distributed.get_rank(), torch.distributed.get_world_size()
    )
    with torch.device("meta"):
        model = Decoder(config)
    parallelize(model, ranks, compile_blocks=False)
    model.to_empty(device="cpu")
    right = dict.fromkeys((name for name, _ in model.named_parameters()), True)
    whole = Decoder(config)
    for fill in (partial(load_weights, folder=folder), partial(Decoder.initialize, seed=7)):
        fill(whole)
        fill(model)
        expected = dict(whole.named_parameters())
        for name, value in model.named_parameters():
            right[name] &= torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])
    return right


def _published(case: Case) -> DecoderConfig:
    """As Mixtral, which has a published form: without shared experts and balancing bias."""
    return DecoderConfig(replace(SHAPE, experts=case.experts, shared_experts=0))


@pytest.mark.parametrize("name", ["fsdp 4 · ep 2", "fsdp 4 · ep 2, 6 experts", "replicate 2 · fsdp 2 · ep 2"])
def test_cut_experts_are_filled_as_whole_ones(gang: Gang, name: str, tmp_path: Path) -> None:
    config = _published(CASES[name])
    model = Decoder(config)
    model.initialize(3)
    folder = save_folder(dict(model.named_parameters()), config, tmp_path / "published", dtype=torch.float32)
    for right in gang.run(filled_right, CASES[name], str(folder), ranks=4):
        assert all(right.values()), right
