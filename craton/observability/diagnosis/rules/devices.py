"""Rules for GPUs: driver errors, missing GPUs, throttling, and wrong results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from craton.formatting import percent
from craton.infrastructure.probes import HEALTH_ACTIONS, recovery_action, xid_action, xid_facts
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotGpu, SnapshotNode, SnapshotXid
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Finding, Symptoms

COMPUTING = ("compute", "optimizer")
# Throttle reasons that mean a fault or heat; sw_power_cap is normal under full load.
HOT = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_slowdown", "hw_power_brake_slowdown")
FALLEN = (79,)
MEMORY = (48, 63, 64, 92, 94, 95, 140, 171, 172)
LINK = (74, 137, *range(144, 151), 155)
NEEDS_WORK = ("reset", "reboot", "replace")  # required before the next job runs there
OF_THE_PROGRAM = (8, 11, 13, 31, 32, 43, 69)  # a wrong address or index, unless the same GPU shows it under other jobs
AFTERMATH = (45, 154)  # 45: cleanup after another error; 154: the recovery action


def examine_devices(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    clocks = [gpu.sm_clock_mhz for node in snapshot.nodes for gpu in node.gpus if gpu.sm_clock_mhz and _works(gpu)]
    limits = [gpu.power_limit_watts for node in snapshot.nodes for gpu in node.gpus if gpu.power_limit_watts]
    peers = _Peers(
        statistics.median(clocks) if len(clocks) > 1 else None, statistics.median(limits) if limits else None
    )
    for node in snapshot.nodes:
        findings += _missing(node, symptoms)
        for gpu in node.gpus:
            findings += _errors(snapshot, symptoms, node, gpu)
            findings += _memory(snapshot, symptoms, node, gpu)
            findings += _speed(snapshot, symptoms, node, gpu, peers)
    findings += _computes_wrong(snapshot, symptoms)
    return findings


def _missing(node: SnapshotNode, symptoms: Symptoms) -> list[Finding]:
    if not node.gpus_known or node.expected_gpus is None or len(node.gpus) >= node.expected_gpus:
        return []
    message = f"{node.name} reports {len(node.gpus)} of {node.expected_gpus} GPUs"
    return finding(symptoms, "gpu_lost", message, ("dead", "hung", "slow"), node=node.name, base=0.95, is_risk=True)


def _errors(snapshot: Snapshot, symptoms: Symptoms, node: SnapshotNode, gpu: SnapshotGpu) -> list[Finding]:
    rank = snapshot.rank_on(node.name, gpu.index)
    card = _card(node, gpu, rank)
    findings: list[Finding] = []
    recent = [xid for xid in gpu.xids if _matters(xid, snapshot, symptoms)]
    wanted = next((xid.recovery for xid in reversed(recent) if xid.recovery), "") or gpu.recovery_action
    asks = wanted not in ("", "None", "none")
    for code in dict.fromkeys(xid.code for xid in recent if xid.code not in AFTERMATH):
        fact = xid_facts().get(code)
        health = recovery_action(wanted) if asks else _asked([xid for xid in recent if xid.code == code])
        name = fact.name if fact else "not in the XID table"
        times = sum(xid.code == code for xid in recent)
        moments = [xid.moment for xid in recent if xid.code == code and xid.moment is not None]
        moment = max(moments, default=None)
        message = f"{card} had XID {code} ({name})" + (f", {times} times" if times > 1 else "")
        evidence = [message, *([f"the driver requests: {wanted}"] if asks else []), *([fact.advice] if fact else [])]
        if code in OF_THE_PROGRAM:
            findings += finding(
                symptoms,
                "rank_failed",
                message,
                ("dead", "hung"),
                evidence=evidence,
                node=node.name,
                rank=rank,
                base=0.7,
                health=health,
                moment=moment,
            )
            continue
        if fact is not None and health == "observe" and code not in MEMORY:
            continue
        cause = _cause_of(code)
        base = 0.6 if fact is not None and health == "observe" else 0.97
        findings += finding(
            symptoms,
            cause,
            message,
            ("dead", "hung", "slow", "wrong") if cause in ("gpu_memory_error", "nvlink_errors") else ("dead", "hung"),
            evidence=evidence,
            node=node.name,
            rank=rank,
            base=base,
            is_risk=health in NEEDS_WORK,
            health=health,
            moment=moment,
            is_urgent=health in NEEDS_WORK and _has_spare(snapshot) and any(_broke(snapshot, at) for at in moments),
        )
    if asks and not findings:
        message = f"the driver requests `{wanted}` for {card}"
        findings += finding(
            symptoms,
            "gpu_error",
            message,
            ("dead", "hung", "slow"),
            node=node.name,
            rank=rank,
            base=0.9,
            is_risk=True,
            health=recovery_action(wanted),
        )
    return findings


def _asked(xids: Sequence[SnapshotXid]) -> str:
    """Return the most severe action that these XIDs require."""
    actions = [xid_action(xid.code, recovery=xid.recovery, is_fatal=xid.is_fatal) for xid in xids]
    return max(actions, key=HEALTH_ACTIONS.index)


def _cause_of(code: int) -> str:
    if code in FALLEN:
        return "gpu_lost"
    if code in MEMORY:
        return "gpu_memory_error"
    return "nvlink_errors" if code in LINK else "gpu_error"


def _matters(xid: SnapshotXid, snapshot: Snapshot, symptoms: Symptoms) -> bool:
    """Return whether an XID is recent: not from before the driver was reloaded or the previous generation began. The
    error that ended that generation is still on the GPU, and is reported once."""
    if xid.before_reload:
        return False
    if xid.moment is None:
        return True
    death, before = symptoms.first.moment, threshold("xid_before_seconds")
    if symptoms.condition == "dead" and death is not None:
        return xid.moment > death - before
    began, previous = snapshot.run.generation_began, snapshot.run.previous_began
    if began is None:
        return True
    return xid.moment >= (began - 60.0 if previous is None else min(previous, began - before))


def _broke(snapshot: Snapshot, moment: float) -> bool:
    """Return whether an event at this moment may have ended a generation."""
    before = threshold("xid_before_seconds")
    return any(
        recent_restart.broke_at - before <= moment <= recent_restart.moment
        for recent_restart in snapshot.run.recent_restarts
    )


def _has_spare(snapshot: Snapshot) -> bool:
    limit = threshold("heartbeat_lost_seconds")
    return any(
        node.agent_is_alive is not False and (node.heartbeat_age_seconds or 0.0) <= limit for node in snapshot.spares
    )


def _memory(snapshot: Snapshot, symptoms: Symptoms, node: SnapshotNode, gpu: SnapshotGpu) -> list[Finding]:
    rank = snapshot.rank_on(node.name, gpu.index)
    card = _card(node, gpu, rank)
    signs: list[tuple[str, float, str]] = []
    if gpu.uncorrectable_errors:
        message = f"{card} has {gpu.uncorrectable_errors} uncorrectable ECC errors"
        signs.append((message, 0.93, "reset"))
    if gpu.remap_failed:
        signs.append((f"{card} failed to remap a bad memory row", 0.9, "replace"))
    rate = gpu.correctable_errors_per_hour
    if rate is not None and rate > threshold("correctable_per_hour"):
        signs.append((f"{card} corrects {rate:.0f} ECC errors per hour", 0.6, "observe"))
    if gpu.remap_pending and signs:
        signs.append((f"{card} needs a reset to remap a row", 0.5, "reset"))
    if not signs:
        return []
    message, base, _ = max(signs, key=lambda sign: sign[1])
    return finding(
        symptoms,
        "gpu_memory_error",
        message,
        ("dead", "hung", "wrong"),
        evidence=[text for text, _, _ in signs],
        node=node.name,
        rank=rank,
        base=base,
        is_risk=True,
        health=next(action for action in reversed(HEALTH_ACTIONS) if action in [asked for _, _, asked in signs]),
    )


@dataclass(frozen=True)
class _Peers:
    """Medians of the GPUs of the run."""

    clock_mhz: float | None
    power_limit_watts: float | None


def _speed(
    snapshot: Snapshot, symptoms: Symptoms, node: SnapshotNode, gpu: SnapshotGpu, peers: _Peers
) -> list[Finding]:
    """Return the first of: throttled by heat or board, a lowered power limit, a low clock, a degraded PCIe link."""
    rank = snapshot.rank_on(node.name, gpu.index)
    card = _card(node, gpu, rank)
    clock = f" at {gpu.sm_clock_mhz:.0f} MHz" if gpu.sm_clock_mhz else ""
    against = f", the other GPUs at {peers.clock_mhz:.0f} MHz" if clock and peers.clock_mhz else ""
    alone = False
    base = 1.0
    phases: tuple[str, ...] = COMPUTING
    evidence: tuple[str, ...] = ()
    hot = [reason for reason in gpu.throttle or () if reason in HOT]
    share, limit = gpu.throttled_share or 0.0, gpu.power_limit_watts
    replays = gpu.pcie_replays_per_second or 0.0
    if hot or share > threshold("throttled_share"):
        heat = f" at {gpu.temperature_celsius:.0f} °C" if gpu.temperature_celsius else ""
        why = ", ".join(hot) or f"{percent(share)} of the last minutes"
        cause, message = "gpu_throttled", f"{card} is throttled ({why}){heat}"
        evidence = (message, f"it runs{clock}{against}") if clock else (message,)
        alone = share > threshold("throttled_share")
    elif limit and limit < (gpu.default_power_limit_watts or 0.0) * threshold("power_limit_ratio"):
        cause, message = (
            "gpu_power_capped",
            f"{card} is limited to {limit:.0f} W of its {gpu.default_power_limit_watts:.0f} W",
        )
        alone = limit < (peers.power_limit_watts or 0.0) * threshold("power_limit_ratio")
        base = 0.97 if alone else 0.85
    elif _works(gpu) and (gpu.sm_clock_mhz or math.inf) < (peers.clock_mhz or 0.0) * threshold("clock_ratio"):
        cause, message, base = "gpu_clock_low", f"{card} runs{clock}{against}", 0.93
    elif (_works(gpu) and (gpu.pcie_share or 1.0) < 1.0) or replays > threshold("pcie_replays_per_second"):
        again = f", {replays:.0f} replays per second" if replays else ""
        cause, message = "pcie_degraded", f"{card} has {percent(gpu.pcie_share or 1.0)} of its PCIe link width{again}"
        base, phases, alone = 0.85, (), (gpu.pcie_share or 1.0) < 1.0
    else:
        return []
    return finding(
        symptoms,
        cause,
        message,
        ("slow",),
        evidence=evidence,
        base=base,
        node=node.name,
        rank=rank,
        phases=phases,
        is_risk=alone,
    )


def _computes_wrong(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for symptom in symptoms.of("wrong"):
        if symptom.sign != "odd_rank":
            continue
        for number in symptom.ranks:
            rank = snapshot.rank(number)
            if rank is None:
                continue
            # A checksum is proof. A norm is a hint: one rank may have an unusual batch, router or expert for a while.
            is_proved = bool(rank.differs_from_copies)
            base = 0.5 if len(symptom.nodes) > 1 else 0.97 if is_proved else 0.6
            gpu = f"GPU {rank.gpu} on {rank.node}" if rank.gpu is not None else rank.node
            message = f"rank {number} computes different values than the others: {gpu} is suspect"
            findings += finding(
                symptoms,
                "gpu_computes_wrong",
                message,
                ("wrong",),
                evidence=symptom.evidence,
                node=rank.node,
                rank=number,
                base=base,
                health="" if is_proved else "observe",
            )
    return findings


def _works(gpu: SnapshotGpu) -> bool:
    """Return whether a GPU is busy: an idle one lowers its clock and its PCIe link."""
    return gpu.utilisation is None or gpu.utilisation > 0.5


def _card(node: SnapshotNode, gpu: SnapshotGpu, rank: int | None) -> str:
    return f"GPU {gpu.index} on {node.name}" + (f" (rank {rank})" if rank is not None else "")
