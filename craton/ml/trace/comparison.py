"""Compare the traced step with the planned one: collectives, FLOPs and memory, and which of them disagree.

The planned numbers are those of Craton's own stack, whatever stack the job names for its prediction. Memory counts
tensors only, without allocator slack and driver memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from craton.formatting import stored, with_prefix
from craton.job import Job
from craton.job.layout import Layout
from craton.ml.trace.records import CollectiveTotal, RankTrace, Trace, TraceFinding
from craton.planning.calibration import STACKS, UNKNOWN
from craton.planning.memory import Memory, memory
from craton.planning.step import StageInventory, Workload, inventory

BYTES_TOLERANCE = 0.01  # for collectives and FLOPs
MEMORY_TOLERANCE = 0.05
# Norms, expert loads and other sums of a few numbers: below this share of a step's bytes, or this many bytes.
NEGLIGIBLE, NEGLIGIBLE_BYTES = 1e-3, 1024.0

# Maps a planned part to the traced part that contains it; both are shown under the second name.
SHOWN_PARTS = {
    "parameters": "parameters",
    "gathered parameters": "gathered parameters",
    "unsharded parameters": "gathered parameters",
    "gradients": "gradients",
    "gradients on their way": "gradients",
    "optimizer states": "optimizer states",
}
NOT_TENSORS = ("allocator slack", "runtime and communicators")


@dataclass(frozen=True)
class ComparisonRow:
    """One number, planned and traced."""

    name: str  # "all_gather over fsdp 64", "attention", "gradients"
    planned: float
    traced: float
    planned_count: float = 0.0  # calls, of collectives
    traced_count: float = 0.0
    agrees: bool = True
    is_negligible: bool = False  # not close, but too few bytes to matter


@dataclass(frozen=True)
class RankComparison:
    """One traced rank compared with its pipeline stage."""

    rank: int
    stage: int
    collectives: tuple[ComparisonRow, ...]
    flops: tuple[ComparisonRow, ...]


@dataclass(frozen=True)
class Comparison:
    """All traced ranks compared with the plan; memory of the rank that needs the most."""

    ranks: tuple[RankComparison, ...]
    memory: tuple[ComparisonRow, ...]  # the first is the total
    findings: tuple[TraceFinding, ...]
    agrees: bool


def compare(job: Job, layout: Layout, trace: Trace) -> Comparison:
    """Compare the traced ranks with the plan, and report where the real code differs."""
    assert job.model_shape is not None
    assert job.train is not None
    work = Workload(
        job.model_shape,
        layout,
        job.sequence,
        job.global_batch_sequences,
        lora=bool(job.train.lora),
        lora_rank=job.train.lora.rank if job.train.lora else 0,
        weights=job.train.weights,
    )
    traits = STACKS[UNKNOWN]
    stages = inventory(work, traits)
    ranks = tuple(compare_rank(rank, stages.of_rank(rank.stage)) for rank in trace.ranks)
    of_memory = compare_memory(trace.worst, memory(work, traits))
    findings = [finding for rank, traced in zip(ranks, trace.ranks, strict=True) for finding in _findings(rank, traced)]
    findings += _memory_findings(of_memory, trace.worst)
    agrees = of_memory[0].agrees and all(row.agrees for rank in ranks for row in (*rank.collectives, *rank.flops))
    return Comparison(ranks, of_memory, tuple(dict.fromkeys(findings)), agrees)


def compare_rank(rank: RankTrace, stage: StageInventory) -> RankComparison:
    """Compare collectives by operation, dimension and group size, and FLOPs by kind."""
    planned: dict[tuple[str, str, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    traced: dict[tuple[str, str, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for entry in stage.entries:
        count, size = planned[entry.operation, entry.dimension, entry.ranks]
        planned[entry.operation, entry.dimension, entry.ranks] = (count + entry.count, size + entry.size_bytes)
    for collective in rank.collectives:
        count, size = traced[collective.operation, collective.dimension, collective.group_size]
        traced[collective.operation, collective.dimension, collective.group_size] = (
            count + collective.count,
            size + collective.bytes,
        )
    small = max(NEGLIGIBLE_BYTES, NEGLIGIBLE * sum(size for _, size in planned.values()))
    rows = []
    for key in sorted({*planned, *traced}, key=lambda key: (key[1], key[0], key[2])):
        operation, dimension, ranks = key
        expected, traced_size = planned[key], traced[key]
        is_close = _close(expected[1], traced_size[1], BYTES_TOLERANCE)
        is_negligible = not is_close and max(expected[1], traced_size[1]) <= small
        name = f"{operation} over {dimension} {ranks}"
        agrees = is_close or is_negligible
        rows.append(
            ComparisonRow(name, expected[1], traced_size[1], expected[0], traced_size[0], agrees, is_negligible)
        )
    flops = [
        ComparisonRow(kind, stage.flops[kind], size, agrees=_close(stage.flops[kind], size, BYTES_TOLERANCE))
        for kind, size in ((kind, rank.flops.get(kind, 0.0)) for kind in stage.flops)
        if stage.flops[kind] or size
    ]
    return RankComparison(rank.rank, rank.stage, tuple(rows), tuple(flops))


def compare_memory(rank: RankTrace, planned: Memory) -> tuple[ComparisonRow, ...]:
    """Compare the total of the worst rank, then its parts."""
    tensors = {part: size for part, size in planned.parts.items() if part not in NOT_TENSORS}
    total = sum(tensors.values())
    expected: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for sizes, parts in ((expected, tensors), (measured, rank.memory_parts)):
        for part, size in parts.items():
            sizes[SHOWN_PARTS.get(part, "activations")] += size
    agrees = _close(total, rank.memory_bytes, MEMORY_TOLERANCE)
    rows = [ComparisonRow("total", total, rank.memory_bytes, agrees=agrees)]
    rows += [
        ComparisonRow(part, expected[part], measured[part])
        for part in dict.fromkeys([*SHOWN_PARTS.values(), "activations"])
    ]
    return tuple(rows)


def _close(planned: float, traced: float, tolerance: float) -> bool:
    return abs(traced - planned) <= tolerance * max(planned, traced)


def _findings(rank: RankComparison, traced: RankTrace) -> list[TraceFinding]:
    """Report missing and unplanned collectives, with the modules that call them, and differences in FLOPs."""
    result = []
    for row in rank.collectives:
        if row.agrees:
            continue
        modules = {
            collective.module or "the model itself"
            for collective in traced.collectives
            if row.name == _name(collective)
        }
        if row.traced_count < row.planned_count:
            text = f"{row.name} is called {row.traced_count:g} times a step, {row.planned_count:g} are expected"
            relief = "find the layer that lacks it; without the reduction over ranks, results are wrong"
        elif row.traced_count > row.planned_count:
            text = (
                f"{row.name} is called {row.traced_count:g} times a step, but only {row.planned_count:g} are expected"
            )
            relief = "gather once and keep it, or correct the plan (craton/planning/step/operations.py)"
        else:
            text = f"{row.name} moves {stored(row.traced)} a step, {stored(row.planned)} are expected"
            relief = "compare the tensors that it is given with the plan's (craton/planning/step/operations.py)"
        result.append(TraceFinding(", ".join(sorted(modules)) or f"rank {rank.rank}", text, relief))
    is_plain = any(row.name == "attention" and not row.traced for row in rank.flops)
    for row in rank.flops:
        if row.agrees or (row.name == "gemm" and is_plain):
            continue
        took, expected = (with_prefix(flops, "FLOP") for flops in (row.traced, row.planned))
        text = f"{row.name} takes {took} a step, {expected} are expected"
        relief = "compare the operators with the plan's (craton/planning/step/operations.py)"
        if row.name == "attention" and is_plain:
            text = "attention runs as plain matmuls over all pairs of tokens, not as a fused kernel"
            relief = "on GPUs, context parallelism has fused kernels in 16 bit only: train in bf16"
        result.append(TraceFinding(f"stage {rank.stage}", text, relief))
    return result


def _memory_findings(rows: tuple[ComparisonRow, ...], worst: RankTrace) -> list[TraceFinding]:
    total, *parts = rows
    if total.agrees:
        return []
    off = max(parts, key=lambda row: abs(row.traced - row.planned))
    text = f"memory reaches {total.traced / total.planned:.2f} times the plan; the largest difference is {off.name}"
    relief = f"check which tensors are alive in the {worst.memory_instant} (craton/planning/memory/own_memory.py)"
    return [TraceFinding(f"rank {worst.rank}", text, relief)]


def _name(collective: CollectiveTotal) -> str:
    return f"{collective.operation} over {collective.dimension} {collective.group_size}"
