"""Lustre client metrics: reads and writes of programs, request times of metadata and object servers, connection state.

`llite` is the file system as programs see it, `mdc` the connection to a metadata server, `osc` to an object server.
Statistics are in debugfs, readable only by root, in older versions in procfs; some versions have statistics in one and
the connection state in the other. FSx does not expose its servers: only the client, here, and CloudWatch show them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample

PLACES = ("sys/kernel/debug/lustre", "proc/fs/lustre", "sys/fs/lustre")
LOOK_SECONDS = 60.0
# NAME  COUNT samples [UNIT] MIN MAX SUM SUMSQ; everything after the unit may be missing
_ROW = re.compile(r"^(\S+)\s+(\d+) samples \[(\w+)\](?:\s+(\d+)\s+(\d+)\s+(\d+))?", re.MULTILINE)
_STATE = re.compile(r"^\s*state:\s*(\w+)", re.MULTILINE)
_INSTANCE = re.compile(r"-[0-9a-f]{12,16}$")  # the mount's kernel address, which changes with each mount
CONNECTED = ("FULL", "IDLE")
SECONDS = {"usec": 1e-6, "usecs": 1e-6, "msec": 1e-3, "sec": 1.0}
# Requests that open, close and stat a file or list a folder: mds_* and ldlm_* in `stats` of mdc
_METADATA = ("mds_", "ldlm_")


@dataclass(frozen=True)
class LustreRow:
    """One line of a `stats` file."""

    name: str
    count: int
    unit: str
    total: int | None

    @property
    def seconds(self) -> float | None:
        return self.total * SECONDS[self.unit] if self.total is not None and self.unit in SECONDS else None


def read_rows(text: str) -> list[LustreRow]:
    rows = _ROW.findall(text)
    return [LustreRow(name, int(count), unit, int(total) if total else None) for name, count, unit, _, _, total in rows]


class LustreCollector(Collector):
    name = "lustre"

    def __init__(self, root: NodeRoot) -> None:
        self._root = root
        self._looked = float("-inf")
        self._parts: list[tuple[str, str, str, str]] = []  # component, target, statistics file, connection file

    def collect(self, now: float) -> Iterator[Sample]:
        if now - self._looked >= LOOK_SECONDS:
            self._parts = self._look()
            self._looked = now
        strange = ""
        for component, target, stats, connection in self._parts:
            labels = (component, target)
            text = self._root.read(stats) if stats else ""
            rows = read_rows(text)
            if text and not rows:
                self.errors += 1
                strange = strange or stats
            yield from _of_programs(rows, labels) if component == "llite" else _of_server(rows, labels)
            state = _STATE.search(self._root.read(connection)) if connection else None
            if state:
                yield "craton_lustre_connected", labels, int(state[1] in CONNECTED)
        if strange:
            self.say(f"{strange} has no statistics")

    def _look(self) -> list[tuple[str, str, str, str]]:
        """Return the files of each component, from the first folder that has them."""
        files_by_part: dict[tuple[str, str], dict[str, str]] = {}
        for component in ("llite", "mdc", "osc"):
            for place in PLACES:
                for name in self._root.names(f"{place}/{component}"):
                    folder = f"{place}/{component}/{name}"
                    for file in ("stats",) if component == "llite" else ("stats", "import"):
                        if self._root.exists(f"{folder}/{file}"):
                            part = files_by_part.setdefault((component, _INSTANCE.sub("", name)), {})
                            part.setdefault(file, f"{folder}/{file}")
        return [(*part, files.get("stats", ""), files.get("import", "")) for part, files in files_by_part.items()]


def _of_programs(rows: list[LustreRow], labels: tuple[str, str]) -> Iterator[Sample]:
    for row in rows:
        if row.name in ("read_bytes", "write_bytes"):
            verb = row.name.removesuffix("_bytes")
            yield f"lustre_{verb}_samples_total", labels, row.count
            yield f"lustre_{verb}_bytes_total", labels, row.total or 0
            continue
        yield "lustre_stats_total", (*labels, row.name), row.count
        if row.seconds is not None:
            yield "craton_lustre_operation_seconds_total", (*labels, row.name), row.seconds


def _of_server(rows: list[LustreRow], labels: tuple[str, str]) -> Iterator[Sample]:
    for row in rows:
        if row.name == "req_waittime":
            yield "craton_lustre_requests_total", labels, row.count
            if row.seconds is not None:
                yield "craton_lustre_request_seconds_total", labels, row.seconds
        elif labels[0] == "mdc" and row.name.startswith(_METADATA):
            yield "lustre_stats_total", (*labels, row.name), row.count
            if row.seconds is not None:
                yield "craton_lustre_operation_seconds_total", (*labels, row.name), row.seconds
