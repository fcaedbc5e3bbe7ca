"""Rules for the resources of the processes of ranks: CPU quotas, affinity, priority, other processes, memory limits.

Agents read it from the kernel for every rank. A limit that holds for all ranks alike has no victim; one that only some
ranks have explains why the others wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from craton.formatting import counted, duration, memory, percent
from craton.observability.diagnosis.rules.findings import finding, named
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotRank
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Condition, Finding, Symptoms
from craton.telemetry.node import ProcessResources


def examine_resources(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    ranks = [(rank, rank.resources) for rank in snapshot.ranks if rank.resources is not None and rank.is_alive]
    if not ranks:
        return []
    return [
        *_paused(ranks, symptoms),
        *_throttled(ranks, snapshot, symptoms),
        *_few_cpus(ranks, symptoms),
        *_low_priority(ranks, symptoms),
        *_own_threads(ranks, symptoms),
        *_waits(ranks, snapshot, symptoms),
        *_memory(ranks, symptoms),
        *_waits_for_memory(ranks, symptoms),
        *_waits_for_files(ranks, symptoms),
    ]


OTHER_REASON = 0.3  # weight of waiting for a CPU where more work explains as much
FEW_SHARE = 0.5  # of the CPUs of other ranks or of the machine
COMPUTING = ("compute", "optimizer", "communication")  # phases in which a rank wants its CPUs
READING = ("data", "checkpoint", "compute")  # a custom source or model may read wherever it is called
RankResources = Sequence[tuple[SnapshotRank, ProcessResources]]


def _paused(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    hit = [(rank, resources) for rank, resources in ranks if resources.stopped_share > threshold("stopped_share")]
    if not hit:
        return []
    worst = max(resources.stopped_share for _, resources in hit)
    message = f"signals stop {_who(hit)} again and again: it was stopped in {percent(worst)} of the looks at it"
    return _findings(hit, ranks, symptoms, "rank_paused", message, 1.1)


def _throttled(ranks: RankResources, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    hit = [
        (rank, resources) for rank, resources in ranks if resources.throttled_share > threshold("cpu_throttled_share")
    ]
    if not hit:
        return []
    worst = max((resources for _, resources in hit), key=lambda resources: resources.throttled_share)
    quota = f" ({worst.quota_cpus:g} CPUs)" if worst.quota_cpus else ""
    message = (
        f"the CPU quota{quota} of {_who(hit)} is used up in {percent(worst.throttled_share)} of its periods "
        "(throttling by the kernel)"
    )
    is_risk = snapshot.run.is_accelerated is False and worst.throttled_share > threshold("cpu_throttled_risk")
    return _findings(hit, ranks, symptoms, "cpu_throttled", message, 1.05, is_risk=is_risk, explains=("slow", "hung"))


def _few_cpus(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    """Blame an affinity mask where threads wait for its CPUs: one that is much smaller than those of other ranks, as a
    share of their machines, or one that all ranks have."""
    limit = threshold("waited_share")
    shares = {rank.rank: resources.cpus / resources.node_cpus for rank, resources in ranks if resources.node_cpus}
    waiting = [(rank, resources) for rank, resources in ranks if resources.waited_share > limit and rank.rank in shares]
    hit = [(rank, resources) for rank, resources in waiting if shares[rank.rank] <= FEW_SHARE * max(shares.values())]
    base = 1.0
    if not hit:
        hit, base = [(rank, resources) for rank, resources in waiting if shares[rank.rank] <= FEW_SHARE], 0.6
    if not hit:
        return []
    worst = max((resources for _, resources in hit), key=lambda resources: resources.waited_share)
    message = (
        f"the CPU affinity of {_who(hit)} allows {worst.cpus} of {counted(worst.node_cpus, 'CPU')}, and threads wait "
        f"for a CPU {percent(worst.waited_share)} of their time"
    )
    return _findings(hit, ranks, symptoms, "cpu_affinity", message, base, is_risk=len(hit) < len(ranks) and base == 1.0)


def _low_priority(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    highest = min(resources.niceness for _, resources in ranks)
    hit = [
        (rank, resources)
        for rank, resources in ranks
        if resources.niceness > max(0, highest)
        or (resources.niceness > 0 and resources.waited_share > threshold("waited_share"))
    ]
    if not hit:
        return []
    worst = max((resources for _, resources in hit), key=lambda resources: resources.niceness)
    message = f"the CPU priority of {_who(hit)} is low (nice {worst.niceness}): other processes run first"
    if worst.waited_share > threshold("waited_share"):
        message += f", and threads wait for a CPU {percent(worst.waited_share)} of their time"
    base = 1.05 if worst.waited_share > threshold("waited_share") else 0.8
    return _findings(hit, ranks, symptoms, "cpu_priority_low", message, base, is_risk=_is_odd(hit, ranks))


def _own_threads(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    """Blame the program where threads of one rank alone want more CPUs than it has, and wait for each other."""
    hit = [
        (rank, resources)
        for rank, resources in ranks
        if resources.waited_share > threshold("waited_share")
        and resources.cpus
        and resources.wanted_cpus > threshold("wanted_cpus_ratio") * resources.cpus
    ]
    if not hit:
        return []
    worst = max((resources for _, resources in hit), key=lambda resources: resources.wanted_cpus)
    message = (
        f"the threads and child processes of {_who(hit)} want {worst.wanted_cpus:.1f} CPUs at a time and may use "
        f"{worst.cpus}: they wait for each other {percent(worst.waited_share)} of their time"
    )
    return _findings(hit, ranks, symptoms, "too_many_threads", message, 1.05)


def _waits(ranks: RankResources, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Blame other processes where only some ranks wait for a CPU; where all do, the rules for hosts know more."""
    shares = sorted(resources.waited_share for _, resources in ranks)
    hit = [
        (rank, resources)
        for rank, resources in ranks
        if resources.waited_share > max(threshold("waited_share"), threshold("waited_ratio") * shares[0])
        and resources.throttled_share <= threshold("cpu_throttled_share")
    ]
    if not hit or len(hit) == len(ranks):
        return []
    worst = max(resources.waited_share for _, resources in hit)
    message = (
        f"threads of {_who(hit)} wait for a CPU {percent(worst)} of their time, those of other ranks "
        f"{percent(shares[0])}"
    )
    base = 0.95 if not more_work(snapshot, [rank for rank, _ in hit]) else OTHER_REASON * 0.95
    return _findings(hit, ranks, symptoms, "processor_contention", message, base, phases=COMPUTING)


def more_work(snapshot: Snapshot, ranks: Sequence[SnapshotRank]) -> str:
    """Return how much more CPU time a step of these ranks takes than before, in words; empty: not much more, or not
    known. A rank that waits for a CPU takes more time for a step, and hardly more CPU time: more of that is more work.
    Work must explain at least as much of the slowdown as everything else. Ranks on GPUs poll them: a longer wait uses
    more CPU time, and says nothing about work."""
    if snapshot.run.is_accelerated:
        return ""
    limit = threshold("more_work_ratio")
    for rank in ranks:
        now, before = rank.recent.get("step"), rank.earlier.get("step")
        used = rank.resources
        if used is None or not used.step_cpu_seconds or not now or not before:
            continue
        # Where a step was too short for a measurement, it took at most all CPUs for its whole time.
        most = before * max(1, used.cpus)
        usual = min(used.usual_step_cpu_seconds or most, most)
        if used.step_cpu_seconds / usual > max(limit, math.sqrt(now / before)):
            return (
                f"a step of rank {rank.rank} takes {duration(used.step_cpu_seconds)} of CPU time, "
                f"{duration(usual)}{'' if usual == used.usual_step_cpu_seconds else ' at most'} before"
            )
    return ""


def _memory(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    full = [(rank, resources) for rank, resources in ranks if resources.memory_share > threshold("memory_limit_share")]
    if not full:
        return []
    _, worst = max(full, key=lambda entry: entry[1].memory_share)
    hit = [entry for entry in full if entry[1].memory_limit_bytes == worst.memory_limit_bytes]
    if len(hit) > 1:  # one cgroup may hold several ranks: the one that stands out
        largest, second = sorted(hit, key=lambda entry: -entry[1].memory_bytes)[:2]
        if largest[1].memory_bytes > threshold("memory_ratio") * second[1].memory_bytes:
            hit = [largest]
    shown = max((resources for _, resources in hit), key=lambda resources: resources.memory_share)
    own = shown.memory_bytes if len(hit) == 1 else 0
    used = f", {memory(own)} of it by that process" if 0 < own <= shown.memory_limit_bytes else ""
    message = (
        f"the cgroup of {_who(hit)} uses {percent(shown.memory_share)} of its memory limit "
        f"({memory(shown.memory_limit_bytes)}{used}): beyond it the kernel kills a process"
    )
    return _findings(hit, ranks, symptoms, "memory_limit_near", message, 0.95, is_risk=True)


def _waits_for_memory(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    """Blame a memory limit at which threads wait for pages that the kernel has to free, or that it dropped."""
    limit = threshold("memory_wait_share")
    hit = [
        (rank, resources)
        for rank, resources in ranks
        if resources.memory_limit_bytes and (resources.memory_wait_share > limit or _reads_again(resources))
    ]
    if not hit:
        return []
    worst = max((resources for _, resources in hit), key=lambda resources: resources.refaults_per_second)
    message = f"the cgroup of {_who(hit)} is at its memory limit ({memory(worst.memory_limit_bytes)})"
    if worst.refaults_per_second > threshold("refaults_per_second"):
        message += (
            f": {worst.refaults_per_second:,.0f} pages a second leave the page cache and are read from disk again"
        )
    else:
        message += ", and its threads wait while the kernel frees pages"
    return _findings(hit, ranks, symptoms, "memory_limit_reached", message, 1.1, explains=("slow", "hung"))


def _reads_again(resources: ProcessResources) -> bool:
    """Return whether a rank waits for pages that its memory limit had forced out."""
    is_often = resources.refaults_per_second > threshold("refaults_per_second")
    return is_often and resources.file_wait_share > threshold("refault_wait_share")


def _waits_for_files(ranks: RankResources, symptoms: Symptoms) -> list[Finding]:
    """Blame storage where threads of ranks sleep in the kernel for a disk or a network file system."""
    hit = [(rank, resources) for rank, resources in ranks if resources.file_wait_share > threshold("file_wait_share")]
    least = min(resources.file_wait_share for _, resources in ranks)
    odd = [entry for entry in hit if entry[1].file_wait_share > threshold("file_wait_ratio") * least]
    hit = odd or hit
    if not hit:
        return []
    worst = max(resources.file_wait_share for _, resources in hit)
    message = f"threads of {_who(hit)} sleep in the kernel for a file or disk {percent(worst)} of the time"
    # Every start reads files; one that does nothing else for long has a slow disk.
    is_slow_start = min(resources.idle_seconds for _, resources in hit) > threshold("start_idle_seconds")
    explains: tuple[Condition, ...] = ("slow", "starting") if is_slow_start else ("slow",)
    return _findings(hit, ranks, symptoms, "storage_slow", message, 0.97, phases=READING, explains=explains)


def _findings(
    hit: RankResources,
    ranks: RankResources,
    symptoms: Symptoms,
    cause: str,
    message: str,
    base: float,
    is_risk: bool = False,
    phases: tuple[str, ...] = (),
    explains: tuple[Condition, ...] = ("slow",),
) -> list[Finding]:
    nodes = list(dict.fromkeys(rank.node for rank, _ in hit))
    are_all = len(hit) == len(ranks)
    return finding(
        symptoms,
        cause,
        message,
        explains,
        node=nodes[0] if len(nodes) == 1 and not (are_all and _num_nodes(ranks) > 1) else "",
        rank=hit[0][0].rank if len(hit) == 1 and len(ranks) > 1 else None,
        base=base,
        is_risk=is_risk,
        phases=phases,
    )


def _is_odd(hit: RankResources, ranks: RankResources) -> bool:
    """Return whether only some ranks are limited, and wait for a CPU: others wait for them, however slow that is."""
    waits = max(resources.waited_share for _, resources in hit) > threshold("waited_share")
    return waits and len(hit) < len(ranks)


def _num_nodes(ranks: RankResources) -> int:
    return len({rank.node for rank, _ in ranks})


def _who(hit: RankResources) -> str:
    if len(hit) == 1:
        rank = hit[0][0]
        return f"rank {rank.rank} on {rank.node}"
    return named([rank.rank for rank, _ in hit], "ranks ")
