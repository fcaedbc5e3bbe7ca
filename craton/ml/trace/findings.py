"""Problems that only the real code shows: a parameter that is whole although the layout shards it, a layer whose
collectives differ from its neighbours', pipeline stages with unequal work."""

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

UNEVEN = 0.1  # excess over the mean stage's FLOPs from which a stage is reported
MIN_NEIGHBOURS = 3  # minimum length of a run in which one different layer can be detected

# Every rank of a tensor-parallel group holds these whole; tp shards all other weights.
WHOLE_UNDER_TP = ("norm.weight", "router.weight", "q_a.weight", "kv_a.weight")


def parameter_findings(recording: Recording, config: DecoderConfig, layout: Layout) -> Iterator[TraceFinding]:
    """Report parameters of which this rank holds more than the layout allows; `config` is that of the traced depth."""
    with torch.device("meta"):
        whole = dict(Decoder(config).named_parameters())
    for name, size in recording.parameters.items():
        if name not in whole:
            continue
        full = whole[name].numel()
        inner, sharded = _cuts(name, layout)
        # FSDP2 shards by rows after tp and ep, so a rank may hold one row more than its share
        rows = whole[name].shape[0]
        share = max(math.ceil(rows / sharded) / inner, math.ceil(rows / inner / sharded)) / rows * full
        if size <= max(share, 1.5 * full / (inner * sharded)):
            continue
        module = name.rpartition(".")[0]
        held = "is whole" if size == full else f"has {size:,} of {full:,} elements"
        yield TraceFinding(
            module,
            f"{name} {held} on this rank; the layout shards it {inner * sharded} ways ({layout})",
            f"pass {module} to fully_shard, or shard it by tp or ep, in craton/ml/training/parallel/mesh.py",
        )


def layer_findings(recording: Recording, runs: Sequence[LayerRun]) -> Iterator[TraceFinding]:
    """Report layers whose collectives differ from those of the equal layers around them."""
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
    """Report pipeline stages that do more work than the others: all stages wait for the slowest."""
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
                "choose pp · vpp so that the layers divide evenly, with the head counted as one or two layers",
            )


def _cuts(name: str, layout: Layout) -> tuple[int, int]:
    """Return (ranks over which tp or ep shard a parameter, ranks over which FSDP2 shards it)."""
    shards = layout.fsdp * layout.cp
    if ".experts." in name:
        return layout.ep, max(1, shards // layout.ep) * layout.tp
    return (1 if name.endswith(WHOLE_UNDER_TP) else layout.tp), shards
