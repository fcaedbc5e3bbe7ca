"""The curves of a run from the records of rank 0: loss, throughput, step time and custom metrics over the steps.

Only new data is read. If there is much of it, as at the first read or after hours, evenly spread chunks give the shape
of the curve, and the end of the file the newest values. Lines of other ranks are skipped unparsed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from craton.telemetry import METRICS, RunDirectory, read_json, reporting_node, reporting_rank, split_label
from craton.telemetry.files import open_regular, parse_line, paths_in

WHOLE_BYTES = 6 << 20  # new data up to this size is read completely
CHUNKS, CHUNK_BYTES = 300, 16 << 10  # of larger data, besides its last WHOLE_BYTES // 4
MAX_POINTS = 600  # per curve, about its width in pixels
KEPT_POINTS = 4 * MAX_POINTS
MAX_EVALUATIONS = 300  # likewise for evaluations
KEPT_EVALUATIONS = 2 * MAX_EVALUATIONS
MAX_OWN_METRICS = 24  # drawn; the number of the others is shown
MAX_COUNTED_METRICS = 1000  # a job with a new name at every step must not fill the memory
MAX_NAME_CHARACTERS = 100
RESULTS = tuple(name for name, metric in METRICS.items() if metric.group and name.startswith("run_"))
CURVES = ("run_loss", "run_evaluation_loss", "run_tokens_per_second", "run_step_seconds", "run_gradient_norm", *RESULTS)
RARE = ("run_evaluation_loss", *(name for name in RESULTS if name.startswith(("run_validation_", "run_evaluation_"))))
STAMP = ("time", "step", "generation", "node", "rank")  # keys of every line
_RANK_MARKS = ('"rank":{}}}', '"rank":{},', '"rank": {}}}', '"rank": {},')

Point = tuple[float, ...]  # values of CURVES; NaN where there is none


@dataclass(frozen=True)
class Curves:
    """Steps and, for each of CURVES and their labels with data, its value at every step; None where missing."""

    steps: list[int]
    values: dict[str, list[float | None]]
    own: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)  # name → steps and values
    num_hidden: int = 0  # custom metrics that are not in `own`


class History:
    """Follow the rank that reports steps, usually rank 0, over generations and nodes."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._launch = read_json(run.launch_path)
        self._rank = reporting_rank(self._launch)
        self._marks = tuple(mark.format(self._rank).encode() for mark in _RANK_MARKS)
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before the first read: files that became shorter were rewritten."""
        self._offsets: dict[Path, int] = {}
        self._points: dict[int, dict[str, float]] = {}
        self._nodes: dict[int, str] = {}  # generation → node of that rank
        self._own: list[str] = []  # names in order of first appearance
        self._labelled: list[str] = []
        self._hidden: set[str] = set()

    def look(self) -> Curves:
        if any(_is_shorter(path, offset) for path, offset in self._offsets.items()):
            self._forget()
        for node in self._reporting_nodes():
            path = self._run.metrics_path(node)
            for line in self._new_lines(path):
                self._take(line)
        self._thin()
        return self._curves()

    def _reporting_nodes(self) -> list[str]:
        for path in paths_in(self._run.path / "generations", "[0-9]*.json"):
            if path.stem.isdecimal() and int(path.stem) not in self._nodes:
                node = reporting_node(read_json(path), self._launch)
                if node is not None:
                    self._nodes[int(path.stem)] = node
        if not self._nodes:
            launched = read_json(self._run.launch_path)
            node = reporting_node(launched, launched)
            return [] if node is None else [node]
        return list(dict.fromkeys(node for _, node in sorted(self._nodes.items())))

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                offset = self._offsets.get(path, 0)
                if size - offset > WHOLE_BYTES:
                    begin, offset = offset, size - WHOLE_BYTES // 4
                    for number in range(CHUNKS):
                        start = begin + number * (offset - begin) // CHUNKS
                        yield from _whole_lines(file, start, CHUNK_BYTES, is_cut=number > 0)[0]
                    lines, end = _whole_lines(file, offset, size - offset, is_cut=True)
                else:
                    lines, end = _whole_lines(file, offset, max(0, size - offset), is_cut=False)
                self._offsets[path] = end
                yield from lines
        except OSError:
            return

    def _take(self, line: bytes) -> None:
        if not any(mark in line for mark in self._marks):
            return
        document = parse_line(line)
        if document is None or document.get("rank") != self._rank or not isinstance(document.get("step"), int):
            return
        names = [*CURVES, *self._labelled_names(document), *self._own_names(document)]
        values = {name: value for name in names if (value := finite(document.get(name))) is not None}
        if values:  # a repeated step replaces the earlier values
            self._points.setdefault(document["step"], {}).update(values)

    def _labelled_names(self, document: Mapping[str, Any]) -> list[str]:
        """Return the results with a label that are drawn, such as those of the terms of a reward."""
        names = [name for name in document if (split := split_label(name)) is not None and split[0] in RESULTS]
        self._labelled += [name for name in names if name not in self._labelled]
        del self._labelled[MAX_OWN_METRICS:]
        return [name for name in names if name in self._labelled]

    def _own_names(self, document: Mapping[str, Any]) -> list[str]:
        """Return the custom metrics of the line that are drawn."""
        result = []
        for name, value in document.items():
            if name in METRICS or name in STAMP or split_label(name) is not None or finite(value) is None:
                continue
            is_known = name in self._own
            if not is_known and (len(self._own) >= MAX_OWN_METRICS or len(name) > MAX_NAME_CHARACTERS):
                if len(self._hidden) < MAX_COUNTED_METRICS:
                    self._hidden.add(name)
                continue
            if not is_known:
                self._own.append(name)
            result.append(name)
        return result

    def _thin(self) -> None:
        if len(self._points) <= KEPT_POINTS:
            return
        kept = set(on_grid(self._points, KEPT_POINTS // 2))
        for name in (*RARE, *self._own):  # may be recorded rarely
            kept.update(on_grid(self._steps_of(name), KEPT_EVALUATIONS))
        self._points = {step: values for step, values in self._points.items() if step in kept}

    def _steps_of(self, name: str) -> list[int]:
        return [step for step, values in self._points.items() if name in values]

    def _curves(self) -> Curves:
        evaluated = on_grid({step for name in RARE for step in self._steps_of(name)}, MAX_EVALUATIONS)
        shown = sorted({*on_grid(self._points, MAX_POINTS), *evaluated})
        values: dict[str, list[float | None]] = {}
        for name in (*CURVES, *self._labelled):
            column = [self._points[step].get(name) for step in shown]
            if any(value is not None for value in column):
                values[name] = [None if value is None else _short(value) for value in column]
        own = {}
        for name in self._own:
            steps = sorted(on_grid(self._steps_of(name), MAX_EVALUATIONS))
            own[name] = (steps, [_short(self._points[step][name]) for step in steps])
        return Curves(shown, values, own, len(self._hidden))


def finite(value: object) -> float | None:
    """Return a drawable number; None for anything else, such as NaN or an integer too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def on_grid(steps: Iterable[int], most: int) -> list[int]:
    """Return at most `most` steps (and the last one): the first of every cell of a grid over step numbers. The grid's
    stride is a power of two, so that repeated thinning keeps the same steps as thinning once, and the curve is equally
    fine everywhere."""
    ordered = sorted(steps)
    stride = 1
    while True:
        first_in_cell: dict[int, int] = {}
        for step in ordered:
            first_in_cell.setdefault(step // stride, step)
        if len(first_in_cell) <= most:
            return list(dict.fromkeys([*first_in_cell.values(), *ordered[-1:]]))
        stride *= 2


def _is_shorter(path: Path, size: int) -> bool:
    try:
        return os.stat(path).st_size < size
    except OSError:
        return False


def _whole_lines(file: Any, start: int, size: int, is_cut: bool) -> tuple[list[bytes], int]:
    """Return the complete lines of a range, without the first if it may be cut, and the offset after them."""
    file.seek(start)
    data: bytes = file.read(size)
    end = data.rfind(b"\n") + 1
    begin = data.find(b"\n") + 1 if is_cut else 0
    return data[begin:end].split(b"\n"), start + end
