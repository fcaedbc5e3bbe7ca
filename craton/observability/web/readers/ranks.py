"""The newest measurements of every rank of a run, read from the ends of the metric files.

A file is read again only when its size or mtime changed, and then only its new lines; the newest lines are kept in one
array. 10,000 ranks on 1,250 nodes are 1,250 short reads. For a wide run the first read takes one line per rank, so that
the page soon has a picture, and the next one the KEPT_LINES that a comparison needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from craton.telemetry import PHASES as STEP_PHASES
from craton.telemetry import ROLLOUT_PHASES, RunDirectory
from craton.telemetry.files import open_regular, parse_line

PHASES = (*STEP_PHASES, *ROLLOUT_PHASES)  # those of rollouts are measured by reinforcement learning only
COLUMNS = (
    *(f"run_{phase}_seconds" for phase in PHASES),
    "run_step_seconds",
    "run_memory_bytes",
    "run_rank_gradient_norm",
)
FEW_RANKS = 512  # up to this size the first read takes all KEPT_LINES of a rank
MEAN_LINES = 8
# A rank with this many lines has MEAN_LINES after the first five of its generation, which compile and warm up: `craton
# why` ignores those too.
KEPT_LINES = MEAN_LINES + 5
LINE_BYTES = 1024  # longer than a line of a rank
FIRST_LINE_BYTES = 3072  # longer than a line of rank 0, which also has what all ranks share
NAN = float("nan")

Line = tuple[int, int, list[float]]  # rank, step, values of COLUMNS


@dataclass(frozen=True, eq=False)
class RankTable:
    """Measurements in rank order; NaN: not measured."""

    ranks: list[int]
    nodes: list[str]
    steps: list[int]
    lines: NDArray[np.float64]  # [ranks, MEAN_LINES, COLUMNS], newest first; NaN where there are fewer
    values: NDArray[np.float64]  # [ranks, COLUMNS]: their means
    num_lines: list[int]  # lines of each in this generation, up to KEPT_LINES
    stages: list[int]  # pipeline stage of each

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def phase_seconds(self) -> NDArray[np.float64]:
        """[ranks, PHASES]"""
        return self.values[:, : len(PHASES)]

    def column(self, name: str) -> NDArray[np.float64]:
        return np.asarray(self.values[:, COLUMNS.index(name)], dtype=np.float64)


@dataclass
class _File:
    """The metric file of one node, and how far it was read."""

    node: str
    path: str
    key: tuple[int, int] = (-1, -1)
    depth: int = 0  # lines requested per rank
    end: int = 0
    ranks: set[int] = field(default_factory=set)  # ranks with lines in it


class RankTails:
    """The newest lines of every rank."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._who: tuple[list[str], int, int, int] | None = None
        self._table: RankTable | None = None

    def look(self, nodes: list[str], ranks_per_node: int, generation: int, num_stages: int = 1) -> RankTable:
        """Return the table of the ranks of these nodes in this generation; the same object if nothing was added. Stages
        are the outermost dimension of ranks."""
        who = (nodes, ranks_per_node, generation, num_stages)
        if who != self._who:
            self._begin(nodes, ranks_per_node, generation)
            self._who = who
        news = [self._read(file) for file in self._files]
        if self._table is None or any(news):
            self._table = self._made(num_stages)
        return self._table

    def _begin(self, nodes: list[str], ranks_per_node: int, generation: int) -> None:
        world = len(nodes) * ranks_per_node
        self._ranks_per_node, self._generation = ranks_per_node, generation
        self._first_depth = KEPT_LINES if world <= FEW_RANKS else 1
        self._files = [_File(node, str(self._run.metrics_path(node))) for node in nodes]
        self._kept = np.full((world, KEPT_LINES, len(COLUMNS)), NAN)  # line n of a rank is at n % KEPT_LINES
        self._counts, self._steps, self._nodes = [0] * world, [0] * world, [""] * world
        self._table = None

    def _read(self, file: _File) -> bool:
        """Read the new lines of one node; a file that cannot be read is retried at the next call."""
        try:
            return self._take(file, os.stat(file.path))
        except OSError:
            return False

    def _take(self, file: _File, status: os.stat_result) -> bool:
        key = (status.st_size, status.st_mtime_ns)
        if file.depth == KEPT_LINES and key == file.key:
            return False
        grown = status.st_size - file.end
        if file.depth == KEPT_LINES and 0 <= grown <= self._ranks_per_node * KEPT_LINES * LINE_BYTES:
            data, file.end = _between(file.path, file.end, status.st_size, is_cut=False)
            self._add(file, [record for line in data.split(b"\n") if (record := self._parsed(line)) is not None])
        else:
            depth = self._first_depth if file.depth == 0 else KEPT_LINES
            lines, file.end = self._last_lines(file.path, status.st_size, depth)
            file.depth = depth
            for rank in file.ranks:
                self._counts[rank] = 0
            self._add(file, lines)
        file.key = key
        return True

    def _last_lines(self, path: str, size: int, depth: int) -> tuple[list[Line], int]:
        """Return each rank's last lines of the generation, oldest first, read from the file's end; and its end."""
        ranks = self._ranks_per_node
        data, end = _between(path, max(0, size - depth * (ranks * LINE_BYTES + FIRST_LINE_BYTES)), size)
        counts: dict[int, int] = {}
        lines: list[Line] = []
        complete = 0
        for line in reversed(data.split(b"\n")):
            if (parsed := self._parsed(line)) is None:
                continue
            count = counts[parsed[0]] = counts.get(parsed[0], 0) + 1
            if count <= depth:
                lines.append(parsed)
                complete += count == depth
            if complete >= ranks:
                break
        return lines[::-1], end

    def _parsed(self, line: bytes) -> Line | None:
        if b'"run_step_seconds"' not in line or (document := parse_line(line)) is None:
            return None
        rank, step = document.get("rank"), document.get("step")
        if not isinstance(rank, int) or document.get("generation") != self._generation:
            return None
        if not 0 <= rank < len(self._nodes):
            return None
        values = [
            value if type(value) is float else float(value) if isinstance(value, int) else NAN
            for value in map(document.get, COLUMNS)
        ]
        return rank, step if isinstance(step, int) else 0, values

    def _add(self, file: _File, lines: Sequence[Line]) -> None:
        if not lines:
            return
        places = []
        for rank, step, _ in lines:
            places.append(self._counts[rank] % KEPT_LINES)
            self._counts[rank] += 1
            self._steps[rank], self._nodes[rank] = step, file.node
        ranks = [rank for rank, _, _ in lines]
        file.ranks.update(ranks)
        self._kept[ranks, places] = [values for _, _, values in lines]

    def _made(self, num_stages: int) -> RankTable:
        all_counts = np.array(self._counts, dtype=np.int64)
        ranks = np.flatnonzero(all_counts)
        counts = all_counts[ranks, None]
        back = np.arange(1, MEAN_LINES + 1)
        lines = self._kept[ranks[:, None], (counts - back) % KEPT_LINES]
        lines[back > counts] = NAN
        ranks_per_stage = max(1, len(self._nodes) // max(1, num_stages))
        numbers: list[int] = ranks.tolist()
        return RankTable(
            ranks=numbers,
            nodes=[self._nodes[rank] for rank in numbers],
            steps=[self._steps[rank] for rank in numbers],
            lines=lines,
            values=_means(lines),
            num_lines=np.minimum(counts[:, 0], KEPT_LINES).tolist(),
            stages=(ranks // ranks_per_stage).tolist(),
        )


def _between(path: str, start: int, end: int, is_cut: bool = True) -> tuple[bytes, int]:
    """Return the complete lines of a range, and the end of the last. `is_cut`: the range may start inside a line."""
    with open_regular(path) as file:
        file.seek(start)
        data = file.read(end - start)
    whole = data.rfind(b"\n") + 1
    first = data.find(b"\n") + 1 if is_cut and start > 0 else 0
    return data[first:whole], start + whole


def _means(lines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [ranks, COLUMNS] means of the known values, without numpy's warning where there are none."""
    is_known = ~np.isnan(lines)
    counts = is_known.sum(axis=1)
    sums = np.where(is_known, lines, 0.0).sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), NAN)
