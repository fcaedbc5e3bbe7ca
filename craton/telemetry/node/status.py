"""What each rank of a node does now: `status/NODE.json`, replaced every two seconds by the node's agent.

The metric files have the completed steps; this file has the step in progress. A reader sees either the old or the new
text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from craton.telemetry.files import replace_text
from craton.telemetry.rank import monotonic_clock_id
from craton.telemetry.rundirectory import RunDirectory, read_json

MAX_FRAME = 300  # characters


@dataclass(frozen=True)
class ProcessResources:
    """What a rank's process may use and uses, by the kernel. 0: unknown, or no limit."""

    cpus: int = 0  # that it may run on
    node_cpus: int = 0  # of its machine
    quota_cpus: float = 0.0  # CPU quota of its cgroups
    niceness: int = 0
    waited_share: float = 0.0  # of the last seconds of its threads: runnable, without a CPU
    throttled_share: float = 0.0  # of the last periods of that quota: used up before their end
    throttled_time_share: float = 0.0  # of the last seconds of its CPUs: taken by that quota
    memory_share: float = 0.0  # of the memory limit of its fullest cgroup, used and not reclaimable
    memory_limit_bytes: int = 0  # of that cgroup
    memory_bytes: int = 0  # resident, of this process
    idle_seconds: float = 0.0  # for which it and its children have used no CPU to speak of
    wanted_cpus: float = 0.0  # that its threads ran on or waited for, in the last seconds
    file_wait_share: float = 0.0  # of the last seconds: a thread slept in the kernel for a file or a disk
    memory_wait_share: float = 0.0  # the same for memory
    stopped_share: float = 0.0  # the same: a signal had stopped it
    sleeps_in: str = ""  # kernel function in which its main thread has slept for seconds
    refaults_per_second: float = 0.0  # pages of files that its memory limit had forced out and that it needed again
    step_cpu_seconds: float = 0.0  # CPU time that a step has taken in the last seconds, with its children
    usual_step_cpu_seconds: float = 0.0  # the same in the minutes before


@dataclass(frozen=True)
class PeerTraffic:
    """The TCP connections of a rank's process to one address, by the kernel, in the last seconds."""

    address: str
    unacknowledged_seconds: float = 0.0  # for which it sends, or tries to connect, without any acknowledgement
    connecting_port: int = 0  # to which it tries to connect; 0: the connection was there before
    segments: int = 0  # sent with data
    retransmitted: int = 0
    rtt_seconds: float = 0.0  # round-trip time; 0: nothing sent
    min_rtt_seconds: float = 0.0  # of the same connections


@dataclass(frozen=True)
class RankStatus:
    """One rank as its agent sees it."""

    rank: int
    pid: int
    kind: str  # what it books its time as, one of LEDGER_KINDS
    beside: tuple[str, ...]  # its background activities
    step: int
    progress_age_seconds: float  # since its last progress; 0 for a command that never reported any
    step_seconds: float  # its own median, 0 before there is one
    is_stopped: bool  # by a signal (SIGSTOP), or a debugger
    progress_limit_seconds: float = 0.0  # without progress in its current phase, after which it hangs; 0: unknown
    slowest_seconds: float = 0.0  # its slowest recent step, without data, checkpoint and evaluation; 0: unknown
    starved_seconds: float = 0.0  # since its last progress: no CPU for its threads, or its agent did not run
    patience_seconds: float = 0.0  # without progress, that the job allows (`progress.hang`); 0: its phase decides
    phase_seconds: dict[str, float] = field(default_factory=dict)  # kind → longest recent stay of this rank in it
    is_eager: bool = False  # its first step compiles nothing
    process_state: str = ""  # R, S, D, T, Z, by the kernel
    frame: str = ""  # where it waits, if its agent took its stack: `source.py:14 in read: time.sleep(60)`
    is_waiting: bool = False  # by its stack, it waits for other ranks in a collective
    is_user_frame: bool = False  # `frame` is of the user's own code
    wait_channels: tuple[str, ...] = ()  # kernel functions in which its threads slept when its stack was taken
    resources: ProcessResources = ProcessResources()
    peers: tuple[PeerTraffic, ...] = ()  # on other machines


@dataclass(frozen=True)
class NodeStatus:
    time: float  # epoch seconds
    generation: int
    node: str
    ranks: tuple[RankStatus, ...]
    clock: str = ""  # id of the agent's monotonic clock; "": unknown
    monotonic: float = 0.0  # the same moment by that clock
    interface_down: str = ""  # the node's network interface, if it is down

    def age_seconds(self, now: float) -> float:
        """Return its age at the epoch second `now`; a reader of the agent's boot knows it without a wall clock."""
        if self.clock and self.clock == monotonic_clock_id():
            return max(0.0, time.monotonic() - self.monotonic)
        return max(0.0, now - self.time)


def write_status(run: RunDirectory, status: NodeStatus) -> None:
    """Replace the node's status, on a full disk in place; OSError if that fails too."""
    path = run.status_path(status.node)
    path.parent.mkdir(exist_ok=True)  # a run of an older Craton has no such folder
    text = json.dumps(asdict(status), separators=(",", ":")) + "\n"
    replace_text(path, text, durable=False, in_place=True)


def read_status(run: RunDirectory, node: str) -> NodeStatus | None:
    """Return the node's status; None if it cannot be read."""
    document = read_json(run.status_path(node))
    try:
        return NodeStatus(
            time=float(document["time"]),
            generation=int(document["generation"]),
            node=str(document["node"]),
            ranks=tuple(_rank(rank) for rank in document["ranks"]),
            clock=str(document.get("clock", "")),
            monotonic=float(document.get("monotonic", 0.0)),
            interface_down=str(document.get("interface_down", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def _rank(document: dict[str, Any]) -> RankStatus:
    return RankStatus(
        rank=int(document["rank"]),
        pid=int(document["pid"]),
        kind=str(document["kind"]),
        beside=tuple(str(item) for item in document["beside"]),
        step=int(document["step"]),
        progress_age_seconds=float(document["progress_age_seconds"]),
        step_seconds=float(document["step_seconds"]),
        is_stopped=bool(document["is_stopped"]),
        progress_limit_seconds=float(document.get("progress_limit_seconds", 0.0)),
        slowest_seconds=float(document.get("slowest_seconds", 0.0)),
        starved_seconds=float(document.get("starved_seconds", 0.0)),
        patience_seconds=float(document.get("patience_seconds", 0.0)),
        phase_seconds={str(kind): float(seconds) for kind, seconds in (document.get("phase_seconds") or {}).items()},
        is_eager=bool(document.get("is_eager", False)),
        process_state=str(document.get("process_state", "")),
        frame=str(document.get("frame", ""))[:MAX_FRAME],
        is_waiting=bool(document.get("is_waiting", False)),
        is_user_frame=bool(document.get("is_user_frame", False)),
        wait_channels=tuple(str(item)[:MAX_FRAME] for item in document.get("wait_channels") or ()),
        resources=_resources(document.get("resources") or {}),
        peers=tuple(read_peer(peer) for peer in document.get("peers") or ()),
    )


def read_peer(document: Mapping[str, Any]) -> PeerTraffic:
    """Return the traffic of a JSON object; KeyError, TypeError or ValueError if it is none."""
    return PeerTraffic(
        address=str(document["address"]),
        unacknowledged_seconds=float(document.get("unacknowledged_seconds", 0.0)),
        connecting_port=int(document.get("connecting_port", 0)),
        segments=int(document.get("segments", 0)),
        retransmitted=int(document.get("retransmitted", 0)),
        rtt_seconds=float(document.get("rtt_seconds", 0.0)),
        min_rtt_seconds=float(document.get("min_rtt_seconds", 0.0)),
    )


def _resources(document: dict[str, Any]) -> ProcessResources:
    return ProcessResources(
        cpus=int(document.get("cpus", 0)),
        node_cpus=int(document.get("node_cpus", 0)),
        quota_cpus=float(document.get("quota_cpus", 0.0)),
        niceness=int(document.get("niceness", 0)),
        waited_share=float(document.get("waited_share", 0.0)),
        throttled_share=float(document.get("throttled_share", 0.0)),
        throttled_time_share=float(document.get("throttled_time_share", 0.0)),
        memory_share=float(document.get("memory_share", 0.0)),
        memory_limit_bytes=int(document.get("memory_limit_bytes", 0)),
        memory_bytes=int(document.get("memory_bytes", 0)),
        idle_seconds=float(document.get("idle_seconds", 0.0)),
        wanted_cpus=float(document.get("wanted_cpus", 0.0)),
        file_wait_share=float(document.get("file_wait_share", 0.0)),
        memory_wait_share=float(document.get("memory_wait_share", 0.0)),
        stopped_share=float(document.get("stopped_share", 0.0)),
        sleeps_in=str(document.get("sleeps_in", ""))[:64],
        refaults_per_second=float(document.get("refaults_per_second", 0.0)),
        step_cpu_seconds=float(document.get("step_cpu_seconds", 0.0)),
        usual_step_cpu_seconds=float(document.get("usual_step_cpu_seconds", 0.0)),
    )
