"""Rules for restart loops: program, host or node."""

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
    cause, sentence, base = _explained(loop, snapshot)
    evidence = [sentence, f"reason of the last restart: {loop.restarts[-1].reason.rstrip('.')}"]
    return finding(symptoms, cause, sentence, ("dead",), evidence=evidence, node=loop.node, rank=loop.rank, base=base)


def _explained(loop: Loop, snapshot: Snapshot) -> tuple[str, str, float]:
    """Return cause, sentence and quality of the evidence. Ranks of one node that fail in different ways point at the
    node."""
    who = f"rank {loop.rank} on {loop.node}" if loop.rank is not None else loop.node
    base = 0.85 if who else 0.6
    if loop.node and (loop.way == "lost" or (loop.rank is None and loop.way == "mixed")):
        how = "is lost" if loop.way == "lost" else "fails in a different way"
        return "node_breaks_again", f"each time {loop.node} {how}", base
    if loop.way == "killed":
        killed = f"each time {who} is killed" if who else "different ranks are killed"
        if memory := memory_ran_out(snapshot, loop.node):
            return "out_of_memory", f"{killed}, and {memory}", base
        return "killed_again", f"{killed} from outside", base
    return "breaks_again", f"each time {who} fails" if who else "different ranks fail", base
