"""Read the metrics of a run: the steps of every rank, and the series of rank 0.

Only the ends of files are read, and less of each the more nodes there are: about a hundred megabytes for a thousand
nodes. If the end of a file does not reach back far enough for a comparison, part of the data before it is read too.
Metrics of rank 0 are read from the nodes that held it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from craton.observability.diagnosis.snapshot import STEP_PHASES, Series, StepWindow
from craton.telemetry import METRICS, RunDirectory, read_json, reporting_node, reporting_rank
from craton.telemetry.files import paths_in, read_lines, tail_lines

RECENT_STEPS, EARLIER_STEPS, WARM_STEPS = 20, 100, 5  # numbers of steps; the recent ones also take RECENT_SECONDS
RECENT_SECONDS = 4.0
MAX_WINDOWS = 10  # the recent steps, and as many ones half a window earlier, and so on
PART_STEPS = 8  # of the past, judged together
SUDDEN = 2.0  # times the steps before: the newest part alone is the recent one
CHANGED = 1.2  # times the best level: slower steps are not the past that others are compared with
NEWEST_STEPS = 5  # a majority of them must be abnormal
ALL_BYTES, MAX_BYTES, MIN_BYTES = 128 << 20, 1 << 20, 32 << 10  # of metrics: of all nodes, and limits for one
MAX_GENERATIONS = 32  # newest generations read: nodes of rank 0, reasons
MAX_POINTS, WHOLE_POINTS = 300, 60  # of a series: downsampled except for the newest
HISTORY_PARTS, HISTORY_BYTES = 24, 48 << 10  # read from a long file before its end, evenly: the run's past
SERIES = (
    "loss",
    "gradient_norm",
    "step_seconds",
    "data_seconds",
    "evaluation_loss",
    "learning_rate",
    "label_share",
    "distinct_row_share",
    "distinct_tokens",
    "copied_label_share",
    "idle_expert_share",
    "expert_load_ratio",
)
RESULTS = tuple(name for name, metric in METRICS.items() if metric.group and name.startswith("run_"))


@dataclass
class Steps:
    """The steps of one rank in the newest generation, oldest first."""

    node: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    begins_here: bool = False  # whether the first line is the first step of the generation

    def median(self, recent: bool) -> tuple[dict[str, float], int]:
        """Return phase (and "step") → median seconds, and the number of steps."""
        chosen = self.warm[-self.num_recent :] if recent else self.usual_lines
        return _medians(chosen), len(chosen)

    @cached_property
    def warm(self) -> list[dict[str, Any]]:
        return self.lines[WARM_STEPS:] if self.begins_here else self.lines

    @cached_property
    def num_recent(self) -> int:
        """The number of recent steps; fewer if the newest ones are far slower than those before."""
        newest, before = self.warm[-PART_STEPS:], self.warm[-RECENT_STEPS:-PART_STEPS]
        is_long = sum(map(_step_seconds, newest)) >= RECENT_SECONDS
        if before and is_long and _level(newest) > SUDDEN * _level(before):
            return len(newest)
        seconds = 0.0
        for number, line in enumerate(reversed(self.warm), start=1):
            seconds += _step_seconds(line)
            if number >= RECENT_STEPS and seconds >= RECENT_SECONDS:
                return number
        return min(len(self.warm), RECENT_STEPS)

    @cached_property
    def usual_lines(self) -> list[dict[str, Any]]:
        """The steps before the recent ones while the run was about as fast as it has ever been for two parts in a row:
        a run that stays slow would otherwise soon be compared with itself."""
        before = self.warm[: -self.num_recent]
        parts = [before[begin : begin + PART_STEPS] for begin in range(0, len(before), PART_STEPS)]
        levels = [_level(part) for part in parts]
        best = min(map(max, pairwise(levels)), default=max(levels, default=0.0))  # for two parts in a row
        usual = [part for part, level in zip(parts, levels, strict=True) if level <= CHANGED * best]
        return [line for part in usual for line in part][-EARLIER_STEPS:]

    def windows(self) -> tuple[StepWindow, ...]:
        """Return the medians of the recent steps, of as many half a window earlier, and so on, newest first."""
        lines, size = self.warm, self.num_recent
        result = []
        for number in range(MAX_WINDOWS):
            chosen = lines[: len(lines) - number * (size // 2)][-size:]
            if len(chosen) < max(size, PART_STEPS):
                break
            result.append(StepWindow(float(chosen[0].get("time") or 0.0), _medians(chosen)))
        return tuple(result)

    def work_deviation(self) -> float | None:
        """Return the median absolute deviation of the work of a step."""
        lines = self.lines[-self.num_recent :]
        parts = [
            (number(line.get("run_step_seconds")), number(line.get("run_communication_seconds"))) for line in lines
        ]
        works = [step - waiting for step, waiting in parts if step is not None and waiting is not None]
        if not works:
            return None
        middle = statistics.median(works)
        return statistics.median(abs(work - middle) for work in works)

    def newest(self, name: str) -> float | None:
        return next((value for line in reversed(self.lines) if (value := _recorded(line, name)) is not None), None)

    def lasting(self, name: str) -> float | None:
        """Return the median of the newest steps, so that one outlier does not count; NaN if most are not finite."""
        values = [value for line in self.lines if (value := _recorded(line, name)) is not None][-NEWEST_STEPS:]
        if len(values) < NEWEST_STEPS:
            return None
        finite = [value for value in values if math.isfinite(value)]
        return statistics.median(finite) if 2 * len(finite) > len(values) else math.nan

    def usual(self, name: str) -> float | None:
        """Return the median of the steps before those."""
        reported = [value for line in self.lines if (value := _recorded(line, name)) is not None][:-NEWEST_STEPS]
        values = [value for value in reported if math.isfinite(value)]
        return statistics.median(values) if len(values) >= WARM_STEPS else None


def _level(lines: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(map(_step_seconds, lines))


def _step_seconds(line: Mapping[str, Any]) -> float:
    return number(line.get("run_step_seconds")) or 0.0


def _medians(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return phase (and "step") → median seconds."""
    medians = {}
    for phase in (*STEP_PHASES, "step"):
        values = [value for line in lines if (value := number(line.get(f"run_{phase}_seconds"))) is not None]
        if values:
            medians[phase] = statistics.median(values)
    return medians


def read_steps(run: RunDirectory, nodes: Sequence[str], generation: int) -> dict[int, Steps]:
    """Return rank → its steps of this generation, for ranks that have any."""
    size = max(MIN_BYTES, min(MAX_BYTES, ALL_BYTES // max(1, len(nodes))))
    steps_by_rank: dict[int, Steps] = {}
    for node in nodes:
        lines, is_whole = _newest_and_earlier(run.metrics_path(node), size)
        for line in lines:
            rank = line.get("rank")
            if not isinstance(rank, int) or ("run_step_seconds" not in line and "run_loss" not in line):
                continue
            steps = steps_by_rank.setdefault(rank, Steps(node, begins_here=is_whole))
            if line.get("generation") == generation:
                steps.lines.append(line)
            else:
                steps.begins_here = True
    for steps in steps_by_rank.values():
        steps.lines.sort(key=lambda line: float(line.get("time") or 0.0))
    return {rank: steps for rank, steps in steps_by_rank.items() if steps.lines}


def _newest_and_earlier(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """Return lines of the newest steps and, if the file is too large, some from as far back as comparisons reach; and
    whether the first line of the file is included. Nodes are in lock-step, so this covers about the same steps on all
    of them."""
    length = _bytes(path)
    if length <= size:
        return tail_lines(path, size), True
    newest_bytes = 2 * size // 3
    newest = tail_lines(path, newest_bytes)
    step_bytes = newest_bytes / max(1, len({line.get("step") for line in newest}))
    back = min(length, round(step_bytes * (RECENT_STEPS + EARLIER_STEPS)))
    room = min(size - newest_bytes, back - newest_bytes)
    earlier = read_lines(path, length - back, room)[0] if room > 0 else []
    return [*earlier, *newest], back == length


def collective_seconds(steps: Mapping[int, Steps]) -> tuple[float | None, float | None]:
    """Return the time of the collectives themselves, in recent and in earlier steps: the minimum wait of any rank,
    since the last rank to arrive does not wait. The last rank may change, so this is computed step by step."""
    recent = _least_waits([item.warm[-item.num_recent :] for item in steps.values()])
    earlier = _least_waits([item.usual_lines for item in steps.values()])
    return (statistics.median(recent) if recent else None, statistics.median(earlier) if earlier else None)


def _least_waits(lines_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """Return the minimum wait of any rank in every step that all ranks recorded."""
    waits: dict[int, list[float]] = {}
    for lines in lines_by_rank:
        for line in lines:
            if (waited := number(line.get("run_communication_seconds"))) is not None:
                waits.setdefault(int(line.get("step") or 0), []).append(waited)
    return [min(values) for values in waits.values() if len(values) == len(lines_by_rank)]


def series_of(run: RunDirectory, nodes: Sequence[str]) -> Series:
    """Return the metrics of the rank that reports steps, usually rank 0, over all generations; of a repeated step, the
    last value counts. Nothing before the first step since the run was last started: what it did before is not its
    state now."""
    launch = read_json(run.launch_path)
    rank = reporting_rank(launch)
    paths = [run.metrics_path(node) for node in _reporting_nodes(run, nodes, launch)]
    lines = [line for path in paths for line in _past_and_newest(path) if line.get("rank") == rank]
    lines.sort(key=lambda line: float(line.get("time") or 0.0))
    started = launch.get("generation")
    if isinstance(started, int) and all(_generation(line) < started for line in lines):
        return Series()
    lines = _without_abandoned(lines)

    def points(name: str) -> tuple[tuple[int, float], ...]:
        values = {int(line.get("step") or 0): value for line in lines if (value := _recorded(line, name)) is not None}
        return thinned(sorted(values.items()))

    results = {name.removeprefix("run_"): found for name in RESULTS if (found := points(name))}
    return Series(**{name: points(f"run_{name}") for name in SERIES}, results=results)


def _without_abandoned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the steps that a later generation takes again, from its first one on, also those that it has not
    reached yet."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if kept and _generation(line) > _generation(kept[-1]):
            first = int(line.get("step") or 0)
            kept = [before for before in kept if int(before.get("step") or 0) < first]
        kept.append(line)
    return kept


def _generation(line: Mapping[str, Any]) -> int:
    generation = line.get("generation")
    return generation if isinstance(generation, int) else 0


def _past_and_newest(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the end of a file and, of a long one, samples of everything before: a loss is judged by the
    best level that the run ever had."""
    before = _bytes(path) - MAX_BYTES
    past: list[dict[str, Any]] = []
    if before > 0:
        for number in range(HISTORY_PARTS):
            offset = number * before // HISTORY_PARTS
            past += read_lines(path, offset, min(HISTORY_BYTES, before // HISTORY_PARTS))[0]
    return [*past, *tail_lines(path, MAX_BYTES)]


def _reporting_nodes(run: RunDirectory, nodes: Sequence[str], launch: Mapping[str, Any]) -> list[str]:
    """Return the nodes that hold that rank, now and in the last generations."""
    paths = paths_in(run.path / "generations", "[0-9]*.json")[-MAX_GENERATIONS:]
    members = [{"nodes": list(nodes)}, *(read_json(path) for path in paths)]
    found = [reporting_node(member, launch) for member in members]
    return list(dict.fromkeys(node for node in found if node is not None))


def thinned(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    if len(points) <= MAX_POINTS:
        return tuple(points)
    old, new = points[:-WHOLE_POINTS], points[-WHOLE_POINTS:]
    every = -(-len(old) // (MAX_POINTS - WHOLE_POINTS))
    return (*old[::every], *new)


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _recorded(line: Mapping[str, Any], name: str) -> float | None:
    """Return a recorded number; NaN for null, which the file holds for a value that is not finite."""
    if name not in line:
        return None
    value = line[name]
    return math.nan if value is None else number(value)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
