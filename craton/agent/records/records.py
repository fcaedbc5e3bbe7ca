"""A node's records: events, metrics and ledger, and the Prometheus endpoint with the newest values.

The agent is the only writer of the node's three files. It accepts a rank's line if it is a JSON object with a step and
a time for events or metrics, and adds node, rank and generation. Anything else is dropped and counted. The agent writes
the ledger itself, from the ranks' pages. Lines that the disk refuses wait in memory until there is space
(`LineWriter`) while the run continues; dropped lines are counted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from craton.agent.processes import RankProcess
from craton.telemetry import RunDirectory
from craton.telemetry.files import LineWriter, parse_line, tail_lines
from craton.telemetry.node import MetricsEndpoint
from craton.telemetry.rank import JUMP_SECONDS, STEADY, RankPage

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20


class NodeRecords:
    """The records of one node. `watch` is called with every event of a rank."""

    def __init__(
        self,
        run: RunDirectory,
        node: str,
        generation: int,
        endpoint: MetricsEndpoint,
        watch: Callable[[RankProcess, dict[str, Any]], None],
    ) -> None:
        self._node, self.generation = node, generation
        self._endpoint, self._watch = endpoint, watch
        endpoint.update({"run_dropped_records": 0}, None)  # Prometheus sees no increase of a new series
        self._writers = {
            "events": LineWriter(run.events_path(node)),
            "metrics": LineWriter(run.metrics_path(node)),
            "ledger": LineWriter(run.ledger_path(node)),
        }
        self._buffers: dict[int, bytes] = {}  # process → an incomplete line
        self._booked: dict[int, dict[str, float]] = {}  # slot → totals of its page at the last call
        self.garbage_lines = 0
        self._newest_loss = 0  # the step of the newest loss among the lines being read
        self.step = 0  # the newest step that any rank has reported
        self.booked_rank: int | None = None  # only this rank has a ledger: what the others do is unknown

    @property
    def lost_lines(self) -> int:
        """Lines dropped because the disk refused them for too long."""
        return sum(writer.lost_lines for writer in self._writers.values())

    @property
    def waiting_lines(self) -> int:
        """Lines that are not on disk yet."""
        return sum(writer.waiting_lines for writer in self._writers.values())

    @property
    def error(self) -> OSError | None:
        """Why lines wait; None if none do."""
        return next((writer.error for writer in self._writers.values() if writer.error is not None), None)

    def flush(self) -> bool:
        """Write waiting lines; False while the disk refuses some."""
        taken = [writer.flush() for writer in self._writers.values()]
        return all(taken)

    def read(self, rank: RankProcess) -> bool:
        """Read what a rank has sent; False at the end of the pipe."""
        pending: dict[str, list[bytes]] = {}
        self._newest_loss = 0
        is_open = True
        buffer = self._buffers.pop(rank.pid, b"")
        for _ in range(16):  # a rank that floods its pipe must not block the agent
            try:
                data = os.read(rank.records, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                is_open = False
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(rank, line, pending)
            if len(buffer) > MAX_LINE_BYTES:
                self._count_garbage(rank.rank)
                buffer = b""
            if len(data) < READ_BYTES:
                break
        if not is_open and buffer:
            self._count_garbage(rank.rank)
            buffer = b""
        if buffer:
            self._buffers[rank.pid] = buffer
        for stream, documents in pending.items():
            is_written = self._append(stream, documents)
            if is_written and stream == "metrics" and self._newest_loss and rank.page is not None:
                rank.page.recorded_step = self._newest_loss
        return is_open

    def event(self, name: str, rank: int | None = None, **fields: Any) -> None:
        """Record an event that the agent saw, of one rank or of the node."""
        line = {**self._stamp(rank), "event": name, **fields}
        self._append("events", [_encode(line)])
        logger.info("event %s%s: %s", name, "" if rank is None else f" of rank {rank}", fields)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Record values of the whole run, measured by the agent."""
        self._append("metrics", [_encode({**self._stamp(None), **values})])
        self._endpoint.update(values, None)

    def measured(self, rank: int, step: int, moment: float, values: Mapping[str, float]) -> None:
        """Record values that the agent read from a rank that does not record itself."""
        self.step = max(self.step, step)
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append("metrics", [_encode({**self._stamp(rank), "time": moment, "step": step, **plain})])
        self._endpoint.update(plain, rank)

    def book(self, place: int, rank: int, page: RankPage, ended: str | None = None, died_in: str | None = None) -> None:
        """Write a ledger line: where the time of a rank's slot went since the last call; `ended`: how the run ended."""
        if self.booked_rank not in (None, rank):
            return
        if self._writers["ledger"].waiting_lines and ended is None and died_in is None:
            return  # the page keeps booking: one later line replaces many waiting ones
        totals = page.totals(time.monotonic())
        before = self._booked.get(place, {})
        self._booked[place] = totals
        changed = {kind: seconds - before.get(kind, 0.0) for kind, seconds in totals.items()}
        seconds = {kind: round(value, 6) for kind, value in changed.items() if value}
        line: dict[str, Any] = {**self._stamp(rank), "step": page.step, "seconds": seconds}
        label, line["time"] = line["time"], STEADY.now()  # lines must be in order like their seconds
        if abs(label - line["time"]) > JUMP_SECONDS:
            line["wall_time"] = label
        if ended is not None:
            line["ended"] = ended
        if died_in is not None:
            line["died_in"] = died_in
        self._append("ledger", [_encode(line)])
        self._endpoint.book(seconds, rank)

    def skip(self, place: int, page: RankPage) -> None:
        """Exclude the time until now from the ledger."""
        self._booked[place] = page.totals(time.monotonic())

    def last_moment(self) -> float:
        """Return the time of the newest ledger line; 0: there is none."""
        lines = tail_lines(self._writers["ledger"].path, READ_BYTES)
        return max((float(line["time"]) for line in lines if isinstance(line.get("time"), int | float)), default=0.0)

    def last_booked(self, first_generation: int) -> dict[int, float]:
        """Return rank → time of its last ledger line, if an agent of this node and launch ended without closing it."""
        moments: dict[int, float] = {}
        try:
            lines = tail_lines(self._writers["ledger"].path, READ_BYTES)
        except OSError:  # then its ledger begins here
            return {}
        for line in lines:
            rank, moment, generation = line.get("rank"), line.get("time"), line.get("generation")
            if isinstance(rank, int) and isinstance(moment, int | float) and isinstance(generation, int):
                moments.pop(rank, None)
                if generation >= first_generation and "ended" not in line:
                    moments[rank] = float(moment)
        return moments

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _take(self, rank: RankProcess, text: bytes, pending: dict[str, list[bytes]]) -> None:
        line = parse_line(text)
        if line is None or not _is_record(line):
            self._count_garbage(rank.rank)
            return
        stream = line.pop("to")
        line |= {"node": self._node, "rank": rank.rank}
        line.setdefault("generation", self.generation)
        self.step = max(self.step, line["step"])
        if stream == "metrics":
            self._endpoint.update({name: value for name, value in line.items() if name not in _STAMP}, rank.rank)
            if "run_loss" in line:
                self._newest_loss = line["step"]
        else:
            self._watch(rank, line)
        pending.setdefault(stream, []).append(_encode(line))

    def _append(self, stream: str, lines: list[bytes]) -> bool:
        """Append lines; False while some wait for disk space."""
        is_written = self._writers[stream].append(lines)
        if not is_written:
            self._endpoint.update({"run_dropped_records": self.lost_lines + self.garbage_lines}, None)
        return is_written

    def _count_garbage(self, rank: int) -> None:
        self.garbage_lines += 1
        self._endpoint.update({"run_dropped_records": self.lost_lines + self.garbage_lines}, None)

    def _stamp(self, rank: int | None) -> dict[str, Any]:
        return {
            "time": time.time(),
            "step": self.step,
            "generation": self.generation,
            "node": self._node,
            "rank": rank,
        }


_STAMP = ("time", "step", "generation", "node", "rank")


def _is_record(line: dict[str, Any]) -> bool:
    stream, step, moment = line.get("to"), line.get("step"), line.get("time")
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(moment, int | float):
        return False
    return stream == "metrics" or (stream == "events" and isinstance(line.get("event"), str))


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), allow_nan=True).encode()
