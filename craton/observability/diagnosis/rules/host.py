"""Rules for hosts: lost nodes, memory, CPU contention, and stopped or killed processes."""

from __future__ import annotations

import re
import signal

from craton.formatting import bandwidth, counted, percent, whole_duration
from craton.observability.diagnosis.rules.findings import finding, named
from craton.observability.diagnosis.rules.resources import more_work
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotHost, SnapshotNode, SnapshotRank
from craton.observability.diagnosis.symptoms import reported_losses
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Finding, Symptoms

KEEPER = re.compile(r"keeper of (\S+) ((?:was killed by|exited with) [\w ]+)")
ALL_WORK = ("data", "compute", "optimizer")
NO_WAIT_SHARE = 0.15  # of the runnable time of a rank's threads
WRONG_PLACE, SAME_SHARE = 0.3, 0.8  # weight of an explanation that holds for healthy ranks too; "the same load"
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # a process that has no handler for them is ended


def examine_host(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    result = [*_lost(snapshot, symptoms), *_lost_spares(snapshot, symptoms)]
    result += _keeper(snapshot, symptoms)
    result += [*_killed(snapshot, symptoms), *_stopped(snapshot, symptoms), *_clocks(snapshot, symptoms)]
    for node in snapshot.nodes:
        if node.host is not None:
            result += _processors(node, node.host, snapshot, symptoms)
            result += _memory(node, node.host, symptoms)
            result += _others(node, node.host, symptoms)
    return result


def memory_ran_out(snapshot: Snapshot, name: str) -> str:
    """Return the evidence that the kernel's OOM killer is active on this node; "": none."""
    node = snapshot.node(name)
    host = node.host if node else None
    if host is None:
        return ""
    if host.out_of_memory_kills:
        return f"the OOM killer of {name} recently killed {counted(host.out_of_memory_kills, 'process', 'processes')}"
    share = host.memory_available_share
    if share is not None and share < threshold("memory_available_share"):
        return f"{name} has {percent(share)} of its memory available"
    return ""


def _lost(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    limit = threshold("heartbeat_lost_seconds")
    lost = [
        node
        for node in snapshot.nodes
        if node.heartbeat_state in ("running", "spare")
        and ((node.heartbeat_age_seconds or 0.0) > limit or node.agent_is_alive is False)
        and not (snapshot.run.storage and node.agent_is_alive)  # heartbeats cannot be stored, and look old
    ]
    if stopped := [node for node in lost if node.stopped_agent is not None]:
        return [item for node in stopped for item in _stopped_agent(node, symptoms)]
    reported = reported_losses(snapshot) if symptoms.condition == "dead" else {}
    if not lost and not reported and symptoms.condition == "dead" and snapshot.run.state == "lost":
        message = snapshot.run.message.splitlines()[0] if snapshot.run.message else "no node sends a heartbeat"
        return finding(symptoms, "agents_gone", message, ("dead",), base=0.85)
    if not lost and not reported:
        return []
    if len(lost) == len(snapshot.nodes) and len(lost) > 1:
        age = min(node.heartbeat_age_seconds or 0.0 for node in lost)
        message = f"all {len(lost)} nodes stopped sending heartbeats, the last one {whole_duration(age)} ago"
        return finding(symptoms, "agents_gone", message, ("dead", "hung"), base=0.9)
    findings: list[Finding] = []
    for node in lost:
        if node.agent_is_alive is False:
            message = f"the agent of {node.name} is gone: its process ended without a report"
        else:
            message = f"{node.name} has sent no heartbeat for {whole_duration(node.heartbeat_age_seconds or 0.0)}"
        findings += finding(symptoms, "node_lost", message, ("dead", "hung"), node=node.name, base=0.97)
    for name, how in reported.items():
        if all(node.name != name for node in lost):
            findings += finding(symptoms, "node_lost", f"{name} was lost: {how}", ("dead",), node=name, base=0.97)
    return findings


def _stopped_agent(node: SnapshotNode, symptoms: Symptoms) -> list[Finding]:
    message = (
        f"the agent of {node.name} (process {node.stopped_agent}) is stopped by a signal: "
        f"`kill -CONT {node.stopped_agent}` continues it"
    )
    return finding(symptoms, "agent_stopped", message, ("dead", "hung"), node=node.name, base=1.0)


def _lost_spares(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Report lost spare nodes, which show no symptom before they are needed."""
    findings: list[Finding] = []
    for node in snapshot.spares:
        age = node.heartbeat_age_seconds or 0.0
        if age <= threshold("heartbeat_lost_seconds") and node.agent_is_alive is not False:
            continue
        gone = "its agent is gone" if node.agent_is_alive is False else f"no heartbeat for {whole_duration(age)}"
        message = f"the spare {node.name} is lost: {gone}"
        findings += finding(symptoms, "spare_lost", message, (), node=node.name, base=0.95, is_risk=True)
    return findings


def _keeper(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Explain a run that ended because a keeper, which holds checkpoints in memory, is gone."""
    match = KEEPER.search(snapshot.run.message)
    if match is None or symptoms.condition != "dead":
        return []
    memory = memory_ran_out(snapshot, match[1]) if "SIGKILL" in match[2] else ""
    message = f"the keeper of {match[1]} {match[2]}" + (f": {memory}" if memory else "")
    cause = "out_of_memory" if memory else "keeper_failed"
    return finding(symptoms, cause, message, ("dead",), node=match[1], base=0.95)


def _killed(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Explain ranks that a signal ended: by the OOM killer if there is evidence of it, else by an unknown sender."""
    findings: list[Finding] = []
    for symptom in symptoms.of("dead", "hung"):
        for number in symptom.ranks if symptom.sign not in ("hung", "stopped") else ():
            rank = snapshot.rank(number)
            if rank is None:
                continue
            findings += _warned(rank, symptoms)
            if rank.exit_code not in (*KILLED, *ENDED):
                continue
            name = "SIGKILL" if rank.exit_code in KILLED else "a termination signal"
            during = f" in phase {rank.ended_in}" if rank.ended_in else ""
            message = f"rank {number} on {rank.node} was killed by {name}{during}"
            memory = memory_ran_out(snapshot, rank.node) if rank.exit_code in KILLED else ""
            if memory:
                findings += finding(
                    symptoms,
                    "out_of_memory",
                    f"{message}: {memory}",
                    ("dead", "hung"),
                    evidence=[message, memory],
                    node=rank.node,
                    rank=number,
                    base=0.97,
                )
            else:
                findings += finding(
                    symptoms, "rank_killed", message, ("dead", "hung"), node=rank.node, rank=number, base=0.97
                )
    return findings


def _warned(rank: SnapshotRank, symptoms: Symptoms) -> list[Finding]:
    """Explain a rank that a signal ended with which schedulers and operators warn a program."""
    code = rank.exit_code or 0
    found = next((item for item in WARNINGS if code in (-item, 128 + item)), None)
    if found is None:
        return []
    message = f"rank {rank.rank} on {rank.node} was ended by {found.name} from another process: it had no handler"
    return finding(symptoms, "warning_signal", message, ("dead", "hung"), node=rank.node, rank=rank.rank, base=0.95)


def _stopped(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for symptom in symptoms.of("dead"):
        for number, node in zip(symptom.ranks, symptom.nodes, strict=False) if symptom.sign == "stopped" else ():
            message = symptom.sentence.splitlines()[0]
            findings += finding(symptoms, "rank_stopped", message, ("dead",), node=node, rank=number, base=0.97)
    for symptom in symptoms.of("stopped"):
        for number in symptom.ranks:
            node = rank.node if (rank := snapshot.rank(number)) is not None else ""
            message = f"rank {number} on {node} received SIGTERM, and its agent did not send it"
            findings += finding(symptoms, "rank_terminated", message, ("stopped",), node=node, rank=number, base=0.97)
    stopped = [rank for rank in snapshot.ranks if rank.is_stopped or rank.process_state == "T"]
    for rank in stopped:
        message = f"rank {rank.rank} on {rank.node} is stopped by a signal (SIGSTOP)"
        message += "; all other ranks wait for it" if snapshot.run.kind != "command" else ""
        evidence = [
            message,
            *([f"stopped: {named([item.rank for item in stopped], 'rank ')}"] if len(stopped) > 1 else []),
        ]
        findings += finding(
            symptoms, "rank_stopped", message, ("hung",), evidence=evidence, node=rank.node, rank=rank.rank, base=1.0
        )
    return findings


def _processors(node: SnapshotNode, host: SnapshotHost, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    steal = host.steal_share or 0.0
    if steal > threshold("steal_share"):
        message = f"the hypervisor of {node.name} takes {percent(steal)} of its CPU time (steal)"
        findings += finding(
            symptoms, "processor_stolen", message, ("slow",), node=node.name, base=0.95, phases=ALL_WORK
        )
    foreign = host.foreign_processor_share or 0.0
    pressure = host.processor_pressure or 0.0
    crowd = host.load / host.processors if host.load is not None and host.processors else 0.0
    signs = []
    if foreign > threshold("foreign_processor_share"):
        signs.append(f"processes outside the run use {percent(foreign)} of the CPUs of {node.name}")
    if pressure > threshold("processor_pressure"):
        signs.append(f"processes on {node.name} wait for a CPU {percent(pressure)} of the time (PSI)")
    if crowd > threshold("load_ratio"):
        signs.append(f"the load of {node.name} is {host.load:.0f} on {host.processors} CPUs")
    if signs:
        # Ranks that compute on CPUs use them fully: that alone is not a fault.
        is_usual = snapshot.run.is_accelerated is False and foreign <= threshold("foreign_processor_share")
        base = 0.45 if is_usual else 0.95 if len(signs) > 1 or foreign > threshold("foreign_processor_share") else 0.8
        if _hurts_others_too(node, host, snapshot, symptoms):
            base *= WRONG_PLACE
        waited = [rank.resources.waited_share for rank in snapshot.ranks if rank.node == node.name and rank.resources]
        if waited and max(waited) < NO_WAIT_SHARE:
            base *= WRONG_PLACE  # the ranks get all the CPU time they want
        elif _compute_more(node, snapshot) or more_work(snapshot, snapshot.ranks):
            base *= WRONG_PLACE
        # Data loaders of GPU ranks starve first; ranks on CPUs would compute more slowly too.
        phases: tuple[str, ...] = ALL_WORK
        if snapshot.run.is_accelerated is False:
            does_collectives = bool(waited) and max(waited) > threshold("waited_share")
            phases = ("compute", "optimizer", *(("communication",) if does_collectives else ()))
        findings += finding(
            symptoms,
            "processor_contention",
            signs[0],
            ("slow",),
            evidence=signs,
            node=node.name,
            base=base,
            phases=phases,
        )
    return findings


def _compute_more(node: SnapshotNode, snapshot: Snapshot) -> bool:
    """Return whether every rank of a node computes so much longer than before that waiting for a CPU explains little of
    it: who waits for half of the time takes twice as long."""
    unexplained = [
        ratio * (1.0 - rank.resources.waited_share)
        for rank in snapshot.ranks
        if rank.node == node.name and rank.resources and (ratio := _slowdown(rank)) is not None
    ]
    return bool(unexplained) and min(unexplained) > threshold("unexplained_slowdown")


def _slowdown(rank: SnapshotRank) -> float | None:
    now, before = rank.recent.get("compute"), rank.earlier.get("compute")
    return now / before if now and before else None


def _hurts_others_too(node: SnapshotNode, host: SnapshotHost, snapshot: Snapshot, symptoms: Symptoms) -> bool:
    """Return whether healthy ranks, here or on another node, share the same load: then it explains nothing."""
    for symptom in symptoms.of("slow"):
        if not symptom.ranks or node.name not in symptom.nodes:
            continue
        own = [rank.rank for rank in snapshot.ranks if rank.node == node.name]
        if 2 * len(set(own) & set(symptom.ranks)) <= len(own):
            return True
        for other in snapshot.nodes:
            crowd = other.host.processor_pressure if other.host is not None else None
            if other.name not in symptom.nodes and crowd and crowd >= SAME_SHARE * (host.processor_pressure or 0.0):
                return True
    return False


def _memory(node: SnapshotNode, host: SnapshotHost, symptoms: Symptoms) -> list[Finding]:
    signs = []
    if (host.memory_pressure or 0.0) > threshold("pressure_full"):
        signs.append(f"{node.name} stalls on memory {percent(host.memory_pressure)} of the time (PSI)")
    if (host.swapped_bytes_per_second or 0.0) > threshold("swapped_bytes_per_second"):
        signs.append(f"{node.name} swaps {bandwidth(host.swapped_bytes_per_second or 0.0)}")
    left = host.memory_available_share
    if left is not None and left > threshold("ample_memory_share"):
        signs = [sign for sign in signs if "swaps" in sign]  # a stall on memory that is not short has another reason
    if left is not None and left < threshold("memory_available_share"):
        signs.append(f"{node.name} has {percent(left)} of its memory available")
    if not signs:
        return []
    return finding(
        symptoms,
        "memory_pressure",
        signs[0],
        ("slow", "hung"),
        evidence=signs,
        node=node.name,
        base=0.93 if len(signs) > 1 else 0.85,
        is_risk=left is not None and left < threshold("memory_available_share"),
    )


def _clocks(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Report nodes whose wall clock is off, by their heartbeats; if all are off alike, this machine's may be."""
    limit = threshold("clock_jump_seconds")
    offsets = {node.name: node.clock_offset_seconds for node in snapshot.nodes if node.clock_offset_seconds is not None}
    off = {name: offset for name, offset in offsets.items() if abs(offset) > limit}
    if not off:
        return []
    if len(off) == len(offsets) > 1 and max(off.values()) - min(off.values()) <= limit:
        ahead = _ahead(next(iter(off.values())))
        message = f"the clocks of all nodes are {ahead} this machine's: one of them jumped, or none is synchronized"
        return finding(symptoms, "clock_off", message, (), base=0.95, is_risk=True)
    findings: list[Finding] = []
    for name, offset in off.items():
        others = "this machine's" if len(offsets) == 1 else "those of the other nodes"
        message = f"the clock of {name} is {_ahead(offset)} {others}"
        findings += finding(symptoms, "clock_off", message, (), node=name, base=1.0, is_risk=True)
    return findings


def _ahead(offset: float) -> str:
    return f"{whole_duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'}"


def _others(node: SnapshotNode, host: SnapshotHost, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    if (host.shared_memory_full_share or 0.0) >= threshold("full_share"):
        message = f"/dev/shm of {node.name} is {percent(host.shared_memory_full_share)} full"
        findings += finding(
            symptoms, "shared_memory_full", message, ("dead", "hung"), node=node.name, base=0.9, is_risk=True
        )
    if host.blocked_processes:
        message = f"processes on {node.name} stay in uninterruptible sleep (state D): {named(host.blocked_processes)}"
        # Of slow ranks it is known whether they sleep themselves; these may be processes of others.
        findings += finding(symptoms, "process_blocked", message, ("hung",), node=node.name, base=0.6)
    offset = host.clock_offset_seconds
    if offset is not None and abs(offset) > threshold("clock_offset_seconds"):
        message = f"the clock of {node.name} is {offset:+.1f} s off"
        findings += finding(symptoms, "clock_off", message, (), node=node.name, base=0.6, is_risk=True)
    return findings
