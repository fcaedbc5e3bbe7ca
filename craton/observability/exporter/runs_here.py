"""Find the ranks of runs on this node by the status files of the runs.

Every node of a cluster scans the same folder of runs, usually on a shared file system, so a scan must stay cheap with
many runs and nodes. A run without recent writes is not opened, and the older it is, the more rarely its age is checked.
Members of a run are looked for as often as their owner.
For an active run, each node's heartbeat is read once to find its host; after that, only files of this host's nodes.

In a container an agent knows neither the host's name nor the host's PIDs. There, a process on this host whose
environment names its run and node identifies it (`is_here`); ranks are then matched by their PIDs in the container.

A shared file system whose server is gone blocks its callers. Only one thread may call `look`, which can block; all
others read the result of the last scan, which never blocks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample
from craton.telemetry import RunDirectory, name_by_path
from craton.telemetry.members import with_members
from craton.telemetry.node import read_heartbeat, read_status

LOOK_SECONDS = 10.0  # between two scans
FRESH_SECONDS = 60.0  # processes of a status file that is older are gone
SEEN_SECONDS = 150.0  # how long a process seen here counts: scrapes may be a minute apart
REST_SHARE = 0.1  # of the age of an inactive run, until its age is checked again
LONGEST_REST_SECONDS = 600.0
HOSTS_SECONDS = 600.0  # until heartbeats of other hosts are read again, in case one changed unnoticed


class RankHere(NamedTuple):
    run: str
    rank: str
    run_node: str  # the run's name for this node


# Run, the run's name for the node, and a PID in that node's PID namespace: a container has its own.
InNode = tuple[str, str, int]


class Looked(NamedTuple):
    """Result of a scan: replaced as a whole, so that threads need no lock."""

    number: int = 0
    moment: float = 0.0
    ranks: Mapping[InNode, RankHere] = {}
    by_number: Mapping[int, RankHere] = {}  # those whose PIDs are host PIDs


@dataclass
class _Hosts:
    """The nodes of an active run that are on this host."""

    changed_ns: int = -1  # mtime of the heartbeat folder; touching a file does not change it, replacing one does
    read_at: float = float("-inf")
    told_by: dict[str, int] = field(default_factory=dict)  # node → inode of the heartbeat that named its host
    here: set[str] = field(default_factory=set)


class RunsHere:
    def __init__(self, runs_folder: Path, host: str) -> None:
        self._runs_folder, self._host = runs_folder, host
        self._told: dict[Path, float] = {}  # runs that local processes named, in any folder, and when
        self._nodes_told: dict[tuple[str, str], float] = {}  # (run, its node) of local processes, and when
        self._telling = threading.Lock()  # guards only these two: never held while files are read
        self._is_due = True
        self._due: dict[Path, float] = {}  # run → when its age is checked again
        self._hosts: dict[Path, _Hosts] = {}
        self.last = Looked()
        self.has_looked = threading.Event()

    def also(self, run: Path, now: float) -> None:
        """Note that a local process belongs to this run, which may be outside the folder of runs; scan at once."""
        with self._telling:
            self._is_due |= run not in self._told
            self._told[run] = now

    def is_here(self, run: str, node: str, now: float) -> None:
        """Note that a local process belongs to this node of a run, whatever host name its agent has."""
        with self._telling:
            self._is_due |= (run, node) not in self._nodes_told
            self._nodes_told[run, node] = now

    def look(self, now: float) -> Looked:
        """Scan the runs if due. The file system may block it; only one thread may call it."""
        if not self._is_due and now - self.last.moment < LOOK_SECONDS:
            return self.last
        with self._telling:
            self._is_due = False
            reported = dict(self._told)
            self._nodes_told = {
                place: moment for place, moment in self._nodes_told.items() if now - moment < SEEN_SECONDS
            }
            places = set(self._nodes_told)
        runs = {*_folders(self._runs_folder), *reported}
        runs |= {member for run in runs if self._due.get(run, now) <= now for member in _members(run)}
        # A process may see its run under another mount path than this exporter: the run's name is the same.
        awake = {*reported, *(run for run in runs if any(name_by_path(run) == name for name, _ in places))}
        self._due = {run: due for run, due in self._due.items() if run in runs}
        live = [run for run in runs if (run in awake or self._due.get(run, now) <= now) and self._lives(run, now)]
        self._hosts = {run: self._hosts.get(run) or _Hosts() for run in live}
        ranks: dict[InNode, RankHere] = {}
        by_number: dict[int, RankHere] = {}
        for run in live:
            also = {node for name, node in places if name == name_by_path(run)}
            for number, rank, is_ours in self._ranks_of(RunDirectory(run), self._hosts[run], also, now):
                ranks[rank.run, rank.run_node, number] = rank
                if is_ours:
                    by_number[number] = rank
        for run in reported.keys() - live:
            self._forget(run, now)
        self.last = Looked(self.last.number + 1, now, ranks, by_number)
        self.has_looked.set()
        return self.last

    def _forget(self, run: Path, now: float) -> None:
        with self._telling:
            if now - self._told[run] >= FRESH_SECONDS:
                del self._told[run]

    def _lives(self, run: Path, now: float) -> bool:
        """Return whether a run is active. Agents replace their status file every few seconds, so the mtime of its
        folder is enough."""
        age = _age(run / "status")
        if age < FRESH_SECONDS:
            self._due.pop(run, None)
            return True
        rest = min(max(age * REST_SHARE, LOOK_SECONDS), LONGEST_REST_SECONDS)
        # Active at the last scan: after a clock jump files look old until the next write.
        if run in self._hosts:
            rest = LOOK_SECONDS
        self._due[run] = now + rest
        return False

    def _ranks_of(
        self, run: RunDirectory, hosts: _Hosts, reported: Set[str], now: float
    ) -> Iterator[tuple[int, RankHere, bool]]:
        """Yield PID, rank, and whether it is a host PID."""
        self._read_hosts(run, hosts, now)
        for node in sorted(hosts.here | (reported & hosts.told_by.keys())):  # a process' environment is not trusted
            heartbeat = read_heartbeat(run, node)
            if heartbeat is None or (heartbeat.host != self._host and node not in reported):
                continue
            if heartbeat.state != "running" or heartbeat.age_seconds() > FRESH_SECONDS:
                continue
            status = read_status(run, node) if _age(run.status_path(node)) < FRESH_SECONDS else None
            for rank in status.ranks if status is not None else ():
                yield rank.pid, RankHere(name_by_path(run.path), str(rank.rank), node), heartbeat.host == self._host

    def _read_hosts(self, run: RunDirectory, hosts: _Hosts, now: float) -> None:
        folder = run.path / "heartbeat"
        try:
            changed_ns = folder.stat().st_mtime_ns
            if changed_ns == hosts.changed_ns and now - hosts.read_at < HOSTS_SECONDS:
                return
            with os.scandir(folder) as entries:
                inodes = {entry.name: entry.inode() for entry in entries if not entry.name.startswith(".")}
        except OSError:
            hosts.here.clear()
            return
        is_whole = now - hosts.read_at >= HOSTS_SECONDS
        for node, inode in inodes.items():
            if is_whole or hosts.told_by.get(node) != inode:
                heartbeat = read_heartbeat(run, node)
                if heartbeat is not None and heartbeat.host == self._host:
                    hosts.here.add(node)
                else:
                    hosts.here.discard(node)
        hosts.here &= set(inodes)
        hosts.told_by, hosts.changed_ns = inodes, changed_ns
        if is_whole:
            hosts.read_at = now


def _age(path: Path) -> float:
    """Return the age of a file in seconds; infinity when it does not exist."""
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return float("inf")


def _folders(runs_folder: Path) -> list[Path]:
    try:
        with os.scandir(runs_folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _members(run: Path) -> list[Path]:
    """Return the folders of the members of a run, of their members, and so on."""
    return [member.path for member in islice(with_members([RunDirectory(run)]), 1, None)]


class RunsCollector(Collector):
    """Scan for runs in its own thread, also for the GPU collector's labels: a hung shared file system blocks only this
    collector."""

    name = "runs"

    def __init__(self, here: RunsHere) -> None:
        self._here = here

    def collect(self, now: float) -> Iterator[Sample]:
        places = Counter((rank.run, rank.run_node) for rank in self._here.look(now).ranks.values())
        for place, ranks in sorted(places.items()):
            yield "craton_node_run_ranks", place, ranks
