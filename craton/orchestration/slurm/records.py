"""Parse the output of Slurm's tools: jobs, nodes, switches, partitions, reservations.

`squeue --json` has two formats (a number is plain up to 22.05, `{set, infinite, number}` since 23.02; a state is a
string, then a list of strings). `scontrol` prints JSON only since 23.02, so its `Key=value` text is parsed, which is
the same from 22.05 to 26.05. Values that a version does not print are None or empty, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from craton.infrastructure import TopologyError
from craton.infrastructure.topology import expand as expand_hosts

NOTHING = ("", "(null)", "N/A", "None", "n/a", "Unknown", "UNLIMITED", "INFINITE")
PENDING, RUNNING = "PENDING", "RUNNING"
CONFIGURING = "CONFIGURING"  # it has nodes, and waits until they have booted or their prolog has ended
SUSPENDED = ("SUSPENDED", "STOPPED")  # by an administrator, by gang scheduling, or by a preempting job
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
# Node states, also in addition to the base state, in which a node takes no job.
AWAY = (
    *("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "MAINT", "MAINTENANCE", "NOT_RESPONDING"),
    *("POWERING_DOWN", "REBOOT"),
)

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/.\[\]-]*)=")
# Values that may contain anything, also spaces and `=`; each is the last of its line.
_FREE_TEXTS = (
    *("JobName", "Reason", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn"),
    *("StdOut", "OS", "Extra"),
)
_NO_NUMBER = 0xFFFFFFFE  # and above: Slurm's "not set" and "infinite", which older versions print as numbers


@dataclass(frozen=True)
class JobRecord:
    """One job, pending, running or just ended."""

    id: str  # 812, or 812_3 of an array
    state: str  # PENDING, RUNNING, COMPLETING, …
    name: str = ""
    comment: str = ""  # from its submission
    reason: str = ""  # one code without spaces
    partition: str = ""
    account: str = ""
    qos: str = ""
    user: str = ""
    nodes: str = ""  # a hostlist
    num_nodes: int = 0
    start: float | None = None  # epoch seconds; for a pending job the expected start
    end: float | None = None
    time_limit_seconds: float | None = None  # None: no limit
    priority: int = 0
    restarts: int = 0
    dependency: str = ""
    features: str = ""
    excluded: str = ""  # a hostlist
    required: str = ""  # a hostlist
    scheduled: str = ""  # a hostlist: the nodes planned for a pending job
    reservation: str = ""
    licenses: str = ""
    switches: int = 0  # maximum number of leaves; 0: any number
    switch_wait_seconds: float | None = None
    segment_nodes: int = 0  # nodes per segment, each in one block; 0: no constraint
    tasks: str = ""  # pending tasks of an array, as in 3,7-50

    def has_task(self, number: int) -> bool:
        """Whether this is an array's record, and the task is still pending."""
        for part in self.tasks.partition("%")[0].split(","):
            first, _, last = part.partition(":")[0].partition("-")
            if first.isdecimal() and int(first) <= number <= int(last or first):
                return True
        return False

    @property
    def number(self) -> int:
        """The numeric job ID, in submission order."""
        digits = self.id.partition("_")[0]
        return int(digits) if digits.isdecimal() else 0

    @property
    def is_pending(self) -> bool:
        return self.state == PENDING

    @property
    def is_suspended(self) -> bool:
        """Whether its processes are stopped, and keep their nodes."""
        return self.state in SUSPENDED

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class NodeRecord:
    name: str
    states: tuple[str, ...]  # IDLE, MIXED, ALLOCATED, DOWN, DRAIN, …
    address: str = ""
    reason: str = ""
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: str = ""  # gpu:h100:8

    @property
    def is_away(self) -> bool:
        """Whether it takes no new job, even if a job runs on it."""
        return any(state in AWAY for state in self.states)

    @property
    def is_free(self) -> bool:
        """Whether nothing runs on it; it may still be reserved or planned."""
        return not self.is_away and "IDLE" in self.states and "COMPLETING" not in self.states


@dataclass(frozen=True)
class SwitchRecord:
    """A switch of a tree topology, or a block."""

    name: str
    level: int  # 0: a leaf, with nodes
    nodes: str  # a hostlist


@dataclass(frozen=True)
class PartitionRecord:
    name: str
    state: str = "UP"
    max_seconds: float | None = None
    max_nodes: int | None = None


@dataclass(frozen=True)
class ReservationRecord:
    name: str
    nodes: str = ""  # a hostlist
    start: float | None = None
    end: float | None = None
    users: str = ""
    accounts: str = ""


def jobs_of_json(document: Mapping[str, Any]) -> list[JobRecord]:
    """Parse `squeue --json` of any version."""
    return [_job_of_json(job) for job in document.get("jobs") or () if isinstance(job, Mapping)]


def jobs_of_text(text: str) -> list[JobRecord]:
    """Parse `scontrol show job`."""
    return [_job_of_text(fields) for fields in records_of_text(text, "JobId")]


def jobs_of_lines(text: str) -> list[JobRecord]:
    """Parse `squeue --format='%i %T %k'`: only job ID, state and comment."""
    fields = [line.split(maxsplit=2) for line in text.splitlines()]
    return [JobRecord(number, state, comment="".join(comment)) for number, state, *comment in fields]


def job_of(jobs: Mapping[str, JobRecord], number: str) -> JobRecord | None:
    """Return the job with this ID; a pending array task is part of the array's record."""
    array, _, task = number.partition("_")
    if number in jobs or not task:
        return jobs.get(number)
    whole = jobs.get(array)
    return whole if whole is not None and whole.has_task(int(task)) else None


def nodes_of_text(text: str) -> list[NodeRecord]:
    """Parse `scontrol show node`."""
    return [
        NodeRecord(
            name=fields["NodeName"],
            # `*`: not responding. `$`, `@`, `#`, `~`, … mean reservations, reboots and power saving.
            states=tuple(
                state
                for part in fields.get("State", "").split("+")
                for state in (part.rstrip("*$@#~!%^-"), "NOT_RESPONDING" if part.endswith("*") else "")
                if state
            ),
            address=_text(fields.get("NodeAddr")) or fields["NodeName"],
            reason=re.sub(r"\s*\[[^\[\]]*@[^\[\]]*\]$", "", _text(fields.get("Reason"))),
            features=tuple(_text(fields.get("ActiveFeatures") or fields.get("AvailableFeatures")).split(",")),
            partitions=tuple(_text(fields.get("Partitions")).split(",")),
            gres=re.sub(r"\([^()]*\)", "", _text(fields.get("Gres"))),  # without the sockets they are bound to
        )
        for fields in records_of_text(text, "NodeName")
    ]


def switches_of_text(text: str) -> list[SwitchRecord]:
    """Parse the switches or blocks of `scontrol show topology`, without AggregatedBlock."""
    switches = [
        SwitchRecord(fields["SwitchName"], int(fields.get("Level", 0)), _text(fields.get("Nodes")))
        for fields in records_of_text(text, "SwitchName")
    ]
    blocks = [
        SwitchRecord(fields["BlockName"], 0, _text(fields.get("Nodes")))
        for fields in records_of_text(text, "BlockName")
    ]
    return [*switches, *blocks]


def partitions_of_text(text: str) -> list[PartitionRecord]:
    """Parse `scontrol show partition`."""
    return [
        PartitionRecord(
            name=fields["PartitionName"],
            state=fields.get("State", "UP"),
            max_seconds=seconds_of(fields.get("MaxTime", "")),
            max_nodes=int(nodes) if (nodes := fields.get("MaxNodes", "")).isdecimal() else None,
        )
        for fields in records_of_text(text, "PartitionName")
    ]


def reservations_of_text(text: str) -> list[ReservationRecord]:
    """Parse `scontrol show reservation`."""
    return [
        ReservationRecord(
            name=fields["ReservationName"],
            nodes=_text(fields.get("Nodes")),
            start=moment_of(fields.get("StartTime", "")),
            end=moment_of(fields.get("EndTime", "")),
            users=_text(fields.get("Users")),
            accounts=_text(fields.get("Accounts")),
        )
        for fields in records_of_text(text, "ReservationName")
    ]


def hosts_of(text: str) -> list[str]:
    """Return the host names in a hostlist; empty if it is invalid."""
    try:
        return expand_hosts(text) if text else []
    except TopologyError:
        return []


def records_of_text(text: str, first: str) -> Iterable[dict[str, str]]:
    """Yield the records of `scontrol show`, each beginning with the key `first`. An unindented line with another key
    begins a record of another kind, which is skipped."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        keys = list(_KEY.finditer(line))
        if keys and keys[0].start(1) == 0:
            if fields:
                yield fields
            fields = {}
            if keys[0].group(1) != first:
                continue
        elif not fields:
            continue
        for number, key in enumerate(keys):
            name = key.group(1)
            # A job's Reason is one code inside its line; a node's Reason takes the rest of the line.
            is_free = name in _FREE_TEXTS and (name != "Reason" or number == 0)
            last = is_free or number + 1 == len(keys)
            fields[name] = line[key.end() : len(line) if last else keys[number + 1].start()].strip()
            if is_free:
                break
    if fields:
        yield fields


def seconds_of(text: str) -> float | None:
    """Parse `1-02:03:04`, `02:03:04`, `03:04` or `10` (minutes) as seconds; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:  # D-HH[:MM[:SS]]
        return float(((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0))
    if third is not None:
        return float(((first or 0) * 60 + (second or 0)) * 60 + third)
    return float((first or 0) * 60 + (second or 0))


def moment_of(text: str) -> float | None:
    """Parse `2026-11-15T22:07:08`, in the cluster's local time, as epoch seconds."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _job_of_text(fields: Mapping[str, str]) -> JobRecord:
    switches, _, wait = _text(fields.get("Switches")).partition("@")
    array, task = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
    return JobRecord(
        id=f"{array}_{task}" if array and task.isdecimal() else array or fields["JobId"],
        state=fields.get("JobState", ""),
        name=fields.get("JobName", ""),
        comment=_text(fields.get("Comment")),
        reason=_reason(fields.get("Reason", "")),
        partition=_text(fields.get("Partition")),
        account=_text(fields.get("Account")),
        qos=_text(fields.get("QOS")),
        user=_text(fields.get("UserId")).partition("(")[0],
        nodes=_text(fields.get("NodeList")),
        num_nodes=_whole(fields.get("NumNodes", "").partition("-")[0]),
        start=moment_of(fields.get("StartTime", "")),
        end=moment_of(fields.get("EndTime", "")),
        time_limit_seconds=seconds_of(fields.get("TimeLimit", "")),
        priority=_whole(fields.get("Priority")),
        restarts=_whole(fields.get("Restarts")),
        dependency=_text(fields.get("Dependency")),
        features=_text(fields.get("Features")),
        excluded=_text(fields.get("ExcNodeList")),
        required=_text(fields.get("ReqNodeList")),
        scheduled=_text(fields.get("SchedNodeList")),
        reservation=_text(fields.get("Reservation")),
        licenses=_text(fields.get("Licenses")),
        switches=_whole(switches),
        switch_wait_seconds=seconds_of(wait),
        segment_nodes=_whole(fields.get("SegmentSize")),
        tasks="" if task.isdecimal() else _text(task),
    )


def _job_of_json(fields: Mapping[str, Any]) -> JobRecord:
    array, task = _number(fields.get("array_job_id")), _number(fields.get("array_task_id"))
    number = _number(fields.get("job_id")) or 0
    minutes, wait = _number(fields.get("time_limit")), _number(fields.get("maximum_switch_wait_time"))
    return JobRecord(
        id=f"{int(array)}_{int(task)}" if array and task is not None else str(int(array or number)),
        state=_state(fields.get("job_state")),
        name=_text(fields.get("name")),
        comment=_text(fields.get("comment")),
        reason=_reason(_text(fields.get("state_reason"))),
        partition=_text(fields.get("partition")),
        account=_text(fields.get("account")),
        qos=_text(fields.get("qos")),
        user=_text(fields.get("user_name")),
        nodes=_text(fields.get("nodes")),
        num_nodes=int(_number(fields.get("node_count")) or 0),
        start=_number(fields.get("start_time")) or None,
        end=_number(fields.get("end_time")) or None,
        time_limit_seconds=None if minutes is None else minutes * 60.0,
        priority=int(_number(fields.get("priority")) or 0),
        restarts=int(_number(fields.get("restart_cnt")) or 0),
        dependency=_text(fields.get("dependency")),
        features=_text(fields.get("features")),
        excluded=_text(fields.get("excluded_nodes")),
        required=_text(fields.get("required_nodes")),
        scheduled=_text(fields.get("scheduled_nodes")),
        reservation=_text(fields.get("resv_name")),
        licenses=_text(fields.get("licenses")),
        switches=int(_number(fields.get("required_switches")) or 0),
        switch_wait_seconds=wait or None,
        segment_nodes=int(_number(fields.get("segment_size")) or 0),
        tasks=_text(fields.get("array_task_string")),
    )


def _state(value: Any) -> str:
    """Return the state from a string, or a list of a state and flags; COMPLETING takes precedence."""
    words = [str(item) for item in value] if isinstance(value, list) else str(value or "").replace("+", " ").split()
    if "COMPLETING" in words:
        return "COMPLETING"
    return words[0] if words else ""


def _number(value: Any) -> float | None:
    """Return a number, plain or as `{set, infinite, number}`; None if it is unset or infinite."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value < _NO_NUMBER
    return float(value) if is_number else None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return "" if value is None or str(value) in NOTHING else str(value)


def _reason(text: str) -> str:
    """Unify `launch failed requeued held` (squeue) and `launch_failed_requeued_held` (scontrol)."""
    return "" if text in NOTHING else text.strip("()").replace(" ", "_")


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
