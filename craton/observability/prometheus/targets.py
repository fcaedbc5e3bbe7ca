"""Scrape targets for Prometheus: the agents and servers of runs, and the exporters on their machines.

`run_targets` reads a run directory. A run that has ended has no targets, so its series end and its alerts resolve. A
node that vanished keeps its target for LOST_SECONDS, so that its alert fires, or for LEFT_BEHIND_SECONDS when the other
nodes have started a generation without it.
`SearchedExporters` probes the well-known exporter ports in the background, because a port that drops packets takes a
second. An exporter that answered once stays a target while its machine is watched: only then can its silence alert. A
machine reported by both a run and the scheduler is one machine (`merged`).
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue

from craton.errors import CratonError
from craton.infrastructure.aws import EXPORTERS as EXPORTER_PORTS
from craton.job import load_job
from craton.orchestration import address_of
from craton.orchestration.watching import is_server
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import UnsafeFileError, names_in
from craton.telemetry.node import Heartbeat, read_heartbeat

AGENTS, SERVERS = "craton", "craton-serve"
EXPORTERS = {"craton-node": 9500, **EXPORTER_PORTS}  # ours, and those of a provisioned cluster
FOUND_JOBS = (AGENTS, SERVERS, *EXPORTERS)  # each has its own target file
LOST_SECONDS = 3600.0
LEFT_BEHIND_SECONDS = 180.0  # for a node that the run continued without: NodeDown fires, then resolves
ANSWER_SECONDS = 1.0
SEARCH_SECONDS = 30.0  # between two searches of a machine for exporters
SEARCHES = 32  # concurrent probes
PATIENCE_SECONDS = 0.5  # maximum wait for a search that just started: reachable exporters answer within it
EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class ScrapeTarget:
    job: str
    address: str  # host:port
    labels: Mapping[str, str]


@dataclass(frozen=True)
class ScrapedMachine:
    """A machine that may run exporters."""

    host: str  # address to connect to
    name: str  # the label `node`
    leaf: str = ""


@dataclass(frozen=True)
class FoundTargets:
    """Targets and machines found in run directories."""

    targets: tuple[ScrapeTarget, ...]
    machines: tuple[ScrapedMachine, ...]


def look_at(runs: Iterable[RunDirectory], now: float | None = None) -> FoundTargets:
    """Return the targets of active runs, and their machines."""
    targets: list[ScrapeTarget] = []
    machines: list[ScrapedMachine] = []
    for run in runs:
        beats = {node: beat for node, beat in _heartbeats(run) if _is_there(run, beat, now)}
        if not beats:
            continue
        leaves = read_json(run.launch_path).get("leaves") or {}
        targets += run_targets(run, _not_left_behind(beats, now), leaves)
        machines += [
            ScrapedMachine(_host(beat), beat.host or node, str(leaves.get(node, ""))) for node, beat in beats.items()
        ]
    return FoundTargets(tuple(targets), merged(machines))


def merged(machines: Iterable[ScrapedMachine]) -> tuple[ScrapedMachine, ...]:
    """Return each machine once: its first entry, with the first known leaf. Entries may differ in address, and in
    whether the name has a domain."""
    by_name: dict[str, ScrapedMachine] = {}
    for machine in machines:
        name = _short(machine.name)
        first = by_name.setdefault(name, machine)
        if machine.leaf and not first.leaf:
            by_name[name] = replace(first, leaf=machine.leaf)
    return tuple(by_name.values())


def run_targets(run: RunDirectory, beats: Mapping[str, Heartbeat], leaves: Mapping[str, str]) -> list[ScrapeTarget]:
    """Return the metrics endpoints of a run's agents, and of its server if it is one."""

    def labels(node: str) -> dict[str, str]:
        return {"run": run.name, "node": node, "leaf": str(leaves.get(node, ""))}

    result = [
        ScrapeTarget(AGENTS, joined(_host(beat), beat.metrics_port), labels(node))
        for node, beat in beats.items()
        if beat.metrics_port
    ]
    server = _server(run)
    if server is not None:
        node, beat = next(iter(beats.items()))
        host, port = server
        result.append(ScrapeTarget(SERVERS, joined(_host(beat) if host in EVERYWHERE else host, port), labels(node)))
    return result


@dataclass
class SearchedExporters:
    """Probe machines for exporters repeatedly, in daemon threads."""

    ports: Mapping[str, int] = field(default_factory=lambda: dict(EXPORTERS))
    _answered: set[tuple[str, str]] = field(default_factory=set)  # (job, host)
    _searched: dict[str, float] = field(default_factory=dict)  # host → when
    _searching: list[threading.Thread] = field(default_factory=list)
    _answers: SimpleQueue[tuple[str, str]] = field(default_factory=SimpleQueue)

    def look(self, machines: Iterable[ScrapedMachine]) -> list[ScrapeTarget]:
        """Return the exporters on these machines that have answered so far; each is kept while its machine is given.
        Wait at most PATIENCE_SECONDS; a new search starts only after the last one ended."""
        wanted = {machine.host: machine for machine in machines}
        now = time.monotonic()
        if not any(thread.is_alive() for thread in self._searching):
            due = [host for host in wanted if now - self._searched.get(host, -SEARCH_SECONDS) >= SEARCH_SECONDS]
            self._search([(job, host) for host in due for job in self.ports if (job, host) not in self._answered])
            self._searched.update(dict.fromkeys(due, now))
        while not self._answers.empty():
            self._answered.add(self._answers.get())
        return [
            ScrapeTarget(job, joined(host, self.ports[job]), {"node": wanted[host].name, "leaf": wanted[host].leaf})
            for job, host in sorted(self._answered)
            if host in wanted
        ]

    def _search(self, asked: Sequence[tuple[str, str]]) -> None:
        left = deque(asked)

        def ask() -> None:
            while left:
                try:
                    job, host = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                if serves_metrics(host, self.ports[job]):
                    self._answers.put((job, host))

        count = min(SEARCHES, len(asked))
        self._searching = [threading.Thread(target=ask, name="exporters", daemon=True) for _ in range(count)]
        for thread in self._searching:
            thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for thread in self._searching:
            thread.join(max(0.0, deadline - time.monotonic()))


def serves_metrics(host: str, port: int, path: str = "/metrics") -> bool:
    """Return whether an exporter answers there: another program may use its port."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status == http.client.OK and b"# TYPE" in answer.read(64 << 10)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def write_targets(folder: Path, targets: Iterable[ScrapeTarget]) -> None:
    """Write one file per job for Prometheus' file_sd; unchanged files are not touched."""
    by_job: dict[str, list[dict[str, object]]] = {job: [] for job in FOUND_JOBS}
    for target in targets:
        labels = {name: value for name, value in target.labels.items() if value}
        by_job.setdefault(target.job, []).append({"targets": [target.address], "labels": labels})
    folder.mkdir(parents=True, exist_ok=True)
    for job, entries in by_job.items():
        # An empty group instead of an empty list: Prometheus 2.42 keeps the old targets of a job without groups when it
        # reloads its configuration.
        path, text = folder / f"{job}.json", json.dumps(entries or [{"targets": []}], indent=1) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        fresh = folder / f".{job}.{os.getpid()}"
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)


def _heartbeats(run: RunDirectory) -> list[tuple[str, Heartbeat]]:
    try:
        nodes = names_in(run.path / "heartbeat", "[!.]*")
    except UnsafeFileError:
        return []
    return [(node, beat) for node in nodes if (beat := read_heartbeat(run, node)) is not None]


def _is_there(run: RunDirectory, beat: Heartbeat, now: float | None) -> bool:
    if beat.state not in ("running", "spare"):
        return False
    if not beat.is_lost(now):
        return True
    return not (run.has("DONE") or run.has("FATAL")) and beat.age_seconds(now) < LOST_SECONDS


def _not_left_behind(beats: Mapping[str, Heartbeat], now: float | None) -> dict[str, Heartbeat]:
    """Drop lost nodes that the run continued without: the live nodes have a newer generation. Their machines are still
    watched, because the fault may be visible there."""
    newest = max((beat.generation for beat in beats.values() if not beat.is_lost(now)), default=0)
    return {
        node: beat
        for node, beat in beats.items()
        if not beat.is_lost(now) or beat.generation >= newest or beat.age_seconds(now) < LEFT_BEHIND_SECONDS
    }


def _host(beat: Heartbeat) -> str:
    """Return the host on which a node's agent listens; older agents report only the machine name."""
    return beat.address.rpartition(":")[0].strip("[]") or beat.host or "127.0.0.1"


def _short(name: str) -> str:
    """Return the name without its domain; an IP address is returned as it is."""
    return name if name.replace(".", "").isdigit() else name.partition(".")[0].lower()


def _server(run: RunDirectory) -> tuple[str, int] | None:
    if not is_server(run):
        return None
    try:
        return _address_in(run.job_path, run.job_path.stat().st_mtime_ns)
    except (CratonError, OSError):  # the job file is gone or broken: the agents can still be scraped
        return None


@lru_cache(maxsize=256)
def _address_in(path: Path, moment: int) -> tuple[str, int]:
    address = address_of(load_job(path))
    return address.host, address.port


def joined(host: str, port: int) -> str:
    """Join host and port as in URLs and targets, with brackets around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
