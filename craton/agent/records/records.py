"""What a node writes: events, metrics and ledger, and the Prometheus endpoint that shows the newest of it.

The agent is the only writer of the node's three files. A rank's line is taken if it is a JSON object with a step and a
time for events or metrics; the agent says which node, rank and generation it is from. Anything else is dropped and
counted. The ledger it writes itself, from the pages of the ranks. Lines that a disk does not take wait in memory until
there is room (`LineWriter`), and the run goes on; what had to be dropped is counted.
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
    """The books of one node. `watch` is shown every event of a rank as it comes."""

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
        endpoint.update({"run_dropped_records": 0}, None)  # an increase from nothing is not seen
        self._writers = {
            "events": LineWriter(run.events_path(node)),
            "metrics": LineWriter(run.metrics_path(node)),
            "ledger": LineWriter(run.ledger_path(node)),
        }
        self._buffers: dict[int, bytes] = {}  # process → the beginning of a line
        self._booked: dict[int, dict[str, float]] = {}  # place on the node → what its page held when it was last read
        self.garbage_lines = 0
        self._newest_loss = 0  # the step of the newest loss among the lines being read
        self.step = 0  # the newest any rank has reported
        self.booked_rank: int | None = None  # the only one whose books are kept: nobody knows what the others do

    @property
    def lost_lines(self) -> int:
        """Lines that were dropped because no disk took them for too long."""
        return sum(writer.lost_lines for writer in self._writers.values())

    @property
    def waiting_lines(self) -> int:
        """Lines that no disk has taken yet."""
        return sum(writer.waiting_lines for writer in self._writers.values())

    @property
    def error(self) -> OSError | None:
        """Why lines wait; None while none do."""
        return next((writer.error for writer in self._writers.values() if writer.error is not None), None)

    def flush(self) -> bool:
        """Writes what waits; False while a disk does not take all of it."""
        taken = [writer.flush() for writer in self._writers.values()]
        return all(taken)

    def read(self, rank: RankProcess) -> bool:
        """Takes what a rank has sent; False when the pipe is at its end."""
        pending: dict[str, list[bytes]] = {}
        self._newest_loss = 0
        is_open = True
        buffer = self._buffers.pop(rank.pid, b"")
        for _ in range(16):  # a rank that floods its pipe must not keep the agent from everything else
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
        """Something the agent itself saw, of one rank or of the node."""
        line = {**self._stamp(rank), "event": name, **fields}
        self._append("events", [_encode(line)])
        logger.info("event %s%s: %s", name, "" if rank is None else f" of rank {rank}", fields)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Values of the run as a whole, measured by the agent."""
        self._append("metrics", [_encode({**self._stamp(None), **values})])
        self._endpoint.update(values, None)

    def measured(self, rank: int, step: int, moment: float, values: Mapping[str, float]) -> None:
        """What the agent has read of a rank that does not record by itself."""
        self.step = max(self.step, step)
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append("metrics", [_encode({**self._stamp(rank), "time": moment, "step": step, **plain})])
        self._endpoint.update(plain, rank)

    def book(self, place: int, rank: int, page: RankPage, ended: str | None = None, died_in: str | None = None) -> None:
        """Where the time of a rank's place on this node went since the last call; `ended` is how its run ended."""
        if self.booked_rank not in (None, rank):
            return
        if self._writers["ledger"].waiting_lines and ended is None and died_in is None:
            return  # the page goes on booking: one later line says the same as many that would wait
        totals = page.totals(time.monotonic())
        before = self._booked.get(place, {})
        self._booked[place] = totals
        changed = {kind: seconds - before.get(kind, 0.0) for kind, seconds in totals.items()}
        seconds = {kind: round(value, 6) for kind, value in changed.items() if value}
        line: dict[str, Any] = {**self._stamp(rank), "step": page.step, "seconds": seconds}
        label, line["time"] = line["time"], STEADY.now()  # its lines must follow each other as their seconds do
        if abs(label - line["time"]) > JUMP_SECONDS:
            line["wall_time"] = label
        if ended is not None:
            line["ended"] = ended
        if died_in is not None:
            line["died_in"] = died_in
        self._append("ledger", [_encode(line)])
        self._endpoint.book(seconds, rank)

    def skip(self, place: int, page: RankPage) -> None:
        """What the page holds until now is in nobody's books."""
        self._booked[place] = page.totals(time.monotonic())

    def last_moment(self) -> float:
        """When the newest line of the ledger was written; 0: there is none."""
        lines = tail_lines(self._writers["ledger"].path, READ_BYTES)
        return max((float(line["time"]) for line in lines if isinstance(line.get("time"), int | float)), default=0.0)

    def last_booked(self, first_generation: int) -> dict[int, float]:
        """rank → when its books end, of an agent of this node and this launch that did not close them."""
        moments: dict[int, float] = {}
        try:
            lines = tail_lines(self._writers["ledger"].path, READ_BYTES)
        except OSError:  # then its books begin here
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
        """False while lines wait for room."""
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
