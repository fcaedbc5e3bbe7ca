"""Runs that break again and again: which of program, host and node it looks like."""

from __future__ import annotations

from craton.observability.diagnosis.restart_history import Loop, find_loop
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.rules.host import memory_ran_out
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.verdict import RESTARTS, Finding, Symptoms


def examine_restarts(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    loop = find_loop(snapshot) if symptoms.signed(RESTARTS) else None
    if loop is None:
        return []
    cause, told, base = _judged(loop, snapshot)
    evidence = [told, f"the last time because {loop.restarts[-1].reason.rstrip('.')}"]
    return finding(symptoms, cause, told, ("dead",), evidence=evidence, node=loop.node, rank=loop.rank, base=base)


def _judged(loop: Loop, snapshot: Snapshot) -> tuple[str, str, float]:
    """Cause, words, and how good the evidence is. Ranks of one node that end in different ways point at the node."""
    who = f"rank {loop.rank} on {loop.node}" if loop.rank is not None else loop.node
    base = 0.85 if who else 0.6
    if loop.node and (loop.way == "lost" or (loop.rank is None and loop.way == "mixed")):
        words = "is lost" if loop.way == "lost" else "breaks it, each time in another way"
        return "node_breaks_again", f"it is always {loop.node} that {words}", base
    victim = f"always {who}" if who else "not always the same rank"
    if loop.way == "killed":
        if memory := memory_ran_out(snapshot, loop.node):
            return "out_of_memory", f"it is {victim} that is killed, and {memory}", base
        return "killed_again", f"it is {victim} that is ended from outside", base
    return "breaks_again", f"it is {victim} that breaks", base
