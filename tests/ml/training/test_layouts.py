"""One training, whatever the layout: DDP, FSDP and HSDP of 1, 2 and 4 ranks against a plain loop."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gang import Gang
from tiny import GLOBAL_BATCH, Text, make_trainer, moe_config, tiny_job
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from craton.job.layout import Layout
from craton.ml.data import collate
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.training import Batch, Schedule
from craton.ml.training.parallel import make_ranks
from craton.ml.training.parallel.mesh import ParallelError

STEPS = 6


def plain_losses() -> list[float]:
    """The same training in a dozen lines: whole batches, PyTorch's own AdamW and cross entropy, no parallelism."""
    from tiny import SHAPE

    job = tiny_job(STEPS)
    model = Decoder(DecoderConfig(SHAPE))
    model.initialize(0)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8
    )
    losses = []
    for step in range(1, STEPS + 1):
        first = (step - 1) * GLOBAL_BATCH
        batch = Batch.from_arrays(collate([Text().sample(index) for index in range(first, first + GLOBAL_BATCH)]))
        hidden = model(batch.tokens, batch.positions, batch.documents)
        logits = (hidden @ model.head_weight.t()).flatten(0, 1)
        loss = cross_entropy(logits, batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = Schedule.of(job).learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(sizes: dict[str, Any], options: dict[str, Any] | None = None, moe: bool = False) -> list[float]:
    torch.manual_seed(0)
    job = tiny_job(STEPS, **(options or {}))
    layout = Layout(**{"precision": job.precision, **sizes})
    trainer, records = make_trainer(job, layout, config=moe_config() if moe else None)
    assert trainer.fit() == "done"
    return list(records.losses.values())


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return plain_losses()


LAYOUTS = {
    "one rank": {"micro_batch": 8},
    "one rank, accumulated": {"micro_batch": 2},
    "ddp 2": {"replicate": 2, "micro_batch": 4},
    "fsdp 2": {"fsdp": 2, "micro_batch": 4},
    "fsdp 2, zero 2, accumulated": {"fsdp": 2, "zero": 2},
    "fsdp 2, zero 1, accumulated": {"fsdp": 2, "zero": 1},
    "ddp 4, accumulated": {"replicate": 4},
    "fsdp 4": {"fsdp": 4, "micro_batch": 2},
    "hsdp 2 x 2, accumulated": {"replicate": 2, "fsdp": 2},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "accumulated" in name else ()) for name in LAYOUTS]
)
def test_every_layout_trains_as_a_plain_loop_does(gang: Gang, name: str, expected: list[float]) -> None:
    sizes = LAYOUTS[name]
    results = gang.run(train, sizes, ranks=Layout(**sizes).world)
    assert results[0] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.3
    assert all(not other for other in results[1:]), "only rank 0 records the loss"


def test_the_same_seed_and_world_give_the_same_bits(gang: Gang) -> None:
    first, again = (gang.run(train, {"fsdp": 2, "micro_batch": 2})[0] for _ in range(2))
    assert first == again
    assert gang.run(train, {"fsdp": 2, "micro_batch": 2}, {"seed": 1})[0] != first


@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_recompute_changes_no_number(gang: Gang, recompute: str) -> None:
    kept = gang.run(train, {"fsdp": 2, "micro_batch": 4})[0]
    assert gang.run(train, {"fsdp": 2, "micro_batch": 4, "recompute": recompute})[0] == kept


@pytest.mark.slow
def test_compiled_blocks_train_as_they_do_uncompiled(gang: Gang, expected: list[float]) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    compiled = {"compile": "true"}
    assert gang.run(train, {"micro_batch": 8}, compiled, ranks=1)[0] == pytest.approx(expected, rel=1e-5)
    sizes = {"fsdp": 2, "micro_batch": 2, "recompute": "full"}
    assert gang.run(train, sizes, compiled)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_low_precision_follows_fp32(gang: Gang, expected: list[float]) -> None:
    low = {"precision": "bf16"}
    for ranks, sizes, options in (
        (1, {"micro_batch": 8}, {}),
        (2, {"fsdp": 2, "micro_batch": 4}, {}),
        (1, {"micro_batch": 8}, {"weights": "bf16"}),
        (2, {"fsdp": 2, "micro_batch": 4}, {"weights": "bf16"}),
    ):
        losses = gang.run(train, {**sizes, **low}, {**options, **low}, ranks=ranks)[0]
        assert losses == pytest.approx(expected, rel=0.02), (sizes, options)


def test_experts_train_the_same_on_one_rank_and_two(gang: Gang) -> None:
    one = gang.run(train, {"micro_batch": 4}, None, True, ranks=1)[0]
    two = gang.run(train, {"fsdp": 2, "micro_batch": 4}, None, True, ranks=2)[0]
    assert one == pytest.approx(two, rel=1e-5)
    assert math.isfinite(one[-1])


def phases(sizes: dict[str, Any]) -> dict[str, float]:
    trainer, records = make_trainer(tiny_job(STEPS), Layout(precision="fp32", **sizes))
    trainer.fit()
    return {**records.metrics_by_step[STEPS], "ledger": sum(records.seconds.values())}


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2},
        *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({"replicate": 2}, {"replicate": 2, "fsdp": 2})),
    ],
)
def test_phases_add_up_to_the_step_and_communication_is_seen(gang: Gang, sizes: dict[str, int]) -> None:
    for measured in gang.run(phases, {**sizes, "micro_batch": 2}, ranks=math.prod(sizes.values())):
        names = ("data", "compute", "communication", "optimizer", "checkpoint")
        assert sum(measured[f"run_{name}_seconds"] for name in names) == pytest.approx(measured["run_step_seconds"])
        assert 0 < measured["run_communication_seconds"] < measured["run_step_seconds"]
        assert measured["run_compute_seconds"] > 0


def waits_as_on_a_gpu() -> dict[str, list[bool]]:
    """Where FSDP2 makes a stream wait → whether the hooks of the GPU path surround it, each time, in a CPU training."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from craton.ml.training.measure import StepTimer
    from craton.ml.training.measure.timing import _GpuWaits

    places = ("wait_for_unshard", "finalize_backward")
    surrounded: dict[str, list[bool]] = {place: [] for place in places}
    hooks: list[_GpuWaits] = []

    def watched(place: str) -> Callable[..., None]:
        wait = getattr(FSDPParamGroup, place)

        def watch(group: FSDPParamGroup) -> None:
            surrounded[place].append(any(waits.is_open for waits in hooks))
            wait(group)

        return watch

    class Waits(_GpuWaits):
        is_open = False

        def _begins(self, *_: Any) -> None:
            self.is_open = True
            super()._begins()

        def _ends(self, *_: Any) -> None:
            self.is_open = False
            super()._ends()

    trainer, _ = make_trainer(tiny_job(STEPS), Layout(fsdp=2, precision="fp32", micro_batch=4))
    timer = StepTimer(torch.device("cpu"))
    for module in trainer.parts.model.modules():
        if isinstance(module, FSDPModule):
            hooks.append(Waits(timer))
            hooks[-1].attach(module, is_root=module is trainer.parts.model)
    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            patch.setattr(FSDPParamGroup, place, watched(place))
        trainer.fit()
    return surrounded


def test_the_hooks_for_gpus_stand_where_fsdp_waits(gang: Gang) -> None:
    for surrounded in gang.run(waits_as_on_a_gpu):
        for place, calls in surrounded.items():
            assert len(calls) >= STEPS, place
            assert all(calls), place


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(fsdp=2), "needs 2 ranks .*, but 1 were started"),
        (Layout(precision="mxfp8"), "precision mxfp8 can be planned but not trained yet; allowed: fp32, bf16, fp8"),
        (Layout(offload="optimizer"), "offload optimizer can be planned but not trained yet"),
    ],
)
def test_what_is_not_built_is_refused_by_name(layout: Layout, said: str) -> None:
    with pytest.raises(ParallelError, match=said):
        make_ranks(layout, torch.device("cpu"), 0, 1)
