"""What only the real code shows: a parameter that is whole although the layout cuts it, a layer that talks to the
other ranks unlike its neighbours, stages that do not weigh the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from craton.formatting import percent
from craton.job.layout import Layout
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.trace.records import RankTrace, Recording, TraceFinding
from craton.ml.trace.runs import LayerRun

UNEVEN = 0.1  # of the mean stage's FLOPs, from which a stage is worth a word
MIN_NEIGHBOURS = 3  # layers of a run, from which one that differs from the others can be told

# Every rank of a tensor-parallel group holds these whole; all other weights are cut by tp.
WHOLE_UNDER_TP = ("norm.weight", "router.weight", "q_a.weight", "kv_a.weight")


def parameter_findings(recording: Recording, config: DecoderConfig, layout: Layout) -> Iterator[TraceFinding]:
    """Parameters of which this rank holds more than the layout says; `config` is that of the traced depth."""
    with torch.device("meta"):
        whole = dict(Decoder(config).named_parameters())
    for name, size in recording.parameters.items():
        if name not in whole:
            continue
        full = whole[name].numel()
        inner, sharded = _cuts(name, layout)
        # FSDP2 cuts by rows, of which tp and ep may have left a part: a rank may hold one row more than its share
        rows = whole[name].shape[0]
        share = max(math.ceil(rows / sharded) / inner, math.ceil(rows / inner / sharded)) / rows * full
        if size <= max(share, 1.5 * full / (inner * sharded)):
            continue
        module = name.rpartition(".")[0]
        held = "is whole" if size == full else f"has {size:,} of {full:,} numbers"
        yield TraceFinding(
            module,
            f"{name} {held} on this rank; the layout cuts it {inner * sharded} times ({layout})",
            f"give {module} to fully_shard, or to the cut by tp or ep, in craton/ml/training/parallel/mesh.py",
        )


def layer_findings(recording: Recording, runs: Sequence[LayerRun]) -> Iterator[TraceFinding]:
    """Layers whose collectives are not those of the equal layers beside them."""
    for run in runs:
        if run.length < MIN_NEIGHBOURS:
            continue
        calls = {layer: recording.layers.get(layer, {}) for layer in run.layers}
        for key in sorted({key for item in calls.values() for key in item}):
            usual, _ = Counter(call.get(key, 0) for call in calls.values()).most_common(1)[0]
            for layer, entry in calls.items():
                if entry.get(key, 0) != usual:
                    place, operation, dimension = key
                    yield TraceFinding(
                        f"blocks.{layer}",
                        f"blocks.{layer} has {entry.get(key, 0)} {operation} over {dimension} in its {place} pass; the "
                        f"equal layers beside it have {usual}",
                        f"compare how blocks.{layer} and its neighbours are built and sharded",
                    )


def stage_findings(ranks: Sequence[RankTrace], layout: Layout) -> Iterator[TraceFinding]:
    """Pipeline stages that do more than the others: all wait for the slowest."""
    if layout.pp == 1 or len(ranks) < 2:
        return
    total = sum(rank.alike * sum(rank.flops.values()) for rank in ranks)
    mean = total / sum(rank.alike for rank in ranks)
    for rank in ranks:
        excess = sum(rank.flops.values()) / mean - 1
        if excess > UNEVEN:
            head = " and the head" if rank.flops.get("head") else ""
            yield TraceFinding(
                f"stage {rank.stage}",
                f"stage {rank.stage} ({rank.layers} layers{head}) computes {percent(excess)} more than the mean stage",
                "choose pp · vpp so that layers, and the head as one or two more, divide evenly",
            )


def _cuts(name: str, layout: Layout) -> tuple[int, int]:
    """(ranks that tp or ep cut a parameter over, ranks that FSDP2 shards it over)."""
    shards = layout.fsdp * layout.cp
    if ".experts." in name:
        return layout.ep, max(1, shards // layout.ep) * layout.tp
    return (1 if name.endswith(WHOLE_UNDER_TP) else layout.tp), shards
