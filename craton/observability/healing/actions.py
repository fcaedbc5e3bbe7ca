"""Take bad nodes out of service, or advise it; undo such actions.

Order of an action: count the nodes out of service, write the action to the ledger, take the node out, count again, move
the runs on it. An action that fails half-way can therefore be undone by its ID. Two processes without a common ledger
still see each other through the scheduler. If a node carries another mark after the action, it is left to the other
process. If both together exceed the share, the process with the later ID undoes its action; the other one waits for
that, and undoes its own if it does not happen. No action remains unless a count after it was within the share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from craton.errors import CratonError
from craton.formatting import percent
from craton.observability.healing.issues import Issue
from craton.observability.healing.ledger import (
    NODE_ACTIONS,
    Ledger,
    LedgerEntry,
    LedgerError,
    fresh_incidents,
    new_id,
    pause_between,
)
from craton.observability.healing.places import AGENT_ERRORS, HealingScope
from craton.observability.healing.policy import LEAVES, Decision, decide, max_out, over_share
from craton.orchestration import NoAnswerError, ServiceNode
from craton.orchestration.changes import come_back, evacuate, plan_evacuation
from craton.telemetry import RunDirectory, find_run

MODES = ("off", "advise", "act")
YIELD_SECONDS = 30.0  # that a concurrent process has to count and to undo its action
LOOK_SECONDS = 0.5  # between two checks for that
Approve = Callable[[Sequence[Decision]], bool]


@dataclass(frozen=True)
class Healing:
    """The result of one pass over a cluster."""

    cluster: str
    mode: str
    share: float
    total: int  # nodes
    num_out: int  # after all actions
    decisions: tuple[Decision, ...]
    actions: tuple[LedgerEntry, ...] = ()  # of this pass
    failures: tuple[str, ...] = ()
    moves: dict[str, list[str]] = field(default_factory=dict)  # node → how each run on it would move, or moves
    notes: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """Return whether no required action is left."""
        return not self.failures and not (self.mode == "act" and any(decision.is_held for decision in self.decisions))

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "mode": self.mode,
            "share": self.share,
            "nodes": self.total,
            "out": self.num_out,
            "decisions": [decision.to_json() for decision in self.decisions],
            "deeds": [entry.__dict__ for entry in self.actions],
            "failures": list(self.failures),
            "moves": self.moves,
            "notes": list(self.notes),
        }


def heal(
    place: HealingScope,
    issues: Sequence[Issue],
    mode: str,
    share: float,
    approve: Approve | None = None,
    node: str | None = None,
) -> Healing:
    """Make one pass, over one node or all. `approve` confirms the decisions; without it all of them are executed."""
    assert mode in MODES, mode
    ledger = Ledger(place.root)
    if mode == "off":
        nodes = place.service.nodes()
        return Healing(place.name, mode, share, len(nodes), sum(item.is_out for item in nodes), ())
    if mode == "advise":
        return _advise(place, ledger, issues, share, node)
    with ledger.held():
        healing = replace(_advise(place, ledger, issues, share, node), mode="act")
        if healing.notes:
            raise LedgerError(f"--mode act requires a writable ledger: {healing.notes[0]}")
        wanted = [decision for decision in healing.decisions if decision.node_action != "none"]
        if not wanted or (approve is not None and not approve(wanted)):
            return healing
        return _act(place, ledger, healing, issues)


def undo(place: HealingScope, number: str) -> list[str]:
    """Undo an action by its ID; return what was undone and what was not. CratonError if there is nothing to undo."""
    ledger = Ledger(place.root)
    with ledger.held():
        actions = [entry for entry in ledger.entries() if entry.id == number and entry.kind in NODE_ACTIONS]
        if not actions:
            raise CratonError(f"no action {number} in {ledger.path}; list the actions with `craton heal --history`")
        done: list[str] = []
        node = actions[0].node
        why_not = place.service.give_back(node, number)
        if not why_not:
            done.append(f"{node} is back in service")
        moved = [_run(place, entry.run) for entry in actions if entry.kind == "move"]
        for run in {run.name: run for run in (*place.runs, *moved) if run is not None}.values():
            done += [f"{run.name} may use {own} again, as a spare" for own in come_back(run, number)]
        if not done:
            raise CratonError(f"{number} cannot be undone: {why_not}")
        answer = replace(actions[0], time=time.time(), kind="undo", text="; ".join(done))
        ledger.append([answer])
        return [*done, *([why_not] if why_not else [])]


def _advise(place: HealingScope, ledger: Ledger, issues: Sequence[Issue], share: float, node: str | None) -> Healing:
    now, nodes, history = time.time(), place.service.nodes(), ledger.entries()
    bad = _bad(nodes, issues)
    ways = {host: [plan_evacuation(run, own, bad) for run, own in runs] for host, runs in place.runs_on().items()}
    hands_over = [action for action in LEAVES if place.hands_over and place.service.can_hand_over(action)]
    decisions = decide(issues, nodes, history, now, share, hands_over, ways)
    decisions = [entry for entry in decisions if node in (None, entry.node)]
    incidents = [
        (_incident(place, item, now), pause_between(item.issue)) for item in decisions if item.issue is not None
    ]
    notes: tuple[str, ...] = ()
    if fresh := fresh_incidents(history, incidents):
        try:
            ledger.append(fresh)
        except LedgerError as error:
            notes = (f"incidents are not recorded: {error}",)
    moves = {
        decision.node: [f"{way.run}: {way.sentence}" for way in ways[decision.node]]
        for decision in decisions
        if decision.node_action in ("take_out", "move") and ways.get(decision.node)
    }
    num_out = sum(node.is_out for node in nodes)
    return Healing(place.name, "advise", share, len(nodes), num_out, tuple(decisions), moves=moves, notes=notes)


def _act(place: HealingScope, ledger: Ledger, healing: Healing, issues: Sequence[Issue]) -> Healing:
    actions: list[LedgerEntry] = []
    failures: list[str] = []
    left: set[str] = set()  # runs that leave all their nodes, so they need no further move
    for decision in healing.decisions:
        if decision.node_action == "none":
            continue
        entry = _entry(place, decision)
        try:
            if decision.node_action == "hand_over":  # its ID is in the ledger already
                if place.service.hand_over(decision.node, entry.id, decision.action):
                    ledger.append([entry])
                    actions.append(entry)
                continue
            if decision.node_action == "take_out":
                before = _out_before(place, decision.node, healing.share)
                ledger.append([entry])
                _take_out(place, decision, entry.id, healing.share, before)
                actions.append(entry)
        except LedgerError:
            raise
        except CratonError as error:
            failures.append(f"{decision.node}: {error}")
            if decision.node_action == "take_out":
                ledger.append([replace(entry, time=time.time(), kind="failed", text=str(error))])
            continue
        place.avoid(decision.node, entry.id)
        try:
            bad = _bad(place.service.nodes(), issues)
        except CratonError as error:
            failures.append(f"runs on {decision.node} stay there until the next look: {error}")
            continue
        for run, own in place.runs_on().get(decision.node, ()):
            if run.name in left:
                continue
            try:
                way = evacuate(run, own, entry.id, bad)
            except AGENT_ERRORS as error:
                failures.append(f"{run.name} stays on {own}: {error}")
                continue
            left |= {run.name} if way.how != "spare" else set()
            move = replace(entry, time=time.time(), kind="move", run=run.name, run_node=own, text=way.sentence)
            ledger.append([move])
            actions.append(move)
    num_out = healing.num_out + sum(entry.kind == "take_out" for entry in actions)
    return replace(healing, num_out=num_out, actions=tuple(actions), failures=tuple(failures))


def _out_before(place: HealingScope, name: str, share: float) -> set[str]:
    """Return the nodes that are out already. CratonError if this node is, or if no more may be."""
    nodes = place.service.nodes()
    if taken := next((node for node in nodes if node.name == name and node.is_out), None):
        raise CratonError(f"already taken out by another process ({taken.reason or 'no reason'}); left unchanged")
    if why_not := over_share(sum(node.is_out for node in nodes), len(nodes), share):
        raise CratonError(why_not)
    return {node.name for node in nodes if node.is_out}


def _take_out(place: HealingScope, decision: Decision, number: str, share: float, before: Collection[str]) -> None:
    """Take a node out. CratonError if that failed or may have failed; with the ID if the node is or may be out."""
    by_number = f"`--undo {number}` puts it back in service"
    try:
        place.service.take_out(decision.node, number, f"{decision.action}: {decision.reason}")
    except NoAnswerError as error:
        raise CratonError(f"{error}; if it is out anyway, {by_number}") from None
    try:
        nodes = _settled(place, number, share, before)
        taken_out = next((node for node in nodes if node.name == decision.node and node.is_out), None)
        theirs = (taken_out.reason or "no reason") if taken_out is not None and taken_out.mark != number else ""
        why = "" if theirs else _exceeded(nodes, share)
        why_not = place.service.give_back(decision.node, number) if why else ""
    except CratonError as error:
        raise CratonError(f"out, but the nodes out of service cannot be counted ({error}); {by_number}") from None
    if theirs:
        raise CratonError(f"another process took it out at the same moment ({theirs}); left unchanged")
    if why_not:
        raise CratonError(f"cannot be undone ({why_not}) although {why}; {by_number}")
    if why:
        raise CratonError(f"undone: {why}")


def _settled(place: HealingScope, number: str, share: float, before: Collection[str]) -> list[ServiceNode]:
    """Return the nodes after an action, once concurrent processes have undone theirs: of the surplus, those with the
    last IDs undo their action. A process that has to undo its own action does not wait."""
    deadline = time.monotonic() + YIELD_SECONDS
    while True:
        nodes = place.service.nodes()
        fresh = [node for node in nodes if node.is_out and node.name not in before]
        num_resumed = sum(not node.reason for node in fresh)  # resumed, while Slurm still shows it as not responding
        too_many = sum(node.is_out for node in nodes) - max_out(len(nodes), share)
        marks = sorted((node.mark for node in fresh if node.mark), reverse=True)
        stays = number in marks[max(0, too_many - num_resumed) :]
        if too_many <= 0 or not stays or time.monotonic() >= deadline:
            return nodes
        time.sleep(LOOK_SECONDS)


def _exceeded(nodes: Sequence[ServiceNode], share: float) -> str:
    num_out = sum(node.is_out for node in nodes)
    if num_out <= max_out(len(nodes), share):
        return ""
    limit = f"more than {percent(share)} of them"
    return f"{num_out} of {len(nodes)} nodes are out now, {limit}: another process took nodes out too"


def _bad(nodes: Sequence[ServiceNode], issues: Sequence[Issue]) -> set[str]:
    """Return nodes that no run may move to."""
    return {node.name for node in nodes if node.is_out} | {issue.node for issue in issues if issue.action in LEAVES}


def _entry(place: HealingScope, decision: Decision) -> LedgerEntry:
    assert decision.node_action != "none"
    issue = decision.issue
    return LedgerEntry(
        time.time(),
        decision.node_action,
        decision.node,
        new_id() if decision.node_action == "take_out" else decision.mark,
        place.name,
        action=decision.action,
        what=issue.what if issue else "",
        device=issue.device if issue else "",
        text=decision.reason,
    )


def _incident(place: HealingScope, decision: Decision, now: float) -> LedgerEntry:
    issue = decision.issue
    assert issue is not None
    return LedgerEntry(
        now,
        "incident",
        decision.node,
        cluster=place.name,
        run=issue.run,
        action=decision.action,
        what=issue.what,
        device=issue.device,
        text=issue.evidence,
        moment=issue.moment or 0.0,
    )


def _run(place: HealingScope, name: str) -> RunDirectory | None:
    try:
        return find_run(name, place.root)
    except CratonError:
        return None
