"""Rules for collectives: which one is stuck and which ranks are missing, by NCCL RAS and PyTorch's flight recorder."""

from __future__ import annotations

from craton.observability.diagnosis.rules.findings import finding, named
from craton.observability.diagnosis.snapshot import Communicator, Snapshot, StuckCollective
from craton.observability.diagnosis.verdict import Finding, Symptoms


def examine_collectives(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for stuck in snapshot.collectives.stuck:
        findings += _stuck(stuck, snapshot, symptoms)
    for communicator in snapshot.collectives.communicators:
        findings += _counted(communicator, snapshot, symptoms)
    return findings


def _stuck(stuck: StuckCollective, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    which = f"collective {stuck.sequence} ({stuck.operation}) of group {stuck.description or stuck.group}"
    at = [f"called from {stuck.stack[0]}"] if stuck.stack else []
    if stuck.mismatch:
        odd = stuck.mismatched
        rank = odd[0] if len(odd) == 1 else None
        message = f"ranks disagree on {which}: {stuck.mismatch}"
        return finding(
            symptoms,
            "collective_mismatch",
            message,
            ("hung", "dead"),
            evidence=[message, *at],
            node=_node(snapshot, rank),
            rank=rank,
            base=0.97,
        )
    absent, base = (stuck.missing, 0.93) if stuck.missing else (stuck.silent, 0.65)
    if not absent or 2 * len(absent) > max(2, len(stuck.expected)):
        return []
    did = "never entered" if stuck.missing else "left no recording of"
    message = f"{named(absent, 'rank ')} {did} {which}, where the others wait"
    return finding(
        symptoms,
        "rank_missing_in_collective",
        message,
        ("hung", "dead"),
        evidence=[message, *at],
        node=_node(snapshot, absent[0]),
        rank=absent[0],
        base=base,
    )


def _counted(communicator: Communicator, snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find ranks that started fewer operations than the others and do not catch up. Only communicators of the whole
    world number their members as the run does."""
    if communicator.size != snapshot.run.world:
        return []
    if communicator.missing:
        message = f"NCCL RAS gets no response from {named(communicator.missing, 'rank ')}"
        rank = communicator.missing[0]
        return finding(
            symptoms, "ranks_behind", message, ("hung", "dead"), node=_node(snapshot, rank), rank=rank, base=0.9
        )
    counts = communicator.counts
    if len(counts) < 2 or min(counts.values()) == max(counts.values()):
        return []
    before = communicator.counts_before
    if before and any(counts.get(rank) != before.get(rank) for rank in counts):
        return []  # it makes progress
    behind = sorted(rank for rank, count in counts.items() if count == min(counts.values()))
    if 2 * len(behind) > len(counts):
        return []
    message = (
        f"NCCL RAS counts {counts[behind[0]]} operations on {named(behind, 'rank ')}, and {max(counts.values())} on "
        f"the other ranks of communicator {communicator.name}"
    )
    return finding(
        symptoms,
        "ranks_behind",
        message,
        ("hung",),
        node=_node(snapshot, behind[0]),
        rank=behind[0],
        base=0.93,
    )


def _node(snapshot: Snapshot, number: int | None) -> str:
    rank = snapshot.rank(number) if number is not None else None
    return rank.node if rank is not None else ""
