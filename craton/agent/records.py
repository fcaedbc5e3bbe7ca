"""What a node writes: events, metrics and ledger, and the Prometheus endpoint that shows the newest of it.

The agent is the only writer of the node's three files. A rank's line is taken if it is a JSON object for one of them
with a step and a time; the agent says which node, rank and generation it is from. Anything else is dropped and counted.
A disk that does not take lines is warned about once; the run goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from craton.agent.process import RankProcess
from craton.telemetry import LEDGER_KINDS, LineWriter, MetricsEndpoint, RunDirectory, parse_line

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20


class NodeRecords:
    """The books of one node in one generation."""

    def __init__(self, run: RunDirectory, node: str, generation: int, endpoint: MetricsEndpoint) -> None:
        self._node, self._generation = node, generation
        self._endpoint = endpoint
        self._writers = {
            "events": LineWriter(run.events_path(node)),
            "metrics": LineWriter(run.metrics_path(node)),
            "ledger": LineWriter(run.ledger_path(node)),
        }
        self._buffers: dict[int, bytes] = {}  # rank → the beginning of a line
        self._warned = False
        self.garbage_lines = 0
        self.step = 0  # the newest any rank has reported

    @property
    def lost_lines(self) -> int:
        """Lines that no disk took."""
        return sum(writer.lost_lines for writer in self._writers.values())

    def read(self, rank: RankProcess) -> bool:
        """Takes what a rank has sent; False when the pipe is at its end."""
        pending: dict[str, list[bytes]] = {}
        is_open = True
        buffer = self._buffers.get(rank.rank, b"")
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
        self._buffers[rank.rank] = buffer
        for stream, documents in pending.items():
            self._append(stream, documents)
        return is_open

    def event(self, name: str, rank: int | None = None, **fields: Any) -> None:
        """Something the agent itself saw, of one rank or of the node."""
        line = {**self._stamp(rank), "event": name, **fields}
        self._append("events", [_encode(line)])

    def metrics(self, values: Mapping[str, float]) -> None:
        """Values of the run as a whole, measured by the agent."""
        self._append("metrics", [_encode({**self._stamp(None), **values})])
        self._endpoint.update(values, None)

    def close_ledger(self, rank: RankProcess, outcome: str) -> None:
        """Books what the rank has not booked itself between its start and its end, so that its kinds sum to its life.

        A rank that never booked was still starting. Of one that failed, the time since its last booking is how long the
        failure took to be seen; of one that ended well, it is the end of the process.
        """
        if not rank.has_booked and rank.rank != 0:
            return  # only rank 0 keeps books in this run
        assert rank.ended is not None
        kind = "start" if not rank.has_booked else "detect" if outcome == "failed" else "idle"
        seconds = {kind: max(0.0, rank.ended - rank.started - rank.booked_seconds)}
        line = {**self._stamp(rank.rank), "time": rank.ended, "seconds": seconds, "ended": outcome}
        self._append("ledger", [_encode(line)])
        self._endpoint.book(seconds, rank.rank)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _take(self, rank: RankProcess, text: bytes, pending: dict[str, list[bytes]]) -> None:
        line = parse_line(text)
        if line is None or not _is_record(line):
            self._count_garbage(rank.rank)
            return
        stream = line.pop("to")
        line |= {"generation": self._generation, "node": self._node, "rank": rank.rank}
        self.step = max(self.step, line["step"])
        if stream == "metrics":
            self._endpoint.update({name: value for name, value in line.items() if name not in _STAMP}, rank.rank)
        elif stream == "ledger":
            seconds = line["seconds"]
            rank.booked_seconds += sum(seconds.values())
            self._endpoint.book(seconds, rank.rank)
        pending.setdefault(stream, []).append(_encode(line))

    def _append(self, stream: str, lines: list[bytes]) -> None:
        writer = self._writers[stream]
        if writer.append(lines):
            return
        self._endpoint.update({"run_dropped_records": self.lost_lines + self.garbage_lines}, None)
        if not self._warned:
            self._warned = True
            reason = writer.error.strerror if writer.error else "unknown"
            print(
                f"craton agent: cannot write {writer.path} ({reason}): the run goes on, its records are lost until "
                "there is room again",
                file=sys.stderr,
                flush=True,
            )

    def _count_garbage(self, rank: int) -> None:
        self.garbage_lines += 1
        self._endpoint.update({"run_dropped_records": self.lost_lines + self.garbage_lines}, None)

    def _stamp(self, rank: int | None) -> dict[str, Any]:
        return {
            "time": time.time(),
            "step": self.step,
            "generation": self._generation,
            "node": self._node,
            "rank": rank,
        }


_STAMP = ("time", "step", "generation", "node", "rank")


def _is_record(line: dict[str, Any]) -> bool:
    stream, step, moment = line.get("to"), line.get("step"), line.get("time")
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(moment, int | float):
        return False
    if stream == "ledger":
        seconds = line.get("seconds")
        return isinstance(seconds, dict) and all(
            kind in LEDGER_KINDS and isinstance(value, int | float) for kind, value in seconds.items()
        )
    return stream == "metrics" or (stream == "events" and isinstance(line.get("event"), str))


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), allow_nan=True).encode()
