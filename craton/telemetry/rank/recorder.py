"""Record metrics and events in a rank: one JSON line and one `os.write` per call, to the pipe that the agent reads.

Never blocks and never raises into training: a line that does not fit into a full pipe is dropped and counted. The
thread CPU time spent here is added up in `recording_seconds`. `metrics` reports its share of the time since the
previous call as `run_recording_share`, and the dropped lines so far as `run_dropped_records`: 0 from the start, since
Prometheus sees no increase of a new series.

Without an agent ($CRATON_RECORDS is not set) lines go directly to the files of the run directory, where they wait in
bounded memory while the disk is full; without a run they are discarded.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from craton.telemetry.files import LineWriter
from craton.telemetry.rank.steady_clock import STEADY
from craton.telemetry.rundirectory import RunDirectory

Stream = Literal["metrics", "events", "ledger"]
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=lambda value: _plain(value)).encode


class Recorder:
    """Records the metrics and events of one rank. Thread-safe."""

    def __init__(
        self,
        node: str,
        rank: int,
        generation: int,
        run: RunDirectory | None = None,
        descriptor: int | None = None,
    ) -> None:
        self.node = node
        self.rank = rank
        self.generation = generation
        self.recording_seconds = 0.0
        self.dropped = 0
        self._descriptor = descriptor
        self._rest = b""  # the rest of a line that the pipe accepted only partly
        self._lock = threading.Lock()
        self._reported_seconds = 0.0
        self._reported_at = time.monotonic()
        self._writers: dict[Stream, LineWriter] = {}
        if descriptor is not None:
            os.set_blocking(descriptor, False)
        elif run is not None:
            self._writers = {
                "metrics": LineWriter(run.metrics_path(node)),
                "events": LineWriter(run.events_path(node)),
                "ledger": LineWriter(run.ledger_path(node)),
            }

    @classmethod
    def from_environment(cls, run: RunDirectory | None = None) -> Recorder:
        """Return the recorder of this process, from the environment that the agent (or torchrun) set."""
        if run is None and os.environ.get("CRATON_RUN"):
            run = RunDirectory(os.environ["CRATON_RUN"])
        return cls(
            node=os.environ.get("CRATON_NODE") or "node-0",
            rank=_integer("RANK") or 0,
            generation=_integer("CRATON_GENERATION") or 0,
            run=run,
            descriptor=_pipe(_integer("CRATON_RECORDS")),
        )

    def metrics(self, step: int, **values: Any) -> None:
        """Record the measurements of a step, under names of the vocabulary (`METRICS`) or your own."""
        now = time.monotonic()
        elapsed = now - self._reported_at
        if elapsed > 0:
            values.setdefault("run_recording_share", (self.recording_seconds - self._reported_seconds) / elapsed)
        values.setdefault("run_dropped_records", self.dropped)
        self._reported_seconds, self._reported_at = self.recording_seconds, now
        self._record("metrics", step, values)

    def event(self, name: str, step: int = 0, **fields: Any) -> None:
        """Record an event: `checkpoint_saved`, `step_skipped`, ..."""
        self._record("events", step, {"event": name, **fields})

    def ledger(self, step: int, seconds_by_kind: Mapping[str, float]) -> None:
        """Record the seconds of a LedgerClock since the last call. No-op under an agent: it reads the page."""
        if self._descriptor is None:
            self._record("ledger", step, {"seconds": seconds_by_kind})

    def close(self) -> None:
        """Close the files; a rank that exits without it loses nothing."""
        for writer in self._writers.values():
            writer.close()

    def _record(self, stream: Stream, step: int, fields: Mapping[str, Any]) -> None:
        begin = time.thread_time()
        moment = STEADY.now() if stream == "ledger" else time.time()  # ledger lines must be in order
        line: dict[str, Any] = {"time": moment, "step": step, "generation": self.generation}
        if self._descriptor is None:
            line |= {"node": self.node, "rank": self.rank}
        else:
            line["to"] = stream
        text = _to_json({**line, **fields, **line})  # the stamp comes first, and wins
        with self._lock:
            if text is None:
                self.dropped += 1
            elif self._descriptor is not None:
                self._send(text)
            elif self._writers:
                self._append(self._writers[stream], text)
            self.recording_seconds += time.thread_time() - begin

    def _append(self, writer: LineWriter, text: bytes) -> None:
        lost_before = writer.lost_lines
        writer.append([text])
        self.dropped += writer.lost_lines - lost_before

    def _send(self, text: bytes) -> None:
        assert self._descriptor is not None
        data = self._rest + text + b"\n"
        try:
            written = os.write(self._descriptor, data)
        except OSError:  # full (BlockingIOError), or the agent is gone
            self.dropped += 1
            return
        if written < len(self._rest):
            self._rest = self._rest[written:]
            self.dropped += 1
        else:
            self._rest = data[written:]


def _to_json(line: Mapping[str, Any]) -> bytes | None:
    """Return the line as JSON; None if it cannot be encoded, such as a list that contains itself."""
    try:
        return _encode(line).encode()
    except ValueError:  # NaN or infinity, which JSON lacks, become null
        try:
            return _encode(_finite(line)).encode()
        except (ValueError, TypeError, RecursionError):
            return None
    except TypeError:
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if not isinstance(value, bool | int | float | str | None):
        value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Convert numpy and torch scalars to Python numbers, mappings to dicts, anything else to text."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return str(value)


def _integer(variable: str) -> int | None:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None


def _pipe(descriptor: int | None) -> int | None:
    """Return the descriptor if it is a pipe: a process started by a rank may have inherited only the variable."""
    if descriptor is None:
        return None
    try:
        return descriptor if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None
