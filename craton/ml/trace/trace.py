"""`trace`: run the real step of a job on fake ranks, for one rank of every pipeline stage that differs.

Only a few layers of a long run of equal layers are traced, at two depths, and only a few micro-batches. The step at
full depth and batch follows from these (trace/runs.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from craton.job import Job
from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.models import config_from_shape
from craton.ml.trace.fake import TraceError
from craton.ml.trace.findings import layer_findings, parameter_findings, stage_findings
from craton.ml.trace.records import (
    Amount,
    CollectiveKey,
    CollectiveTotal,
    RankTrace,
    Recording,
    Trace,
    TraceFinding,
    Window,
)
from craton.ml.trace.runs import Depth, Depths, LayerRun, depths_of
from craton.ml.trace.step import micro_batches, trace_step
from craton.ml.trace.watch import NO_BLOCK

Progress = Callable[[int, int, str], None]


def trace(job: Job, layout: Layout, ranks: Sequence[int] = (), progress: Progress | None = None) -> Trace:
    """Run the real step at the layout's true world size. `ranks` selects the ranks; default: one of every pipeline
    stage that differs."""
    if job.train is None or job.model_shape is None:
        raise TraceError(
            f"{job.where('kind')}only jobs that train a decoder can be traced; this job is of kind {job.kind}"
        )
    started = time.monotonic()
    config = config_from_shape(job.model_shape)
    done: list[RankTrace] = []
    findings: list[TraceFinding] = []
    chosen = dict.fromkeys(ranks, 1) or differing_ranks(config.shape, layout)
    for rank in chosen:
        if not 0 <= rank < layout.world:
            raise TraceError(f"rank {rank} is not one of the {layout.world} ranks (counted from 0) of layout {layout}")
    for number, (rank, alike) in enumerate(chosen.items()):
        if progress:
            progress(number, len(chosen), f"rank {rank:,} of {layout.world:,}")
        stage = rank // (layout.world // layout.pp)
        depths = depths_of(config.shape, layout, stage)
        base = trace_step(job, layout, config, depths.base, rank)
        findings += parameter_findings(base, replace(config, shape=depths.base.shape), layout)
        more = [(times, trace_step(job, layout, config, depth, rank)) for times, depth in depths.more]
        findings += _layer_findings(depths, [base, *(recording for _, recording in more)], bool(job.train.lora))
        done.append(_rank_trace(base.combined(more), depths.whole, rank, stage, alike))
    findings += stage_findings(done, layout)
    return Trace(
        layout=str(layout),
        world=layout.world,
        micro_batches=micro_batches(job, layout),
        seconds=time.monotonic() - started,
        ranks=tuple(done),
        findings=tuple(dict.fromkeys(findings)),
    )


def differing_ranks(shape: ModelShape, layout: Layout) -> dict[int, int]:
    """Return the first rank of every pipeline stage that differs from the stages before it, and how many such stages
    there are. The first and the last stage always differ from all others."""
    ranks: dict[object, int] = {}
    alike: dict[object, int] = {}
    for stage in range(layout.pp):
        runs = depths_of(shape, layout, stage).whole.runs
        kinds = tuple((run.length, run.has_experts, run.is_sliding) for run in runs)
        key = (kinds, stage == 0, stage == layout.pp - 1)
        ranks.setdefault(key, stage * (layout.world // layout.pp))
        alike[key] = alike.get(key, 0) + 1
    return {rank: alike[key] for key, rank in ranks.items()}


def _layer_findings(depths: Depths, recordings: Sequence[Recording], has_adapters: bool) -> Iterator[TraceFinding]:
    """Report layers that differ from their neighbours, from the recording with most layers; with adapters the first
    layer does not count."""
    traced = zip((depths.base, *(depth for _, depth in depths.more)), recordings, strict=True)
    depth, recording = max(traced, key=lambda item: item[0].runs[0].length)
    first, *others = depth.runs
    if has_adapters and first.first == 0:  # nothing before the first layer needs its input gradient
        first = replace(first, first=1, length=first.length - 1)
    return layer_findings(recording, (first, *others))


def _rank_trace(recording: Recording, depth: Depth, rank: int, stage: int, alike: int) -> RankTrace:
    totals: dict[CollectiveKey, Amount] = {}
    for (_, key), amount in recording.collectives.items():
        total = totals.setdefault(key, Amount())
        total.count += amount.count
        total.bytes += amount.bytes
    flops: dict[str, float] = {}
    operators: dict[str, float] = {}
    for (_, flop_key), value in recording.flops.items():
        flops[flop_key.kind] = flops.get(flop_key.kind, 0.0) + value
        operators[flop_key.operator] = operators.get(flop_key.operator, 0.0) + value
    window, parts = max(recording.windows.items(), key=lambda item: sum(item[1].values()))
    return RankTrace(
        rank=rank,
        stage=stage,
        layers=depth.num_layers,
        alike=alike,
        collectives=tuple(
            CollectiveTotal(*key, amount.count, amount.bytes)
            for key, amount in sorted(totals.items(), key=lambda item: -item[1].bytes)
        ),
        flops=flops,
        operators=operators,
        memory_bytes=sum(parts.values()),
        memory_instant=_instant(window, depth.runs),
        memory_parts={part: size for part, size in parts.items() if size},
    )


def _instant(window: Window, runs: Sequence[LayerRun]) -> str:
    of = {"first": " of the first micro-batch", "last": " of the last micro-batch", "middle": ""}
    when = of.get(window.micro_batch, "")
    if window.run == NO_BLOCK:
        return f"{window.place}{when}"
    run = runs[window.run]
    layer = run.first + (window.offset if window.offset >= 0 else run.length + window.offset)
    return f"{window.place} of blocks.{layer}{when}"
