"""Metrics of a server from the metric files of its run: from before its page was opened, and after it is gone.

A server records twice a second while it computes, and nothing while it is idle. So a gap after a record without
requests is shown as idle time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from craton.observability.web.readers.history import finite
from craton.observability.web.sources import LATENCIES, ServerLook
from craton.telemetry import RunDirectory
from craton.telemetry.files import tail_lines

SHOWN_SECONDS = 300.0  # before the newest record
TAIL_BYTES = 512 << 10  # per node: more than SHOWN_SECONDS of records
MAX_FILES = 16  # a server has one node, or several if it was moved
IDLE_SECONDS = 3.0  # without a record
EDGE_SECONDS = 0.5  # from a record to the adjacent idle time: the interval of records


class RecordedLooks:
    """Read the records again only when a file has changed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._key: tuple[tuple[str, int, int], ...] | None = None
        self._looks: list[ServerLook] = []

    def read(self) -> list[ServerLook]:
        """Return the last minutes, oldest first; empty if nothing was computed."""
        paths = sorted((self._run.path / "metrics").glob("*.jsonl"), key=_modified, reverse=True)[:MAX_FILES]
        key = tuple((path.name, *_version(path)) for path in paths)
        if key != self._key:
            lines = [line for path in paths for line in tail_lines(path, TAIL_BYTES)]
            looks = [look for line in lines if (look := look_of(line)) is not None]
            self._key, self._looks = key, sorted(looks, key=lambda look: look.time)
        return self._looks


def joined(recorded: Sequence[ServerLook], live: Sequence[ServerLook]) -> list[ServerLook]:
    """Return the last SHOWN_SECONDS of live scrapes, extended by the records before the first and after the last."""
    begin, end = (live[0].time, live[-1].time) if live else (math.inf, math.inf)
    before = [look for look in recorded if look.time < begin]
    after = [look for look in recorded if look.time > end]
    looks = [*with_idle_times([*before, *live[:1]]), *live[1:], *after]
    return [look for look in looks if looks[-1].time - look.time <= SHOWN_SECONDS]


def last_busy(looks: Sequence[ServerLook]) -> ServerLook | None:
    """Return the newest record with a request, else the newest one: the end of an idle period is not informative."""
    asked = (look for look in reversed(looks) if look.running or any(median for median, _ in look.quantiles.values()))
    return next(asked, looks[-1] if looks else None)


def look_of(line: Mapping[str, Any]) -> ServerLook | None:
    """Parse a record of a server's rank 0; None for any other line, and for one before the first step."""
    moment, running, waiting = (finite(line.get(name)) for name in ("time", "serve_running", "serve_waiting"))
    if line.get("rank") != 0 or not line.get("step") or moment is None or running is None or waiting is None:
        return None
    quantiles = {
        name: (finite(line.get(f"serve_{name}_seconds")), finite(line.get(f"serve_{name}_seconds_p95")))
        for name in LATENCIES
    }
    return ServerLook(
        time=moment,
        running=int(running),
        waiting=int(waiting),
        kv_share=finite(line.get("serve_kv_share")),
        tokens_per_second=finite(line.get("run_tokens_per_second")),
        prefix_hit_share=finite(line.get("serve_prefix_hit_share")),
        preemptions=int(finite(line.get("serve_preemptions")) or 0),
        quantiles=quantiles,
    )


def with_idle_times(looks: list[ServerLook]) -> list[ServerLook]:
    """Add an entry at the start and the end of every idle period."""
    result = looks[:1]
    for before, after in pairwise(looks):
        if not before.running and not before.waiting and after.time - before.time > IDLE_SECONDS:
            idle = replace(before, tokens_per_second=0.0, quantiles={})
            result += [replace(idle, time=before.time + EDGE_SECONDS), replace(idle, time=after.time - EDGE_SECONDS)]
        result.append(after)
    return result


def _version(path: Path) -> tuple[int, int]:
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _modified(path: Path) -> int:
    return _version(path)[1]
