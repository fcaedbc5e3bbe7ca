"""Timestamps of log lines: `logs/times-NODE.jsonl`, written by the node's agent.

Ranks write their logs themselves, without timestamps. So the agent notes the length of each log of its node every
second: {"time": 1763301722.4, "sizes": {"rank-00000": 3731}}. A line was printed before the first note that covers it.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections.abc import Iterable

from craton.telemetry.files import LineWriter, paths_in, read_lines
from craton.telemetry.rundirectory import RunDirectory


class LogTimes:
    """Records the growth of a node's logs. Like every `LineWriter`, it never raises."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        self._run = run
        self._writer = LineWriter(run.path / "logs" / f"times-{node}.jsonl")
        self._sizes: dict[str, int] = {}
        self._sources = [f"agent-{node}"]

    def note(self, ranks: Iterable[int] = ()) -> None:
        """Record the log lengths of these ranks, and of those of earlier calls."""
        for source in (self._run.log_path(rank).stem for rank in ranks):
            if source not in self._sources:
                self._sources.append(source)
        grown = {source: size for source in self._sources if (size := self._size(source)) > self._sizes.get(source, 0)}
        if grown:
            self._sizes |= grown
            self._writer.append([json.dumps({"time": round(time.time(), 1), "sizes": grown}).encode()])

    def close(self) -> None:
        self.note()
        self._writer.close()

    def _size(self, source: str) -> int:
        try:
            return os.stat(self._run.path / "logs" / f"{source}.log").st_size
        except OSError:
            return 0


class LogClock:
    """Looks up when a line was printed, in the notes of all nodes."""

    def __init__(self, run: RunDirectory) -> None:
        self._notes: dict[str, list[tuple[int, float]]] = {}
        for path in paths_in(run.path / "logs", "times-*.jsonl"):
            for line in read_lines(path)[0]:
                moment, sizes = line.get("time"), line.get("sizes")
                if isinstance(moment, int | float) and isinstance(sizes, dict):
                    for source, size in sizes.items():
                        if isinstance(size, int):
                            self._notes.setdefault(source, []).append((size, float(moment)))
        for notes in self._notes.values():
            notes.sort()

    def printed_at(self, source: str, end: int) -> float | None:
        """Return the epoch seconds at which the log had `end` bytes; None if no agent noted it."""
        notes = self._notes.get(source, [])
        place = bisect_left(notes, (end, 0.0))
        return notes[place][1] if place < len(notes) else None
