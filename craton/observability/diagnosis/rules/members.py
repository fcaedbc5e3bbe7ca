"""Rules for members: does the run wait for one, is it slow or did it end because of one?

Only members that the run depends on are blamed: those at its gate, and those that its own message names. A failed
member of a sweep explains nothing about its owner.
"""

from __future__ import annotations

from craton.observability.diagnosis.member_facts import BROKEN, SnapshotMember
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.verdict import Condition, Finding, Symptoms

UNEXPLAINED = "member_unexplained"
SLOWED_BASE = 0.8  # evidence in the run itself is better
WORDS = {
    "failed": "failed",
    "lost": "is lost",
    "stopped": "was stopped",
    "unreadable": "cannot be read",
    "stuck": "hangs",
    "hung": "hangs",
    "dead": "is dead",
    "slow": "is slow",
    "wrong": "produces wrong results",
    "waiting": "waits",
}


def examine_members(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for member in snapshot.members:
        is_broken = member.state in BROKEN
        is_troubled = is_broken or member.condition in ("dead", "hung", "slow", "wrong", "waiting")
        if member.is_awaited and is_troubled:
            findings += _blamed(symptoms, member, ("waiting", "starting"))
        if is_broken and (member.gate or member.is_named):
            findings += _blamed(symptoms, member, ("dead",))
        if is_troubled and member.gate == "ready":
            findings += _blamed(symptoms, member, ("slow", "hung"))
    return findings


def _blamed(symptoms: Symptoms, member: SnapshotMember, explains: tuple[Condition, ...]) -> list[Finding]:
    word = WORDS.get(member.state) or WORDS.get(member.condition, "is not ready")
    reason = member.because or member.waits_for or member.message
    sentence = f"member {member.short_name} {word}" + (f": {reason.rstrip('.')}" if reason else "")
    is_own_word = explains != ("slow", "hung")
    return finding(
        symptoms,
        f"member_{member.layer}" if member.layer else UNEXPLAINED,
        sentence,
        explains,
        base=1.0 if is_own_word else SLOWED_BASE,
        first_hand=max(0.5, member.confidence) if is_own_word else None,
        detail=member.action or f"look closer with `craton why {member.name}`",
    )
