"""A model cut into stages trains as one process does, whatever the schedule, and only with everything it sends."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gang import Gang
from tiny import VOCABULARY, Text, make_trainer, tiny_job
from torch import Tensor

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.kernels import LateGradients
from craton.ml.models import Decoder, DecoderConfig, Stage, load_weights, save_folder
from craton.ml.models.config import RoutingConfig
from craton.ml.training import Batch
from craton.ml.training.objectives import Objective
from craton.ml.training.parallel import Pipeline, make_ranks, parallelize
from craton.ml.training.parallel.mesh import ParallelError

STEPS = 6
TOLERANCE = 1e-5  # relative, of losses and gradient norms: sums are taken in another order
SIZES = (4, 32, 64, 4, 2, 8, VOCABULARY)
TIED = ModelShape("tied", *SIZES, tied_embeddings=True)
EXPERTS = ModelShape("experts", *SIZES, experts=4, top_k=2, moe_ffn_hidden=32, shared_experts=1, dense_layers=1)
MODELS = {
    "plain": DecoderConfig(ModelShape("plain", *SIZES), initializer_range=0.1),
    "tied": DecoderConfig(TIED, initializer_range=0.1),
    "few": DecoderConfig(replace(EXPERTS, shared_experts=0), initializer_range=0.1),
    "experts": DecoderConfig(
        EXPERTS, initializer_range=0.1, routing=RoutingConfig(auxiliary_loss=0.01, bias_update=0.001)
    ),
}
LORA = {"lora": "{rank: 4, targets: all}"}

Curve = list[tuple[float, float]]


class OtherText(Text):
    def sample(self, index: int) -> Any:
        return super().sample(index + 1_000_000)


def curve(
    sizes: dict[str, Any], model: str = "plain", train: dict[str, Any] | None = None, removed: str | None = None
) -> Curve:
    """The loss and the gradient norm of every step."""
    job = tiny_job(STEPS, **(train or {}))
    trainer, records = make_trainer(job, Layout(**{"precision": "fp32", **sizes}), config=MODELS[model])
    send, run, ran = dist.isend, LateGradients.run, []

    def forget_the_first(late: LateGradients) -> None:
        ran.append(late)
        if len(ran) > 1:
            run(late)

    patch: Any = {
        "sends": lambda: mock.patch.object(dist, "isend", lambda tensor, *at, **on: send(tensor * 0, *at, **on)),
        "sum of the tied embedding": lambda: mock.patch.object(Pipeline, "_sum_tied_gradients"),
        "weight gradients": lambda: mock.patch.object(LateGradients, "run", forget_the_first),
        None: nullcontext,
    }
    with patch[removed]():
        assert trainer.fit() == "done"
    norms = records.norms
    return [(loss, norms[step]) for step, loss in records.losses.items()]


def assert_close(found: Curve, expected: Curve, tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(expected) > 0
    for step, (pair, wanted) in enumerate(zip(found, expected, strict=True), start=1):
        assert pair == pytest.approx(wanted, rel=tolerance), f"step {step}"


@cache
def one_process(gang: Gang, model: str, train: tuple[tuple[str, str], ...] = (), micro_batch: int = 4) -> Curve:
    return gang.run(curve, {"micro_batch": micro_batch}, model, dict(train), ranks=1)[0]


ZERO_BUBBLE = {"schedule": "zero-bubble"}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "pp 2": ({"pp": 2}, "plain", {}),
    "pp 2, one micro-batch": ({"pp": 2, "micro_batch": 8}, "plain", {}),
    "pp 2 · fsdp 2": ({"pp": 2, "fsdp": 2}, "plain", {}),
    "pp 2 · replicate 2": ({"pp": 2, "replicate": 2, "recompute": "selective"}, "experts", {}),
    "pp 3, uneven stages": ({"pp": 3, "micro_batch": 2}, "tied", {}),
    "pp 4, tied": ({"pp": 4}, "tied", {}),
    "pp 4, fewer micro-batches than stages": ({"pp": 4, "micro_batch": 4}, "plain", LORA),
    "interleaved": ({"pp": 2, "vpp": 2, "schedule": "interleaved"}, "tied", {}),
    "interleaved, full recompute": (
        {"pp": 2, "fsdp": 2, "vpp": 2, "schedule": "interleaved", "recompute": "full"},
        "plain",
        LORA,
    ),
    "interleaved, odd": ({"pp": 2, "vpp": 2, "schedule": "interleaved", "micro_batch": 8}, "experts", {}),
    "zero-bubble": ({"pp": 2, **ZERO_BUBBLE}, "tied", {}),
    "zero-bubble, full recompute": ({"pp": 2, "fsdp": 2, "recompute": "full", **ZERO_BUBBLE}, "experts", {}),
    "zero-bubble, two chunks": ({"pp": 2, "vpp": 2, "recompute": "selective", **ZERO_BUBBLE}, "plain", {}),
    "zero-bubble, pp 4": ({"pp": 4, **ZERO_BUBBLE}, "plain", LORA),
    "zero-bubble, a stage without adapters": ({"pp": 2, **ZERO_BUBBLE}, "few", {"lora": "{rank: 4, targets: mlp}"}),
    "pp 2 · tp 2": ({"pp": 2, "tp": 2}, "tied", {}),
    "pp 2 · tp 2, zero-bubble": ({"pp": 2, "tp": 2, **ZERO_BUBBLE}, "plain", {}),
    "pp 2 · cp 2": ({"pp": 2, "cp": 2}, "plain", {}),
}
SLOW = ("pp 2, one micro-batch", "zero-bubble, two chunks", "zero-bubble, a stage without adapters")


# Layouts of four ranks are also tried, each with a deeper model, by test_every_layout.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if Layout(**sizes).world > 2 or name in SLOW else ())
        for name, (sizes, _, _) in CASES.items()
    ],
)
def test_a_pipeline_trains_as_one_process_does(gang: Gang, name: str) -> None:
    sizes, model, train = CASES[name]
    own = (sizes.get("micro_batch", 1),) if model == "experts" else ()  # their balance is that of a micro-batch
    expected = one_process(gang, model, tuple(train.items()), *own)
    assert len(expected) == STEPS
    assert_close(gang.run(curve, sizes, model, train, ranks=Layout(**sizes).world)[0], expected)


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("pp 2", "sends"),
        pytest.param("interleaved", "sends", marks=pytest.mark.slow),
        ("interleaved", "sum of the tied embedding"),
        pytest.param("zero-bubble", "weight gradients", marks=pytest.mark.slow),
    ],
)
def test_what_is_left_out_is_noticed(gang: Gang, name: str, removed: str) -> None:
    sizes, model, train = CASES[name]
    found = gang.run(curve, sizes, model, train, removed, ranks=Layout(**sizes).world)[0]
    with pytest.raises(AssertionError):
        assert_close(found, one_process(gang, model, tuple(train.items())), tolerance=1e-3)


@pytest.mark.slow
def test_bf16_follows_fp32(gang: Gang) -> None:
    low = {"precision": "bf16"}
    found = gang.run(curve, {"pp": 2, **ZERO_BUBBLE, **low}, "plain", low)[0]
    expected = one_process(gang, "plain")
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=0.02)


def evaluations(sizes: dict[str, Any]) -> tuple[list[float], dict[int, float]]:
    job = tiny_job(4, evaluate="{every_steps: 2, sequences: 7}")
    layout = Layout(precision="fp32", **sizes)
    trainer, records = make_trainer(job, layout, config=MODELS["tied"], validation=OtherText())
    trainer.fit()
    found = {step: each.get("run_evaluation_loss") for step, each in records.metrics_by_step.items()}
    return list(records.losses.values()), {step: loss for step, loss in found.items() if loss is not None}


def test_evaluation_goes_through_the_pipeline(gang: Gang) -> None:
    trained, evaluated = gang.run(evaluations, {}, ranks=1)[0]
    assert list(evaluated) == [2, 4]
    for sizes in ({"pp": 2, "fsdp": 2}, {"pp": 2, "vpp": 2, "schedule": "interleaved"}):
        losses, found = gang.run(evaluations, sizes, ranks=Layout(**sizes).world)[0]
        assert found == pytest.approx(evaluated, rel=TOLERANCE)
        assert losses == pytest.approx(trained, rel=TOLERANCE)


def continued(sizes: dict[str, Any], folder: str, steps: int | None) -> dict[int, tuple[float, float]]:
    layout = Layout(precision="fp32", **sizes)
    trainer, records = make_trainer(
        tiny_job(STEPS), layout, Path(folder), config=MODELS["tied"], steps=steps, every_steps=None
    )
    trainer.fit()
    return {step: (loss, records.norms[step]) for step, loss in records.losses.items()}


def connections_used(sizes: dict[str, Any]) -> tuple[set[tuple[str, int, bool]], set[tuple[str, int, bool]]]:
    """(group, other rank, whether it is sent) of all messages before the first step, and of those in a step."""
    seen: set[tuple[str, int, bool]] = set()

    def noting(name: str) -> Any:
        call = getattr(dist, name)

        def note(tensor: Tensor, other: int, *, group: Any) -> Any:
            seen.add((group.group_name, other, "send" in name))
            return call(tensor, other, group=group)

        return note

    with mock.patch.multiple(dist, **{name: noting(name) for name in ("send", "recv", "isend", "irecv")}):
        trainer, _ = make_trainer(tiny_job(1), Layout(precision="fp32", **sizes), config=MODELS["tied"])
        before = set(seen)
        seen.clear()
        trainer.fit()
    return before, seen


@pytest.mark.parametrize("sizes", [{"pp": 4}, {"pp": 2, "fsdp": 2, "vpp": 2, "schedule": "interleaved"}], ids=str)
def test_every_connection_is_made_before_the_first_step(gang: Gang, sizes: dict[str, Any]) -> None:
    """NCCL opens each direction with its first message and both ends wait for it, which in the order of a step may be
    forever."""
    for before, during in gang.run(connections_used, sizes, ranks=4):
        assert during
        assert during <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp": 2, "vpp": 2, "schedule": "interleaved"}, {"fsdp": 2}),
        ({"fsdp": 2}, {"pp": 4, "schedule": "zero-bubble"}),
        ({"pp": 4}, {}),
    ],
)
def test_a_checkpoint_changes_the_pipeline(
    gang: Gang, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    expected = one_process(gang, "tied")
    first = gang.run(continued, before, str(tmp_path), 3, ranks=Layout(**before).world)[0]
    then = gang.run(continued, after, str(tmp_path), None, ranks=Layout(**after).world)[0]
    assert sorted(first | then) == list(range(1, STEPS + 1))
    assert min(then) > 1
    assert_close([(first | then)[step] for step in range(1, STEPS + 1)], expected)


def reported(sizes: dict[str, Any]) -> list[dict[str, float]]:
    def squared(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -(batch.weight * log_probs).sum(), {"squares": (batch.weight * log_probs.square()).sum()}

    trainer, records = make_trainer(
        tiny_job(2), Layout(precision="fp32", **sizes), config=MODELS["plain"], objective=Objective("own", squared)
    )
    trainer.fit()
    return [
        {name: each.get(f"run_{name}") for name in ("loss", "squares")} for each in records.metrics_by_step.values()
    ]


def test_what_an_objective_reports_reaches_all_stages(gang: Gang) -> None:
    expected = gang.run(reported, {}, ranks=1)[0]
    for found, wanted in zip(gang.run(reported, {"pp": 2})[0], expected, strict=True):
        assert found == pytest.approx(wanted, rel=TOLERANCE)


def kept_weights(folder: str) -> dict[str, dict[str, list[str]]]:
    """What each way of making this rank's part gives: the parameters that differ from those of the whole."""
    whole = Decoder(MODELS["tied"])
    whole.initialize(3)
    if dist.get_rank() == 0:
        save_folder(whole.state_dict(), whole.config, folder, dtype=torch.float32)
    dist.barrier()
    layout = Layout(pp=2, vpp=2, schedule="interleaved", precision="fp32")
    ranks = make_ranks(layout, torch.device("cpu"), dist.get_rank(), 2)
    found = {}
    for way in ("initialized", "loaded", "cut"):
        with torch.device("cpu" if way == "cut" else "meta"):
            model = Decoder(MODELS["tied"])
        if way == "cut":
            model.load_state_dict(whole.state_dict())
        parallelize(model, ranks, compile_blocks=False)
        if way == "initialized":
            model.to_empty(device="cpu")
            model.initialize(3)
        elif way == "loaded":
            model.to_empty(device="cpu")
            load_weights(model, folder)
        own = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[operator]
        same = whole.state_dict()
        found[way] = {
            "names": list(own),
            "different": [name for name, value in own.items() if not torch.equal(value, same[name])],
        }
    return found


def test_a_rank_holds_its_own_layers_with_the_numbers_of_the_whole(gang: Gang, tmp_path: Path) -> None:
    whole = {name for name, _ in Decoder(MODELS["tied"]).named_parameters()}
    first, last = gang.run(kept_weights, str(tmp_path / "folder"))
    for ways, layers, others in ((first, "02", {"embedding"}), (last, "13", {"embedding", "norm"})):
        expected = {name for name in whole if name.split(".")[0] in others or name.startswith(tuple_of(layers))}
        for way, found in ways.items():
            assert set(found["names"]) == expected, way
            assert not found["different"], way


def tuple_of(layers: str) -> tuple[str, ...]:
    return tuple(f"blocks.{layer}." for layer in layers)


def test_more_stages_than_layers_are_refused() -> None:
    model = Decoder(MODELS["plain"])
    ranks = mock.Mock(layout=Layout(pp=8), place={"pp": 0})
    with pytest.raises(ParallelError, match="pp 8 · vpp 1 = 8 stages, but the model has 4 layers"):
        parallelize(model, ranks, compile_blocks=False)


def test_stages_one_after_the_other_are_the_whole() -> None:
    whole = Decoder(MODELS["plain"])
    whole.initialize(0)
    tokens = torch.randint(VOCABULARY, (2, 8))
    hidden = tokens
    for stage in (Stage(range(3), is_last=False), Stage(range(3, 4), is_first=False)):
        part = Decoder(MODELS["plain"])
        part.keep_stages([stage])
        part.initialize(0)
        hidden = part(hidden, torch.arange(8).expand(2, 8))
    assert torch.equal(hidden, whole(tokens))
