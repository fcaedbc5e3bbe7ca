"""What every rank of a run measured last, read from the ends of the metric files.

A look costs what changed: a file is read again only when its size or time did, and then only what was added. 10,000
ranks on 1,250 nodes are 1,250 short reads. Of a wide run the first look takes one line a rank, so that there is a
picture soon, and the next one the MEAN_LINES that a comparison needs.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craton.telemetry import RunDirectory, parse_line

PHASES = ("data", "compute", "communication", "optimizer", "checkpoint")
COLUMNS = (
    *(f"run_{phase}_seconds" for phase in PHASES),
    "run_step_seconds",
    "run_memory_bytes",
    "run_rank_gradient_norm",
)
FEW_RANKS = 512  # up to here the first look takes all lines that a rank is the mean of
MEAN_LINES = 8
LINE_BYTES = 1024  # more than a line of a rank takes

Line = tuple[int, list[float]]  # step, values of COLUMNS
Row = tuple[int, int, list[float], int]  # rank, newest step, means of COLUMNS, of how many lines


@dataclass(frozen=True)
class RankTable:
    """Ranks in their order; NaN: not measured."""

    ranks: list[int]
    nodes: list[str]
    steps: list[int]
    values: NDArray[np.float64]  # [ranks, COLUMNS]
    num_lines: list[int]  # that the values of each are the means of
    stages: list[int]  # of the pipeline, that each is in

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def phase_seconds(self) -> NDArray[np.float64]:
        """[ranks, PHASES]"""
        return self.values[:, : len(PHASES)]

    def column(self, name: str) -> NDArray[np.float64]:
        return np.asarray(self.values[:, COLUMNS.index(name)], dtype=np.float64)


@dataclass
class _Tail:
    """The newest lines of the ranks of one node, and how far its file was read."""

    key: tuple[int, int]
    generation: int
    depth: int
    end: int
    lines: dict[int, deque[Line]]
    rows: list[Row]


class RankTails:
    """The newest lines of every rank."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._tails: dict[str, _Tail] = {}

    def look(self, nodes: list[str], ranks_per_node: int, generation: int, num_stages: int = 1) -> RankTable:
        """The ranks of these nodes, in the generation that they are in. Stages are the outermost dimension of ranks."""
        world = len(nodes) * ranks_per_node
        first_depth = MEAN_LINES if world <= FEW_RANKS else 1
        found: list[tuple[str, Row]] = []
        for node in nodes:
            path = self._run.metrics_path(node)
            try:
                status = os.stat(path)
            except OSError:
                continue
            key = (status.st_size, status.st_mtime_ns)
            tail = self._tails.get(node)
            if tail is None or tail.generation != generation:
                tail = _read_end(path, key, ranks_per_node, first_depth, generation)
            elif tail.depth < MEAN_LINES:
                tail = _read_end(path, key, ranks_per_node, MEAN_LINES, generation)
            elif tail.key != key:
                is_short = 0 <= status.st_size - tail.end <= ranks_per_node * MEAN_LINES * LINE_BYTES
                if is_short:
                    _read_on(path, tail, key)
                else:
                    tail = _read_end(path, key, ranks_per_node, MEAN_LINES, generation)
            self._tails[node] = tail
            found += [(node, row) for row in tail.rows]
        found.sort(key=lambda each: each[1][0])
        rows = [row for _, row in found]
        ranks_per_stage = max(1, world // max(1, num_stages))
        return RankTable(
            ranks=[row[0] for row in rows],
            nodes=[node for node, _ in found],
            steps=[row[1] for row in rows],
            values=np.array([row[2] for row in rows], dtype=np.float64).reshape(len(rows), len(COLUMNS)),
            num_lines=[row[3] for row in rows],
            stages=[row[0] // ranks_per_stage for row in rows],
        )


def _read_end(path: Path, key: tuple[int, int], ranks: int, depth: int, generation: int) -> _Tail:
    """Each rank's last `depth` lines of the generation, by reading the file from its end."""
    size = key[0]
    data, end = _between(path, max(0, size - ranks * depth * LINE_BYTES), size)
    newest: dict[int, deque[Line]] = {}
    complete = 0
    for line in reversed(data.split(b"\n")):
        if (parsed := _parsed(line, generation)) is None:
            continue
        rank, entry = parsed
        lines = newest.setdefault(rank, deque(maxlen=MEAN_LINES))
        if len(lines) < depth:
            lines.appendleft(entry)
            complete += len(lines) == depth
        if complete >= ranks:
            break
    return _Tail(key, generation, depth, end, newest, _rows(newest))


def _read_on(path: Path, tail: _Tail, key: tuple[int, int]) -> None:
    """What was added since."""
    data, tail.end = _between(path, tail.end, key[0], is_cut=False)
    for line in data.split(b"\n"):
        if (parsed := _parsed(line, tail.generation)) is not None:
            rank, entry = parsed
            tail.lines.setdefault(rank, deque(maxlen=MEAN_LINES)).append(entry)
    tail.key, tail.rows = key, _rows(tail.lines)


def _between(path: Path, start: int, end: int, is_cut: bool = True) -> tuple[bytes, int]:
    """The whole lines of a stretch, and where the last of them ends. The first may be cut where reading begins amid."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            data = file.read(end - start)
    except OSError:
        return b"", start
    whole = data.rfind(b"\n") + 1
    first = data.find(b"\n") + 1 if is_cut and start > 0 else 0
    return data[first:whole], start + whole


def _parsed(line: bytes, generation: int) -> tuple[int, Line] | None:
    if b'"run_step_seconds"' not in line or (document := parse_line(line)) is None:
        return None
    rank, step = document.get("rank"), document.get("step")
    if not isinstance(rank, int) or document.get("generation") != generation:
        return None
    values = [
        float(value) if isinstance(value := document.get(name), int | float) else float("nan") for name in COLUMNS
    ]
    return rank, (step if isinstance(step, int) else 0, values)


def _rows(newest: dict[int, deque[Line]]) -> list[Row]:
    return [(rank, lines[-1][0], _means(lines), len(lines)) for rank, lines in newest.items()]


def _means(lines: deque[Line]) -> list[float]:
    if len(lines) == 1:
        return lines[0][1]
    means = []
    for column in zip(*(values for _, values in lines), strict=True):
        known = [value for value in column if value == value]  # not NaN
        means.append(sum(known) / len(known) if known else float("nan"))
    return means
