"""Which ranks of which runs are on this node, by the status files of the runs.

Every node of a cluster looks into the same folder of runs, mostly on a shared file system, so a look must cost little
however many runs and nodes there are. A run that nobody writes to is not opened, and asked for its age the more rarely
the older it is. Of one that lives, the heartbeat of each node is read once, to learn whose host it is on, and from then
on only the files of this host's own.

In a container an agent knows neither the host's name nor its process numbers. What tells of it is a process on this
host whose environment names its run and node (`is_here`); ranks are then found by their numbers in the container.

A shared file system whose server is gone holds whoever looks at it. `look` is for one thread that may be held;
everybody else reads what the last look found, which never blocks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat, read_status

LOOK_SECONDS = 10.0  # between two looks
FRESH_SECONDS = 60.0  # a file that nobody has written for so long tells of processes that are gone
TOLD_SECONDS = 150.0  # for which it counts that a process was here: scrapes may be a minute apart
REST_SHARE = 0.1  # of the age of a run that rests, until it is asked for its age again
LONGEST_REST_SECONDS = 600.0
HOSTS_SECONDS = 600.0  # until heartbeats of other hosts are read again, should one have come back unnoticed


class RankHere(NamedTuple):
    run: str
    rank: str
    run_node: str  # what the run calls this node


# Run, what it calls the node, and a process number as that node's processes count: a container has its own.
InNode = tuple[str, str, int]


class Looked(NamedTuple):
    """What a look found: replaced as a whole, so that threads need no lock."""

    number: int = 0
    moment: float = 0.0
    ranks: Mapping[InNode, RankHere] = {}
    by_number: Mapping[int, RankHere] = {}  # those whose process numbers are this host's


@dataclass
class _Hosts:
    """Which nodes of a live run are on this host."""

    changed_ns: int = -1  # of the folder of heartbeats; touching one does not change it, replacing one does
    read_at: float = float("-inf")
    told_by: dict[str, int] = field(default_factory=dict)  # node → inode of the heartbeat that told its host
    here: set[str] = field(default_factory=set)


class RunsHere:
    def __init__(self, runs_folder: Path, host: str) -> None:
        self._runs_folder, self._host = runs_folder, host
        self._told: dict[Path, float] = {}  # runs that processes told of, wherever they are, and when
        self._nodes_told: dict[tuple[str, str], float] = {}  # (run, its node) that processes here are of, and when
        self._telling = threading.Lock()  # of these two alone: never held while files are looked at
        self._is_due = True
        self._due: dict[Path, float] = {}  # run → when it is asked for its age again
        self._hosts: dict[Path, _Hosts] = {}
        self.last = Looked()
        self.has_looked = threading.Event()

    def also(self, run: Path, now: float) -> None:
        """A process here is of this run, which need not be in the folder of runs: it is looked for at once."""
        with self._telling:
            self._is_due |= run not in self._told
            self._told[run] = now

    def is_here(self, run: str, node: str, now: float) -> None:
        """A process here is of this node of a run, whatever its agent calls the host."""
        with self._telling:
            self._is_due |= (run, node) not in self._nodes_told
            self._nodes_told[run, node] = now

    def look(self, now: float) -> Looked:
        """May be held by the file system. For one thread."""
        if not self._is_due and now - self.last.moment < LOOK_SECONDS:
            return self.last
        with self._telling:
            self._is_due = False
            reported = dict(self._told)
            self._nodes_told = {
                place: moment for place, moment in self._nodes_told.items() if now - moment < TOLD_SECONDS
            }
            places = set(self._nodes_told)
        runs = {*_folders(self._runs_folder), *reported}
        # A run that a process tells of may be mounted elsewhere for it than for us: its name is the same.
        awake = {*reported, *(run for run in runs if any(run.name == name for name, _ in places))}
        self._due = {run: due for run, due in self._due.items() if run in runs}
        live = [run for run in runs if (run in awake or self._due.get(run, now) <= now) and self._lives(run, now)]
        self._hosts = {run: self._hosts.get(run) or _Hosts() for run in live}
        ranks: dict[InNode, RankHere] = {}
        by_number: dict[int, RankHere] = {}
        for run in live:
            also = {node for name, node in places if name == run.name}
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
        """Agents replace their status every few seconds, which changes the folder: its age needs nothing opened."""
        age = _age(run / "status")
        if age < FRESH_SECONDS:
            self._due.pop(run, None)
            return True
        rest = min(max(age * REST_SHARE, LOOK_SECONDS), LONGEST_REST_SECONDS)
        if (
            run in self._hosts
        ):  # it lived at the last look: a clock that jumped makes files look old until the next write
            rest = LOOK_SECONDS
        self._due[run] = now + rest
        return False

    def _ranks_of(
        self, run: RunDirectory, hosts: _Hosts, reported: Set[str], now: float
    ) -> Iterator[tuple[int, RankHere, bool]]:
        """Process number, rank, and whether the number is one of this host's."""
        self._read_hosts(run, hosts, now)
        for node in sorted(hosts.here | (reported & hosts.told_by.keys())):  # a process may say what it likes
            heartbeat = read_heartbeat(run, node)
            if heartbeat is None or (heartbeat.host != self._host and node not in reported):
                continue
            if heartbeat.state != "running" or heartbeat.age_seconds() > FRESH_SECONDS:
                continue
            status = read_status(run, node) if _age(run.status_path(node)) < FRESH_SECONDS else None
            for rank in status.ranks if status is not None else ():
                yield rank.pid, RankHere(run.name, str(rank.rank), node), heartbeat.host == self._host

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
    """Infinite where there is nothing."""
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


class RunsCollector(Collector):
    """The thread that looks for runs, for itself and for those who ask whose a GPU is: a shared file system that hangs
    holds it alone."""

    name = "runs"

    def __init__(self, here: RunsHere) -> None:
        self._here = here

    def collect(self, now: float) -> Iterator[Sample]:
        places = Counter((rank.run, rank.run_node) for rank in self._here.look(now).ranks.values())
        for place, ranks in sorted(places.items()):
            yield "craton_node_run_ranks", place, ranks
