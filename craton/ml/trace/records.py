"""Records of one traced step: collectives, FLOPs and memory, as plain data that adds, scales and becomes JSON.

Bytes of a collective are those of the full tensor (the larger side), as in the planner's inventory. Every record is
marked with its micro-batch, "first", "middle" or "last", so a step of three micro-batches represents a step of many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

Place = Literal["forward", "loss", "backward", "optimizer"]
PARTS = ("parameters", "gathered parameters", "gradients", "optimizer states", "activations", "buffers", "inputs")


class CollectiveKey(NamedTuple):
    """The fields that distinguish two collectives of a step."""

    operation: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, recv, broadcast
    dimension: str  # pp, replicate, fsdp, cp, tp, ep, all, or several joined by "·"
    group_size: int
    dtype: str
    place: Place
    module: str  # "blocks.*.attention"; "" is the model itself


class FlopKey(NamedTuple):
    kind: str  # gemm, attention, experts, head
    operator: str  # mm, _grouped_mm, ...
    place: Place


class Window(NamedTuple):
    """A part of the step whose peak memory is kept: a place in one block, counted from an end of its run of layers."""

    place: Place
    run: int  # index of the run of equal layers; -1: outside the blocks
    offset: int  # 0, 1 from the run's start; -1, -2 from its end
    micro_batch: str


@dataclass
class Amount:
    """Calls and bytes."""

    count: float = 0.0
    bytes: float = 0.0


Phase = str  # "first", "middle", "last" micro-batch; "step": once per step


@dataclass
class Recording:
    """One rank's step at one depth of its model."""

    collectives: dict[tuple[Phase, CollectiveKey], Amount] = field(default_factory=dict)
    flops: dict[tuple[Phase, FlopKey], float] = field(default_factory=dict)
    windows: dict[Window, dict[str, float]] = field(default_factory=dict)  # bytes of every part at the peak
    layers: dict[int, dict[tuple[Place, str, str], int]] = field(default_factory=dict)  # block → (place, …) → calls
    parameters: dict[str, int] = field(default_factory=dict)  # name → elements on this rank

    def combined(self, others: Iterable[tuple[float, Recording]]) -> Recording:
        """Return this recording plus, for each other one, its excess over this one times the given factor."""
        total = replace(self, collectives=dict(self.collectives), flops=dict(self.flops), windows=dict(self.windows))
        for times, other in others:
            for key in self.collectives | other.collectives:
                base, more = self.collectives.get(key, Amount()), other.collectives.get(key, Amount())
                sum_ = total.collectives.get(key, Amount())
                total.collectives[key] = Amount(
                    sum_.count + times * (more.count - base.count), sum_.bytes + times * (more.bytes - base.bytes)
                )
            for flop_key in self.flops | other.flops:
                grown = other.flops.get(flop_key, 0.0) - self.flops.get(flop_key, 0.0)
                total.flops[flop_key] = total.flops.get(flop_key, 0.0) + times * grown
            for window in total.windows.keys() & other.windows.keys():
                total.windows[window] = _extended(total.windows[window], self.windows[window], other, window, times)
        return total

    def scaled(self, traced: int, wanted: int) -> Recording:
        """Return the same step with `wanted` instead of `traced` micro-batches. Those between the first and the last
        are all alike, and the inputs of all of them are on the device from the start."""
        between = (wanted - 2) / (traced - 2) if traced > 2 else 0.0
        factor = {"middle": between}
        collectives = {
            key: Amount(amount.count * factor.get(key[0], 1.0), amount.bytes * factor.get(key[0], 1.0))
            for key, amount in self.collectives.items()
        }
        flops = {key: value * factor.get(key[0], 1.0) for key, value in self.flops.items()}
        windows = {
            window: {**parts, "inputs": parts["inputs"] * wanted / traced} for window, parts in self.windows.items()
        }
        return replace(self, collectives=collectives, flops=flops, windows=windows)


def _extended(
    total: Mapping[str, float], base: Mapping[str, float], other: Recording, window: Window, times: float
) -> dict[str, float]:
    more = other.windows[window]
    return {part: total.get(part, 0.0) + times * (more.get(part, 0.0) - base.get(part, 0.0)) for part in PARTS}


@dataclass(frozen=True)
class CollectiveTotal:
    """All calls of one kind in one step of one rank."""

    operation: str
    dimension: str
    group_size: int
    dtype: str
    place: Place
    module: str
    count: float
    bytes: float


@dataclass(frozen=True)
class TraceFinding:
    """A problem that only the real code shows: where it is, and the fix."""

    module: str
    text: str
    relief: str


@dataclass(frozen=True)
class RankTrace:
    """The traced step of one rank."""

    rank: int
    stage: int  # its place in the pipeline
    layers: int
    alike: int  # number of pipeline stages with the same layers, including this one
    collectives: tuple[CollectiveTotal, ...]
    flops: dict[str, float]  # gemm, attention, experts, head
    operators: dict[str, float]  # mm, _grouped_mm, ...
    memory_bytes: float  # tensors at the peak
    memory_instant: str  # "backward of blocks.125"
    memory_parts: dict[str, float]  # at that instant; adds up to memory_bytes


@dataclass(frozen=True)
class Trace:
    """The real step on the chosen ranks of a fake world."""

    layout: str
    world: int
    micro_batches: int
    seconds: float
    ranks: tuple[RankTrace, ...]
    findings: tuple[TraceFinding, ...]

    @property
    def worst(self) -> RankTrace:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.memory_bytes)
