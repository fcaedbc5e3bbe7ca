"""Rules for file systems (stalled, slow, full, read-only) and checkpoints (failing, slow, overdue)."""

from __future__ import annotations

import re
from collections.abc import Callable

from craton.formatting import counted, duration, percent, setting, whole_duration
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotMount, SnapshotNode, SnapshotTier
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.used_mounts import is_under, is_used
from craton.observability.diagnosis.verdict import UNSAVED, Finding, Symptom, Symptoms
from craton.telemetry.node import WAITS_FOR_FILES

FILES = ("data", "checkpoint")
READ_ONLY = re.compile(r"Read-only file system|Errno 30")


def examine_storage(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    if symptoms.signed(UNSAVED):
        findings += finding(symptoms, "state_unsaved", snapshot.run.unsaved, ("waiting",))
    used = [(node, mount) for node in snapshot.nodes for mount in node.mounts if is_used(mount, snapshot.run)]
    for path in dict.fromkeys(mount.path for _, mount in used):
        mounts_here = [(node, mount) for node, mount in used if mount.path == path]
        findings += _mount(path, mounts_here, snapshot, symptoms)
    findings += _run_directory(snapshot, symptoms)
    for tier in snapshot.tiers:
        findings += _tier(tier, snapshot, symptoms)
    findings += _blocked(snapshot, symptoms)
    if not any(item.layer == "storage" and not item.about.is_symptom for item in findings):
        for symptom in symptoms.of("slow"):
            findings += _slow_phase(symptom, snapshot, symptoms)
    return findings


def _run_directory(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Report a problem of the run directory's file system, seen by the agents or from here."""
    problem = snapshot.run.storage
    if not problem:
        return []
    is_locked = "is read-only" in problem
    cause = (
        "storage_read_only" if is_locked else "storage_stalled" if "cannot be reached" in problem else "storage_full"
    )
    return finding(symptoms, cause, problem, ("dead", "hung"), base=0.98, is_risk=True)


def _mount(
    path: str, mounts: list[tuple[SnapshotNode, SnapshotMount]], snapshot: Snapshot, symptoms: Symptoms
) -> list[Finding]:
    """Check one file system on all nodes; a fault seen by some nodes only belongs to these nodes."""
    findings: list[Finding] = []
    kind = mounts[0][1].kind

    def where(bad: list[SnapshotNode]) -> tuple[str, str]:
        if len(bad) == len(mounts) and len(mounts) > 1:
            return "", f"{path} ({kind})" if kind else path
        return (bad[0].name if len(bad) == 1 and len(snapshot.nodes) > 1 else ""), f"{path} on {bad[0].name}"

    stalled = [node for node, mount in mounts if mount.is_stalled]
    if stalled:
        node, name = where(stalled)
        message = f"{name} does not respond"
        findings += finding(
            symptoms,
            "storage_stalled",
            message,
            ("hung", "slow", "dead"),
            node=node,
            base=0.97,
            phases=FILES,
            is_risk=True,
        )
    full = [
        (node, mount)
        for node, mount in mounts
        if max(mount.full_share or 0.0, mount.inodes_full_share or 0.0) >= threshold("full_share")
    ]
    if full:
        node, name = where([entry for entry, _ in full])
        mount = full[0][1]
        part = "its inodes" if (mount.inodes_full_share or 0.0) > (mount.full_share or 0.0) else "it"
        share = max(mount.full_share or 0.0, mount.inodes_full_share or 0.0)
        message = f"{name} is full: {percent(share)} of {part} {'are' if part != 'it' else 'is'} used"
        base = 0.9 if share >= 0.995 or _save_failed(snapshot) else 0.75
        findings += finding(symptoms, "storage_full", message, ("dead", "hung"), node=node, base=base, is_risk=True)
    locked = [node for node, mount in mounts if mount.is_read_only and _is_written(mount, snapshot)]
    if locked:
        node, name = where(locked)
        message = f"{name} is read-only"
        findings += finding(
            symptoms, "storage_read_only", message, ("dead", "hung"), node=node, base=0.93, is_risk=True
        )
    if not stalled:
        findings += _slow_mount(mounts, where, symptoms)
    short = [
        (node, mount)
        for node, mount in mounts
        if mount.interfaces is not None and mount.expected_interfaces and mount.interfaces < mount.expected_interfaces
    ]
    if short:
        node, name = where([item for item, _ in short])
        mount = short[0][1]
        message = f"{name} uses {mount.interfaces} of {mount.expected_interfaces} network interfaces"
        findings += finding(
            symptoms, "lustre_interfaces_missing", message, ("slow",), node=node, base=0.88, phases=FILES, is_risk=True
        )
    return findings


def _is_written(mount: SnapshotMount, snapshot: Snapshot) -> bool:
    """Return whether the run writes there: by its paths, or by a save that failed on a read-only file system."""
    if mount.holds:
        return bool({"run", "checkpoints"} & set(mount.holds))
    return any(READ_ONLY.search(tier.reason) for tier in snapshot.tiers if tier.failures)


def _slow_mount(
    mounts: list[tuple[SnapshotNode, SnapshotMount]],
    where: Callable[[list[SnapshotNode]], tuple[str, str]],
    symptoms: Symptoms,
) -> list[Finding]:
    slow = [(node, mount, text) for node, mount in mounts if (text := _slowness(mount))]
    if not slow:
        return []
    node, name = where([item for item, _, _ in slow])
    message = f"{name} is slow: {slow[0][2]}"
    base = 0.75 if "busy" in slow[0][2] else 0.95
    return finding(symptoms, "storage_slow", message, ("slow", "hung"), node=node, base=base, phases=FILES)


def _slowness(mount: SnapshotMount) -> str:
    for operation, now, usual, limit in (
        ("an operation", mount.operation_seconds, mount.usual_operation_seconds, threshold("operation_seconds")),
        ("an open or stat", mount.metadata_seconds, mount.usual_metadata_seconds, threshold("metadata_seconds")),
    ):
        if now is None:
            continue
        if usual and now > usual * threshold("storage_ratio") and now > limit / 10.0:
            return f"{operation} takes {duration(now)}, usually {duration(usual)}"
        if now > limit:
            return f"{operation} takes {duration(now)}"
    if (mount.busy_share or 0.0) > threshold("disk_busy_share"):
        return f"its disk is busy {percent(mount.busy_share)} of the time"
    return ""


def _tier(tier: SnapshotTier, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    if tier.failures >= threshold("failures_in_a_row"):
        why = f": {tier.reason}" if tier.reason else ""
        message = f"the last {counted(tier.failures, 'checkpoint')} of tier {tier.tier} failed{why}"
        return finding(symptoms, "checkpoint_failing", message, ("dead",), base=0.9, is_risk=True)
    ratio = threshold("checkpoint_ratio")
    took, usual = tier.last_seconds, tier.usual_seconds
    rate, usual_rate = tier.bytes_per_second, tier.usual_bytes_per_second
    is_slow = bool(took and usual and took > ratio * usual and took - usual > 1.0)
    is_slow |= bool(rate and usual_rate and rate * ratio < usual_rate)
    if is_slow:
        message = f"the last save to tier {tier.tier} took {duration(took or 0.0)}" + (
            f", usually {duration(usual)}" if usual else ""
        )
        evidence = [
            message,
            *([f"{tier.skipped} later saves were skipped because it was still running"] if tier.skipped else []),
        ]
        return finding(
            symptoms,
            "checkpoint_slow",
            message,
            ("slow", "hung"),
            evidence=evidence,
            base=0.92,
            phases=("checkpoint",),
            # Slow background saves cost nothing until one is still running when the next is due.
            is_risk=tier.skipped >= threshold("failures_in_a_row")
            or (tier.interval_seconds is not None and (took or 0.0) > tier.interval_seconds),
        )
    return _too_often(tier, symptoms) or _stale(tier, snapshot, symptoms)


def _too_often(tier: SnapshotTier, symptoms: Symptoms) -> list[Finding]:
    """Report saves that take about as long as the time between them: the run saves all the time."""
    took, interval = tier.usual_seconds, tier.interval_seconds
    if not took or not interval or took < threshold("save_interval_share") * interval:
        return []
    message = (
        f"a save to tier {tier.tier} takes {duration(took)} and the next one is due after {duration(interval)}: "
        "the checkpoint interval is too short, and the run saves all the time"
    )
    return finding(
        symptoms, "checkpoint_too_often", message, ("slow",), base=0.95, phases=("checkpoint",), is_risk=True
    )


def _stale(tier: SnapshotTier, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    began, interval = snapshot.run.generation_began, tier.interval_seconds
    if symptoms.condition not in ("healthy", "slow") or not interval or began is None:
        return []
    since = max(began, tier.last_moment or began)
    age = snapshot.moment - since
    if tier.last_moment is None:  # a wall clock may have jumped; the ledger's seconds are of a clock that does not
        age = min(age, sum(snapshot.run.ledger.values()) or age)
    # Even with an interval of seconds, allow two minutes: agents and schedulers pause.
    if age <= max(threshold("stale_intervals") * interval, 120.0):
        return []
    last = f"since step {tier.last_step}" if tier.last_step is not None else "yet"
    message = f"nothing saved to tier {tier.tier} {last} ({whole_duration(age)}; planned every {setting(interval)})"
    return finding(symptoms, "checkpoint_stale", message, (), base=0.85, is_risk=True)


def _blocked(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find a rank that all others wait for and that sleeps in file system code of the kernel."""
    findings: list[Finding] = []
    for symptom in symptoms.of("hung"):
        for number in symptom.ranks:
            rank = snapshot.rank(number)
            if rank is None:
                continue
            channels = (rank.wait_channel if rank.process_state == "D" else "", *rank.wait_channels)
            waits_in = next((channel for channel in channels if WAITS_FOR_FILES.search(channel)), "")
            by_channel = bool(waits_in)
            if by_channel or (rank.process_state == "D" and rank.kind in ("data", "checkpoint")):
                waits_in = waits_in or rank.wait_channel
                channel = f" in {waits_in}" if waits_in else ""
                message = f"rank {number} on {rank.node} sleeps in the kernel{channel}: it waits for a file system"
                base = 0.93 if by_channel else 0.8
                findings += finding(
                    symptoms, "storage_stalled", message, ("hung",), node=rank.node, rank=number, base=base
                )
    return findings


def _slow_phase(symptom: Symptom, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Report time lost in a phase that reads or writes files, where no file system explains it."""
    node = symptom.nodes[0] if len(symptom.nodes) == 1 else ""
    rank = symptom.ranks[0] if len(symptom.ranks) == 1 else None
    if symptom.phase == "checkpoint":
        message = "steps wait for checkpoints"
        return finding(
            symptoms, "checkpoint_slow", message, ("slow",), evidence=symptom.evidence, base=0.8, node=node, rank=rank
        )
    if symptom.phase != "data":
        return []
    training = snapshot.training
    waiting = [item for item in snapshot.ranks if not symptom.ranks or item.rank in symptom.ranks]
    asleep = [item for item in waiting if item.process_state == "D" and item.kind == "data"]
    if asleep:
        text = f"steps wait for data, and rank {asleep[0].rank} sleeps in the kernel for a disk (state D)"
        return finding(
            symptoms, "storage_slow", text, ("slow",), evidence=[*symptom.evidence, text], base=0.9, node=node
        )
    limit = threshold("file_wait_share")
    if any(item.resources is not None and item.resources.file_wait_share > limit for item in waiting):
        return []  # the rules for resources blame the disk
    if training is not None and training.source:
        text = f"steps wait for samples from `{training.source}`"
        evidence = [*symptom.evidence, f"{text}; no file system is known to be slow"]
        return finding(symptoms, "data_source_slow", text, ("slow",), evidence=evidence, base=0.9, node=node, rank=rank)
    nodes = [entry for entry in snapshot.nodes if not symptom.nodes or entry.name in symptom.nodes]
    fast = next((text for entry in nodes for mount in entry.mounts if (text := _is_fast(mount, snapshot))), "")
    if not fast:
        return []  # the loader or the file system: without evidence neither is blamed
    text = f"steps wait for data, while {fast}"
    evidence = [*symptom.evidence, text]
    return finding(symptoms, "loader_slow", text, ("slow",), evidence=evidence, base=0.85, node=node, rank=rank)


def _is_fast(mount: SnapshotMount, snapshot: Snapshot) -> str:
    """Return how a file system with the run's data shows that it is fast; "" if it does not."""
    data = snapshot.run.paths.get("data", ())
    holds_data = "data" in mount.holds or any(is_under(path, mount.path) for path in data)
    if mount.operation_seconds is not None and (holds_data or not mount.holds):
        return "the file system that holds the data is fast"
    if holds_data and mount.busy_share is not None and mount.busy_share < threshold("idle_disk_share"):
        return f"the disk that holds the data is busy {percent(mount.busy_share)} of the time"
    return ""


def _save_failed(snapshot: Snapshot) -> bool:
    return any(tier.failures for tier in snapshot.tiers)
