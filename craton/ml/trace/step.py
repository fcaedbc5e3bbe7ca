"""Run one real training step of one fake rank under observation: the job's own model, layout, loss, loop and optimizer.

Micro-batches between the first and the last are all alike, so only as many run as are needed to fill the pipeline. At
that point activation memory is at its peak.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from craton.job import Job
from craton.job.layout import Action, Layout
from craton.ml.models import DecoderConfig
from craton.ml.trace.fake import fake_rank
from craton.ml.trace.patches import replaced
from craton.ml.trace.records import Recording, Window
from craton.ml.trace.runs import Depth, LayerRun
from craton.ml.trace.watch import NO_BLOCK, StepWatch
from craton.ml.training import (
    AdamW,
    Batch,
    Parts,
    Schedule,
    Trainer,
    build_decoder,
    build_optimizer,
    loop,
    objective_of,
)
from craton.ml.training.parallel import Pipeline, Ranks, make_ranks
from craton.telemetry.rank import LedgerClock

MORE_MICRO_BATCHES = 2  # beyond those that fill the pipeline, so at least one is between the first and the last


def trace_step(job: Job, layout: Layout, config: DecoderConfig, depth: Depth, rank: int) -> Recording:
    """Trace the step of one rank with a model of this depth, scaled to all micro-batches of the job."""
    with fake_rank(rank, layout.world) as mode:
        ranks = make_ranks(layout, torch.device("cpu"), rank, layout.world)
        model = build_decoder(replace(config, shape=depth.shape), job, ranks)
        with mode:
            trainer = make_trainer(job, ranks, model)
            batches = make_batches(job, ranks)
            watch = watch_of(trainer, model, ranks)
            run_step(trainer, batches, watch)
            parameters = {name: _local_size(parameter) for name, parameter in model.named_parameters()}
    recorded = replace(recording(watch, depth.runs), parameters=parameters)
    return recorded.scaled(len(batches), micro_batches(job, layout))


def make_trainer(job: Job, ranks: Ranks, model: nn.Module) -> Trainer:
    """Build the loop's own trainer without data, checkpoints and records, which a step does not use."""
    absent = cast("Any", None)
    return Trainer(
        Parts(
            job=job,
            ranks=ranks,
            model=model,
            optimizer=build_optimizer(job, ranks, model),
            objective=objective_of(job),
            schedule=Schedule.of(job),
            open_loader=absent,
            evaluate=None,
            checkpointer=absent,
            recorder=absent,
            clock=LedgerClock(),
            meter=absent,
        )
    )


def make_batches(job: Job, ranks: Ranks) -> list[Batch]:
    """Build rows of one document each: what the planner assumes, and the maximum cost of attention."""
    layout = ranks.layout
    size = (layout.micro_batch, job.sequence)

    def numbers() -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def batch() -> Batch:
        whole = Batch(numbers(), numbers(), numbers(), torch.zeros(size, dtype=torch.float32))
        return whole.cut(ranks.connections.context)

    return [batch() for _ in range(traced_micro_batches(layout, ranks.place["pp"], micro_batches(job, layout)))]


def traced_micro_batches(layout: Layout, pipeline_rank: int, wanted: int) -> int:
    """Return how many micro-batches fill the pipeline of this rank, plus a few, limited to those that exist."""
    if layout.pp == 1:
        return min(wanted, 1 + MORE_MICRO_BATCHES)
    if layout.vpp > 1:  # they come in groups of pp; a rank begins with the second group before its first backward pass
        return min(wanted, 3 * layout.pp)
    filling = layout.pp if layout.schedule == "zero-bubble" else layout.pp - pipeline_rank  # weights wait on the last
    return min(wanted, filling + MORE_MICRO_BATCHES)


def micro_batches(job: Job, layout: Layout) -> int:
    return max(1, job.global_batch_sequences // (layout.data_parallel * layout.micro_batch))


def watch_of(trainer: Trainer, model: nn.Module, ranks: Ranks) -> StepWatch:
    """Return a watch that knows the model's modules and what is in memory before the step."""
    watch = StepWatch({module: name for name, module in model.named_modules()}, _Dimensions(ranks).name)
    for parameter in model.parameters():
        watch.own(parameter, "parameters")
        if parameter.requires_grad:
            watch.watch_gradient(parameter)
    for buffer in model.buffers():
        watch.own(buffer, "buffers")
    for state in trainer.parts.optimizer.state().values():
        watch.own(state, "optimizer states")
    return watch


def run_step(trainer: Trainer, batches: list[Batch], watch: StepWatch) -> None:
    """Run the part of a `Trainer` step between data loading and checkpointing."""
    for batch in batches:
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.weight):
            watch.own(tensor, "inputs")
    last = len(batches) - 1

    def begin(micro_batch: int, is_backward: bool = False) -> None:
        watch.message_place = "backward" if is_backward else "forward"
        watch.micro_batch = "last" if micro_batch == last else "first" if micro_batch == 0 else "middle"

    with ExitStack() as stack:
        for owner, name, value in (*_counting_losses(begin), *_counting_actions(begin), _summing(watch)):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(watch)
        count, _ = trainer._agree(batches)
        loss, report = trainer._forward_backward(batches, count)
        watch.is_optimizing = True
        trainer._update(1e-4, loss, report)


def _counting_losses(begin: Callable[..., None]) -> list[tuple[Any, str, Any]]:
    """Without a pipeline, the loop computes one loss after the other."""
    batch_loss, numbers = loop.batch_loss, itertools.count()

    def counted(*arguments: Any) -> Any:
        begin(next(numbers))
        return batch_loss(*arguments)

    return [(loop, "batch_loss", counted)]


def _counting_actions(begin: Callable[..., None]) -> list[tuple[Any, str, Any]]:
    """A pipeline runs its actions in schedule order, and posts the receives of later actions."""

    def counted(method: Callable[..., None]) -> Callable[..., None]:
        def act(pipeline: Pipeline, step: Any, action: Action) -> None:
            begin(action.micro_batch, action.kind != "forward")
            method(pipeline, step, action)

        return act

    post = Pipeline._post_receives

    def post_receives(pipeline: Pipeline, step: Any, actions: Sequence[Action]) -> None:
        for action in actions:
            begin(action.micro_batch, action.kind != "forward")
            post(pipeline, step, [action])

    names = ("_forward", "_backward", "_weight_gradients")
    return [
        *((Pipeline, name, counted(getattr(Pipeline, name))) for name in names),
        (Pipeline, "_post_receives", post_receives),
    ]


def _summing(watch: StepWatch) -> tuple[Any, str, Any]:
    """Gradient sums between micro-batches count as gradients."""
    accumulate = AdamW.accumulate

    def summed(optimizer: AdamW) -> None:
        with watch.part("gradients"):
            accumulate(optimizer)

    return AdamW, "accumulate", summed


def recording(watch: StepWatch, runs: Sequence[LayerRun]) -> Recording:
    """Return what the watch saw, with memory by place in the run instead of by block number."""
    places = {layer: (number, run.offsets(layer)) for number, run in enumerate(runs) for layer in run.layers}
    windows: dict[Window, dict[str, float]] = {}
    for (place, block, micro_batch), parts in watch.peaks.items():
        if block == NO_BLOCK:
            windows[Window(place, NO_BLOCK, 0, micro_batch)] = parts
            continue
        number, offsets = places[block]
        for offset in offsets:
            windows[Window(place, number, offset, micro_batch)] = parts
    return Recording(watch.collectives, watch.flops, windows, watch.layers)


def _local_size(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


NUMBERS_BYTES = 256  # a sum of loss, counts and objective reports is smaller, one of gradients larger


class _Dimensions:
    """Name of a process group in terms of the layout's dimensions."""

    def __init__(self, ranks: Ranks) -> None:
        self._layout = ranks.layout
        self._named: dict[str, str] = {}

    def name(self, group: ProcessGroup, operation: str, size: int, is_sharding: bool) -> str:
        """Return the dimension. FSDP2's collectives are `fsdp`, and `replicate` between copies; an all-to-all is `ep`;
        a sum of a few numbers over all ranks is `all`. Any other collective gets the dimensions in which its ranks
        differ."""
        if is_sharding:
            return "replicate" if operation == "all_reduce" else "fsdp"
        if operation == "all_to_all":
            return "ep"
        if group.size() == self._layout.world and operation == "all_reduce" and size <= NUMBERS_BYTES:
            return "all"
        if group.group_name not in self._named:
            self._named[group.group_name] = self._differing(dist.get_process_group_ranks(group))
        return self._named[group.group_name]

    def _differing(self, members: list[int]) -> str:
        differing, inner = [], 1
        for dimension in ("tp", "cp", "fsdp", "replicate", "pp"):
            size = getattr(self._layout, dimension)
            if len({member // inner % size for member in members}) > 1:
                differing.append(dimension)
            inner *= size
        if differing == ["cp", "fsdp"]:
            return "fsdp"  # weights are sharded over both
        return "·".join(reversed(differing))
