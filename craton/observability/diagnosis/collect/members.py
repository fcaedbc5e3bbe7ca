"""Collect the members of a run, and diagnose those that may be the reason of its owner's condition."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from craton.observability.diagnosis.member_facts import BROKEN, SnapshotMember
from craton.observability.diagnosis.verdict import Condition, Verdict
from craton.orchestration.watching import MemberRow, glance_at_members
from craton.telemetry import RunDirectory
from craton.telemetry.members import read_members, read_members_status

MAX_EXAMINED = 3  # members whose own verdict is made: each takes a snapshot


def read_snapshot_members(
    run: RunDirectory, condition: Condition, message: str, examine: Callable[[RunDirectory], Verdict]
) -> tuple[SnapshotMember, ...]:
    """Return the members that its owner depends on or that its message names, with the verdicts on those that may
    explain the condition of the owner."""
    rows = glance_at_members(run)
    if not rows:
        return ()
    gates = {member.name: member.gate or "" for member in read_members(run).members}
    status = read_members_status(run)
    text = f"{message}\n{status.failure}"
    members = [_member(row, gates.get(row.name.rpartition("/")[2], ""), status.is_open, text) for row in rows]
    suspects = [member for member in members if _may_explain(member, condition)]
    suspects = sorted(suspects, key=lambda member: member.state not in BROKEN)[:MAX_EXAMINED]
    there = {row.name: RunDirectory(row.summary.path) for row in rows if row.summary is not None}
    verdicts = {member.name: examine(there[member.name]) for member in suspects if member.name in there}
    return tuple(
        _with_verdict(member, verdicts[member.name]) if member.name in verdicts else member
        for member in members
        if member.gate or member.is_named
    )


def _member(row: MemberRow, gate: str, is_open: bool, text: str) -> SnapshotMember:
    summary, name = row.summary, row.name.rpartition("/")[2]
    is_there = row.state == "done" if gate == "done" else row.state in ("ready", "done")
    progress = f"step {summary.step:,} of {summary.steps:,}" if summary is not None and summary.steps else ""
    return SnapshotMember(
        row.name,
        row.state,
        gate,
        is_awaited=bool(gate) and not is_open and not is_there,
        is_named=re.search(rf"\bmember {re.escape(name)}(?![\w.-])", text) is not None,
        progress=progress,
        waits_for=row.waits_for,
        message=row.message,
    )


def _may_explain(member: SnapshotMember, condition: Condition) -> bool:
    if condition in ("waiting", "starting"):
        return member.is_awaited
    if condition == "dead":
        return member.is_named or (bool(member.gate) and member.state in BROKEN)
    return condition in ("slow", "hung") and member.gate == "ready"


def _with_verdict(member: SnapshotMember, verdict: Verdict) -> SnapshotMember:
    return replace(
        member,
        condition=verdict.condition,
        layer=verdict.layer,
        because=verdict.because,
        action=verdict.action,
        confidence=verdict.confidence,
    )
