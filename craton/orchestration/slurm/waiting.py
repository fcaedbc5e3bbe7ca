"""Explain why a job waits, in one sentence: what it needs, what is available, and when it may start.

Pure: a job and the state of the cluster in, a sentence out. Slurm's reason gives the kind of wait; free nodes, end
times and unavailable nodes are computed here (`room.py`), because Slurm does not report them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from craton.formatting import whole_duration
from craton.orchestration.slurm.records import JobRecord, NodeRecord, hosts_of
from craton.orchestration.slurm.room import NodeRelease, Room, in_partition, most_nodes, room_for
from craton.orchestration.slurm.tools import SlurmState

REASONS = Path(__file__).with_name("reasons.toml")
HELD = (
    *("JobHeldUser", "JobHeldAdmin", "launch_failed_requeued_held", "launch_failure_limit_exceeded_requeued_held"),
    *("JobHoldMaxRequeue",),
)
SHOWN_NODES = 3
SECONDS_PER_DAY = 86400.0
RESOLUTION_SECONDS = 60.0  # of Slurm's planned times (default of bf_resolution)

_WHAT = {
    "Node": "nodes",
    "GRES": "GPUs",
    "Cpu": "cores",
    "CPU": "cores",
    "Mem": "memory",
    "Memory": "memory",
    "Job": "jobs",
    "Jobs": "jobs",
    "SubmitJob": "submitted jobs",
    "SubmitJobs": "submitted jobs",
    "Wall": "time",
    "Billing": "billed resources",
    "BB": "burst buffers",
    "Energy": "energy",
    "License": "licenses",
    "Unknown": "resources",
}
# https://github.com/SchedMD/slurm/blob/master/src/common/job_state_reason.c, read 2026-11-16. Without an owner, as in
# MaxGRESPerAccount, it is a limit of a QOS.
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc)?(?P<scope>Grp|Max|Min)(?P<what>SubmitJobs?|Jobs?|Node|GRES|CPU|Cpu|Memory|Mem|Wall|Billing|BB|"
    r"Energy|License|Unknown)(?:Duration)?(?P<minutes>Minutes|RunMinutes|RunMins)?"
    r"(?P<share>PerUser|PerAccount|PerJob|PerNode)?(?:Limit|NotSatisfied)?"
)


def why_waiting(job: JobRecord, cluster: SlurmState, now: float) -> str:
    """Explain a wait: `needs 4 nodes on one leaf; leaf2 has 3 free; earliest 14:05 when job 812 ends`."""
    reason = job.reason.partition(",")[0]
    explain = _EXPLANATIONS.get(reason)
    if explain is not None:
        return explain(job, cluster, now)
    if result := _fixed_sentence(job, reason or "None"):
        return result
    if limit := limit_in_words(job, reason):
        return limit
    return f"Slurm's reason is {job.reason}; `scontrol show job {job.id}` shows more"


def limit_in_words(job: JobRecord, reason: str) -> str:
    """Explain `QOSMaxNodePerUserLimit`: the limit's owner, resource and scope, and what would end the wait."""
    match = _LIMIT.fullmatch(reason)
    if match is None:
        return ""
    account = f"the account {job.account or 'of the job'}"
    owner, key = (
        (account, "run.account") if match["owner"] == "Assoc" else (f"the QOS {job.qos or 'of the job'}", "run.qos")
    )
    resource, minutes, share = _WHAT[match["what"]], match["minutes"], match["share"]
    if minutes:
        resource = f"{resource.removesuffix('s')} minutes"
    is_many = resource.endswith("s")
    if match["scope"] == "Min":
        return f"{owner} is only for jobs with more {resource}; request more, or set another {key}"
    if match["scope"] == "Grp" and (minutes == "Minutes" or match["what"] == "Wall"):  # of past jobs too
        spent = "are used up, or too few are left" if is_many else "is used up, or too little is left"
        return (
            f"the {resource} that all jobs of {owner} may use together {spent}; the end of a job frees nothing, "
            f"only time does if the site lets usage decay; request less, or set another {key}"
        )
    if match["scope"] == "Grp":
        return f"all jobs of {owner} together are at their limit of {resource}; it starts when one of them ends"
    if share in ("PerJob", "PerNode") or match["what"] == "Wall":
        less, where = "fewer" if is_many else "less", " on one node" if share == "PerNode" else ""
        return f"{owner} allows a job {less} {resource}{where} than it requests; request less, or set another {key}"
    scope = {"PerUser": " per user", "PerAccount": " per account"}.get(share, "")
    ends = f"another job of {account}" if share == "PerAccount" else "another of your jobs"
    return f"{owner} allows no more {resource}{scope}; it starts when {ends} ends"


def _resources(job: JobRecord, cluster: SlurmState, now: float) -> str:
    room = room_for(job, cluster, now)
    needed = max(1, job.num_nodes)
    segment = _segment(job, cluster)
    if job.switches or segment:
        return _together(job, cluster, room, segment, now)
    where = f" of {len(room.nodes)} in {job.partition}" if job.partition else f" of {len(room.nodes)}"
    asked = hosts_of(job.required)
    named = f" ({', '.join(asked[:SHOWN_NODES])}{', …' if len(asked) > SHOWN_NODES else ''})" if asked else ""
    count = len(room.free)
    parts = [f"needs {_nodes(needed)}{named}{_of_kind(job)}; {count}{where} {'is' if count == 1 else 'are'} free"]
    when = _now_or_when(count >= needed, room.earliest(needed), job, now)
    return "; ".join([*parts, *_kept(room), *_missing(job, cluster), *when])


def _segment(job: JobRecord, cluster: SlurmState) -> int:
    """Return how many of its nodes must be in one block; 0 without a constraint. Slurm ignores a segment larger than
    the job, and uses several blocks for one larger than a block."""
    largest = max(map(len, cluster.leaves.values()), default=0)
    return job.segment_nodes if job.segment_nodes <= min(job.num_nodes, largest) else 0


def _together(job: JobRecord, cluster: SlurmState, room: Room, segment: int, now: float) -> str:
    """Explain a wait for nodes on one leaf or block: enough nodes may be free, but not together."""
    places = {name: usable for name, hosts in cluster.leaves.items() if (usable := hosts & room.nodes)}
    needed = max(1, job.num_nodes)
    counts = {name: len(hosts & room.free) for name, hosts in places.items()}
    if segment:
        place, kind = "block", " in one block" if segment == needed else f", each {segment} of them in one block"
        most, num_shown = len(places), needed // segment
    else:
        place, kind = "leaf", " on one leaf" if job.switches == 1 else f" on at most {job.switches} leaves"
        most = num_shown = job.switches
    best = sorted(counts, key=lambda name: (-counts[name], name))[:num_shown]
    there = " and ".join(f"{name} has {counts[name]} free" for name in best) or f"no {place} has usable nodes"
    parts = [f"needs {_nodes(needed)}{_of_kind(job)}{kind}; {there}"]
    patience = job.switch_wait_seconds
    if patience and patience < SECONDS_PER_DAY:
        parts.append(f"after {whole_duration(patience)} Slurm accepts any {_nodes(needed)}")
    is_enough = most_nodes(counts.values(), most, segment or 1) >= needed
    when = _now_or_when(is_enough, room.earliest(needed, places.values(), most, segment or 1), job, now)
    return "; ".join([*parts, *_kept(room), *_missing(job, cluster), *when])


def _priority(job: JobRecord, cluster: SlurmState, now: float) -> str:
    before = cluster.before(job)
    if not before:
        return "; ".join(["other jobs have precedence", *_when(None, job, now)])
    first = before[0]
    listed = ", ".join(item.id for item in before[:SHOWN_NODES]) + (", …" if len(before) > SHOWN_NODES else "")
    jobs = f"{len(before)} jobs have" if len(before) > 1 else "1 job has"
    needs = f"job {first.id} needs {_nodes(max(1, first.num_nodes))}"
    return "; ".join([f"{jobs} precedence in {job.partition} ({listed}); {needs}", *_when(None, job, now)])


def _dependency(job: JobRecord, cluster: SlurmState, now: float) -> str:
    jobs = {item.id: item for item in cluster.jobs}
    numbers = re.findall(r":(\d+(?:_\d+)?)", job.dependency)
    if not numbers:
        return f"waits for its dependency: {job.dependency or 'unknown'}"
    how = {
        "afterok": "to succeed",
        "afterany": "to end",
        "after": "to start",
        "afternotok": "to fail",
        "singleton": "to end",
    }.get(job.dependency.partition(":")[0], "")
    messages = []
    for number in numbers:
        other = jobs.get(number)
        state = "" if other is None else f", which is {other.state.lower()}"
        until = f" until {_clock(other.end, now)} at the latest" if other and other.end and not other.is_pending else ""
        messages.append(f"job {number}{state}{until}")
    suffix = f" {how}" if how and len(messages) == 1 and not jobs.get(numbers[0]) else ""
    return f"waits for {' and '.join(messages)}{suffix}"


def _not_available(job: JobRecord, cluster: SlurmState, now: float) -> str:
    asked = set(hosts_of(job.required))
    listed = re.search(r"UnavailableNodes:(\S+)", job.reason)
    # Slurm lists unavailable nodes of all partitions; those of other partitions do not matter for this job.
    there = in_partition(job, cluster)
    named = set(hosts_of(listed[1])) & {node.name for node in there} if listed else set()
    away = [node for node in there if node.is_away and (node.name in named or node.name in asked or not named)]
    if asked:
        away = [node for node in away if node.name in asked] or away
    parts = [f"needs {_nodes(max(1, job.num_nodes))}"]
    if away:
        parts.append(_away(away))
    elif named:
        parts.append(f"unavailable: {', '.join(sorted(named))}")
    reserved = [
        reservation
        for reservation in cluster.reservations
        if reservation.name != job.reservation
        and reservation.start
        and (reservation.end is None or reservation.end > now)
        and (named or {node.name for node in there}) & set(hosts_of(reservation.nodes))
    ]
    if not away and reserved:
        first = min(reserved, key=lambda item: item.start or 0.0)
        until = f" until {_clock(first.end, now)}" if first.end else ""
        parts.append(f"the reservation {first.name} holds nodes from {_clock(first.start, now)}{until}")
        if job.time_limit_seconds is not None and first.start and first.start > now:
            parts.append("a shorter run.time_limit may fit before it")
    return "; ".join([*parts, *_when(None, job, now)])


def _reservation(job: JobRecord, cluster: SlurmState, now: float) -> str:
    reserved = next((reservation for reservation in cluster.reservations if reservation.name == job.reservation), None)
    if reserved is None:
        return f"waits for its reservation {job.reservation}, which does not exist (yet)"
    if reserved.start and reserved.start > now:
        return f"waits for its reservation {reserved.name}, which starts {_clock(reserved.start, now)}"
    nodes = len(hosts_of(reserved.nodes))
    return f"waits for nodes of its reservation {reserved.name}, which has {nodes}" + (
        f" and ends {_clock(reserved.end, now)}" if reserved.end else ""
    )


def _begin_time(job: JobRecord, cluster: SlurmState, now: float) -> str:
    times = f"{job.restarts} time{'s' if job.restarts > 1 else ''}"
    again = f"was requeued {times} and " if job.restarts else ""
    if job.start and job.start > now:
        return f"{again}may start {_clock(job.start, now)}" + (" (Slurm pauses after a requeue)" if again else "")
    return f"{again}may start in a moment" if again else "its earliest start is in a moment"


def _time_limit(job: JobRecord, cluster: SlurmState, now: float) -> str:
    partition = next((item for item in cluster.partitions if item.name == job.partition), None)
    asked = whole_duration(job.time_limit_seconds) if job.time_limit_seconds else "no limit"
    allowed = f" {whole_duration(partition.max_seconds)}" if partition and partition.max_seconds else " less"
    return (
        f"requests {asked}, and the partition {job.partition} allows{allowed}; set a shorter run.time_limit (at its "
        "end the job saves and is requeued), or another run.partition"
    )


def _node_limit(job: JobRecord, cluster: SlurmState, now: float) -> str:
    partition = next((item for item in cluster.partitions if item.name == job.partition), None)
    there = in_partition(job, cluster)
    most = partition.max_nodes if partition and partition.max_nodes is not None else len(there)
    away = [node for node in there if node.is_away]
    allowed = f"the partition {job.partition} allows {most}" if most else f"the partition {job.partition} has too few"
    parts = [f"needs {_nodes(max(1, job.num_nodes))}, and {allowed}"]
    return "; ".join([*parts, *([_away(away)] if away else [])])


_EXPLANATIONS: dict[str, Callable[[JobRecord, SlurmState, float], str]] = {
    "Resources": _resources,
    "Priority": _priority,
    "Dependency": _dependency,
    "ReqNodeNotAvail": _not_available,
    "Nodes_required_for_job_are_DOWN": _not_available,
    "Reservation": _reservation,
    "BeginTime": _begin_time,
    "PartitionTimeLimit": _time_limit,
    "PartitionNodeLimit": _node_limit,
}


def _fixed_sentence(job: JobRecord, reason: str) -> str:
    """Return the table's sentence for a reason, filled with the job's values."""
    entry = _table().get(reason)
    if entry is None:
        return ""
    words = {
        "job": job.id,
        "partition": job.partition or "of the job",
        "account": job.account or "of the job",
        "qos": job.qos or "of the job",
        "reservation": job.reservation or "of the job",
        "licenses": job.licenses or "unknown",
        "dependency": job.dependency or "unknown",
        "nodes": job.num_nodes,
        "constraint": f" with {job.features}" if job.features else "",
    }
    sentence, remedy = str(entry["sentence"]), str(entry.get("remedy", ""))
    return "; ".join(part.format(**words) for part in (sentence, remedy) if part)


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(REASONS.read_text(encoding="utf-8"))


def _kept(room: Room) -> list[str]:
    """Return `g6, g7 are kept for job 890`: idle nodes that this job may not use."""
    messages = []
    for holder, names in room.kept.items():
        more = f" and {len(names) - SHOWN_NODES} more" if len(names) > SHOWN_NODES else ""
        messages.append(
            f"{', '.join(names[:SHOWN_NODES])}{more} {'is' if len(names) == 1 else 'are'} kept for {holder}"
        )
    return messages


def _missing(job: JobRecord, cluster: SlurmState) -> list[str]:
    """List unavailable nodes of the job's partition with their reasons, and nodes that it excludes."""
    away = [node for node in in_partition(job, cluster) if node.is_away]
    avoided = hosts_of(job.excluded)
    reasons = [_away(away)] if away else []
    return [*reasons, f"it excludes {', '.join(avoided[:SHOWN_NODES])}"] if avoided else reasons


def _away(nodes: Sequence[NodeRecord]) -> str:
    """Return `g3 is drained (hc: ecc row remap), 2 more are unavailable`."""
    messages = []
    for node in nodes[:SHOWN_NODES]:
        state = "drained" if "DRAIN" in node.states else "down" if "DOWN" in node.states else "unavailable"
        messages.append(f"{node.name} is {state}" + (f" ({node.reason})" if node.reason else ""))
    more = len(nodes) - SHOWN_NODES
    return ", ".join([*messages, *([f"{more} more {'is' if more == 1 else 'are'} unavailable"] if more > 0 else [])])


def _now_or_when(is_enough: bool, earliest: NodeRelease | None, job: JobRecord, now: float) -> list[str]:
    if is_enough:  # by node count: cores, memory or GRES may not fit, or Slurm has not evaluated it yet
        return ["that is enough, and Slurm has not started it yet", *_when(None, job, now)]
    return _when(earliest, job, now)


def _when(earliest: NodeRelease | None, job: JobRecord, now: float) -> list[str]:
    expected = job.start if job.start and job.start > now else None
    # Slurm knows the free part of shared nodes; here they count as busy.
    is_sooner = expected is not None and earliest is not None and expected < earliest.moment - RESOLUTION_SECONDS
    if earliest is not None and earliest.moment > now and not is_sooner:
        return [f"earliest {_clock(earliest.moment, now)} when {earliest.by} ends"]
    return [f"Slurm expects to start it {_clock(expected, now)}"] if expected else []


def _of_kind(job: JobRecord) -> str:
    return f" with {job.features}" if job.features else ""


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _clock(moment: float | None, now: float) -> str:
    """Format as `14:05`, with the date if it is neither today nor near."""
    if moment is None:
        return "at an unknown time"
    then = datetime.fromtimestamp(moment)
    is_near = abs(moment - now) < SECONDS_PER_DAY / 2 or then.date() == datetime.fromtimestamp(now).date()
    return then.strftime("%H:%M") if is_near else then.strftime("%d %b %H:%M")
