"""Rules for the scheduler: is the run queued, was it ended, are its nodes up?"""

from __future__ import annotations

import re
from dataclasses import replace

from craton.observability.diagnosis.rules.findings import finding, named
from craton.observability.diagnosis.snapshot import SchedulerKill, Snapshot
from craton.observability.diagnosis.verdict import (
    CANCELLED,
    IDLE,
    PAUSED,
    SUSPENDED,
    UNSAVED,
    Condition,
    Finding,
    Symptoms,
)
from craton.orchestration.watching import NO_ANSWER

KILLS = {
    "oom": ("out_of_memory", "was killed because it ran out of memory"),
    "evicted": ("evicted", "was evicted"),
    "preempted": ("preempted", "was preempted by another job"),
    "time_limit": ("time_limit", "reached its time limit"),
    "leaving": ("time_limit", "had to leave its nodes: its time limit was near, or another job takes them"),
    "node_fail": ("node_down", "ended because a node failed"),
    "cancelled": ("cancelled", "was cancelled"),
}
# The scheduler's state or reason of an ended job → a key of KILLS.
WORDS = (
    (re.compile(r"OUT_OF_MEMORY|OOMKilled", re.IGNORECASE), "oom"),
    (re.compile(r"PREEMPT", re.IGNORECASE), "preempted"),
    (re.compile(r"\bEvict", re.IGNORECASE), "evicted"),
    (re.compile(r"TIMEOUT|DEADLINE|time ?limit", re.IGNORECASE), "time_limit"),
    (re.compile(r"NODE_?FAIL|BOOT_FAIL|NodeLost|NodeNotReady", re.IGNORECASE), "node_fail"),
    (re.compile(r"CANCEL", re.IGNORECASE), "cancelled"),
)


EARLIER_SECONDS = 5.0  # heartbeats of agents that end together stop within less


def examine_scheduler(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    scheduler = snapshot.scheduler
    if symptoms.condition == "waiting" and not symptoms.signed(UNSAVED) and not symptoms.signed(PAUSED):
        message = scheduler.sentence or scheduler.reason or "it is waiting for nodes"
        return finding(symptoms, "waiting_for_nodes", message, ("waiting",))
    if symptoms.signed(SUSPENDED):
        return finding(symptoms, "job_suspended", scheduler.sentence, ("hung",))
    findings: list[Finding] = []
    if not scheduler.has_begun:
        findings += finding(symptoms, "job_not_begun", scheduler.sentence, ("starting",))
    if scheduler.condition == "unknown" and scheduler.reason == NO_ANSWER:
        message = f"the scheduler does not respond: {scheduler.sentence}"
        explains: tuple[Condition, ...] = () if symptoms.signed(IDLE) else ("unknown",)
        findings += finding(symptoms, "scheduler_unreachable", message, explains, base=0.95, is_risk=True)
    kills = list(scheduler.kills)
    if scheduler.condition == "ended" and scheduler.outcome != "done" and not kills:
        reason = next((ours for words, ours in WORDS if words.search(f"{scheduler.reason} {scheduler.sentence}")), None)
        if reason is not None:
            kills.append(SchedulerKill(reason, text=scheduler.reason or scheduler.sentence))
    if snapshot.run.is_stopped_by_scheduler and not kills:
        kills.append(SchedulerKill("leaving"))
    ends: tuple[Condition, ...] = ("dead", "hung", *(("stopped",) if symptoms.signed(CANCELLED) else ()))
    for kill in kills:
        if kill.reason == "node_fail" and not kill.node:
            kill = replace(kill, node=_first_silent(snapshot))
        cause, words = KILLS.get(kill.reason, ("cancelled", f"was ended ({kill.reason})"))
        victim = f"rank {kill.rank}" if kill.rank is not None else kill.node or f"job {scheduler.job}".strip()
        message = f"{victim} {words}" + (f": {kill.text}" if kill.text else "")
        findings += finding(symptoms, cause, message, ends, base=0.98, node=kill.node, rank=kill.rank)
    bad = [word for word in scheduler.nodes if word.is_bad and word.node in (snapshot.run.nodes or (word.node,))]
    for word in bad:
        reason = f" ({word.reason})" if word.reason else ""
        message = f"the scheduler reports {word.node} as {word.state or 'gone'}{reason}"
        evidence = [message] if len(bad) == 1 else [message, f"bad nodes: {named([item.node for item in bad])}"]
        findings += finding(
            symptoms, "node_down", message, ("dead", "hung"), evidence=evidence, node=word.node, base=0.97
        )
    return findings


def _first_silent(snapshot: Snapshot) -> str:
    """Return the node whose heartbeats stopped clearly before all others; "" if there is none."""
    ages = sorted(
        ((node.heartbeat_age_seconds, node.name) for node in snapshot.nodes if node.heartbeat_age_seconds is not None),
        reverse=True,
    )
    is_clear = len(ages) > 1 and len(ages) == len(snapshot.nodes) and ages[0][0] - ages[1][0] > EARLIER_SECONDS
    return ages[0][1] if is_clear else ""
