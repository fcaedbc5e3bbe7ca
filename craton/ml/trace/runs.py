"""Runs of equal layers: why a few traced layers can represent all of them.

Every layer of a run does the same work, so counts and bytes of a step are linear in the run's length. So is the memory
at a given place, for example the backward pass of the last layer but one. The peak is at an end of a run, because in
between memory only rises or only falls. Two depths therefore give the exact step at any depth. In a pipeline whose
chunks differ by a layer, memory is that of the mean chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from craton.job.layout import Layout, stage_layers
from craton.job.model import ModelShape

TRACED_LAYERS = 3  # of a run: its ends, and one in between that represents the rest


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind."""

    first: int  # index of its first layer
    length: int
    has_experts: bool
    is_sliding: bool

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.length)

    def offsets(self, layer: int) -> tuple[int, ...]:
        """Return a layer's position from the ends of the run: 0, 1 and -2, -1; nothing for those in between."""
        from_start = layer - self.first
        return tuple(offset for offset in (from_start, from_start - self.length) if offset in (0, 1, -2, -1))


@dataclass(frozen=True)
class Depth:
    """A model of a given depth, and the runs of its layers that one rank holds."""

    shape: ModelShape
    runs: tuple[LayerRun, ...]

    @property
    def num_layers(self) -> int:
        return sum(run.length for run in self.runs)


@dataclass(frozen=True)
class Depths:
    """What is traced for one rank. The whole step is `base` plus, for each of `more`, a multiple of its excess over
    `base`."""

    whole: Depth
    base: Depth
    more: tuple[tuple[float, Depth], ...] = ()


def depths_of(shape: ModelShape, layout: Layout, pipeline_rank: int) -> Depths:
    """Return the minimum number of layers that determine the step of this rank."""
    whole = _depth(shape, layout, pipeline_rank)
    return _of_whole_model(whole) if layout.pp == 1 else _of_stages(whole, layout, pipeline_rank)


def _of_whole_model(whole: Depth) -> Depths:
    """Shorten every run; trace once more with each run one layer longer."""
    lengths = [min(run.length, TRACED_LAYERS) for run in whole.runs]
    more = []
    for number, run in enumerate(whole.runs):
        if run.length > TRACED_LAYERS:
            longer = [length + (place == number) for place, length in enumerate(lengths)]
            more.append((float(run.length - TRACED_LAYERS), _with_lengths(whole, longer)))
    return Depths(whole, _with_lengths(whole, lengths), tuple(more))


def _with_lengths(whole: Depth, lengths: list[int]) -> Depth:
    runs, first = [], 0
    for run, length in zip(whole.runs, lengths, strict=True):
        runs.append(replace(run, first=first, length=length))
        first += length
    dense = sum(run.length for run in runs if not run.has_experts) if whole.shape.is_moe else 0
    return Depth(_shortened(whole.shape, first, dense, sum(run.length for run in runs if run.is_sliding)), tuple(runs))


def _of_stages(whole: Depth, layout: Layout, pipeline_rank: int) -> Depths:
    """Shorten all stages equally, so the cut stays the same; layers with experts follow leading dense ones."""
    stages = layout.pp * layout.vpp
    dense = sum(run.length for run in whole.runs if not run.has_experts) if whole.shape.is_moe else 0
    kinds = {(run.has_experts, run.is_sliding) for run in whole.runs}
    per_stage = dense + TRACED_LAYERS
    if len(kinds) > 1 + (dense > 0) or dense >= whole.runs[0].length + 1 or whole.num_layers <= layout.vpp * per_stage:
        return Depths(whole, whole)
    is_sliding = all(run.is_sliding for run in whole.runs)

    def at(layers: int) -> Depth:
        shape = _shortened(
            whole.shape,
            layers * stages,
            pipeline_rank * layers + dense if dense else 0,
            layers * stages if is_sliding else 0,
        )
        return _depth(shape, layout, pipeline_rank)

    times = whole.num_layers / layout.vpp - per_stage
    return Depths(whole, at(per_stage), ((times, at(per_stage + 1)),))


def _depth(shape: ModelShape, layout: Layout, pipeline_rank: int) -> Depth:
    chunks = stage_layers(shape.layers, layout.pp, layout.vpp)[pipeline_rank :: layout.pp]
    return Depth(shape, tuple(run for chunk in chunks for run in _runs(shape, chunk)))


def _runs(shape: ModelShape, layers: range) -> list[LayerRun]:
    runs: list[LayerRun] = []
    for layer in layers:
        has_experts = shape.is_moe and layer >= shape.dense_layers
        is_sliding = layer >= shape.layers - shape.sliding_layers
        if runs and (runs[-1].has_experts, runs[-1].is_sliding) == (has_experts, is_sliding):
            runs[-1] = replace(runs[-1], length=runs[-1].length + 1)
        else:
            runs.append(LayerRun(layer, 1, has_experts, is_sliding))
    return runs


def _shortened(shape: ModelShape, layers: int, dense: int, sliding: int) -> ModelShape:
    return replace(shape, layers=layers, dense_layers=dense, sliding_layers=sliding)
