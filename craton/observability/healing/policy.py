"""What to do about the issues of a cluster's nodes: pure, so that every rule can be tested without a cluster.

- The gravest issue of a node decides: observe, restart, reset, reboot or replace.
- What may pass (a clock, a rate) is to be seen in several looks first. What somebody gave a node back in spite of is
  only watched, until something new happens.
- A node that comes back with an issue is a repeat offender: each time one grade graver, from the third time on it is
  replaced. An error that is usually the program's counts against the card when the same card has it under other runs.
- reset and graver mean that the node leaves service. What can wait (a row to be remapped, whatever does not keep a run
  from doing well) waits until it is idle. A run that moves gives its nodes back only where there are enough others.
- Never are more than the stated share of the nodes out, counting those that are out for any other reason. The gravest
  go first; the others are held back, and it is said why and what would let them go.
- What is out already is left alone, but for what we took out by the ledger: a run that is still there is moved, and an
  empty node is handed over to whoever reboots or replaces machines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from craton.formatting import counted, percent, setting
from craton.infrastructure.probes import HEALTH_ACTIONS, HealthAction
from craton.observability.healing.issues import Issue, gravest, rules
from craton.observability.healing.ledger import LedgerEntry, earlier_episodes, is_answered, num_looks, other_runs_with
from craton.orchestration import ServiceNode
from craton.orchestration.changes import Evacuation

NodeAction = Literal["none", "take_out", "move", "hand_over"]
JSON_NAMES = {"node_action": "deed", "issue": "trouble"}  # what `--json` calls them
HANDED = "Action:"  # how the reason of a node begins that was handed over
LEAVES: tuple[HealthAction, ...] = ("reset", "reboot", "replace")
WAITS = ("requeue", "pod")  # ways in which a run gives all its nodes back and waits for others


@dataclass(frozen=True)
class Decision:
    """What is to happen to one node, or why nothing does."""

    node: str
    action: HealthAction  # what it needs
    node_action: NodeAction  # what is done about it
    reason: str  # why it needs that
    why_not: str = ""  # nothing is done although it needs it
    evidence: tuple[str, ...] = ()
    escalated_from: str = ""
    runs: tuple[str, ...] = ()  # that are to move
    mark: str = ""  # of who took it out, where it is out
    issue: Issue | None = None

    @property
    def is_held(self) -> bool:
        """Whether something should be done and is not."""
        return bool(self.why_not) and self.node_action == "none"

    def to_json(self) -> dict[str, Any]:
        return {JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}


def decide(
    issues: Sequence[Issue],
    nodes: Sequence[ServiceNode],
    history: Sequence[LedgerEntry],
    now: float,
    share: float,
    hands_over: Collection[str] = (),
    runs_on: Mapping[str, Sequence[Evacuation]] | None = None,
) -> list[Decision]:
    """One decision a node, the gravest first. `hands_over`: the actions for which a machine may be handed over;
    `runs_on`: how the runs that compute on a node would leave it."""
    nodes_by_name = {node.name: node for node in nodes}
    needs = {name: _needed(name, _of(issues, name), history, now) for name in dict.fromkeys(t.node for t in issues)}
    for node in nodes:
        if entry := _open_action(node, history):
            needs[node.name] = _graver_of(needs.get(node.name), entry)
    cluster = _Cluster(
        nodes=nodes_by_name,
        num_out=sum(node.is_out for node in nodes),
        num_idle=sum(
            not node.is_out and node.is_busy is False and not _is_leaving(needs.get(node.name)) for node in nodes
        ),
        share=share,
        hands_over=hands_over,
        runs_on=runs_on or {},
        moved={
            (element.run, element.node)
            for element in history
            if element.kind == "move" and now - element.time <= rules().move_seconds
        },
        ours={(entry.node, entry.id) for entry in history if entry.kind == "take_out"},
    )
    decisions = [cluster.decide(need) for need in sorted(needs.values(), key=_urgency)]
    return [item for item in decisions if item.issue is not None or item.node_action != "none" or item.why_not]


def max_out(total: int, share: float) -> int:
    """How many nodes may be out at a time; 0.3 of 10 are 3 although 0.3 is a little less in binary."""
    return math.floor(total * share + 1e-9)


def over_share(num_out: int, total: int, share: float) -> str:
    """Why one more may not go out, and what would let it; empty: it may."""
    if num_out + 1 <= max_out(total, share):
        return ""
    out = f"{num_out} of {total} nodes are out already" if num_out else f"one of {total} nodes"
    needed = math.ceil(100 * (num_out + 1) / total)
    limit = f"no more than {percent(share)} of them ({max_out(total, share)}) may be out"
    return f"{out}, and {limit}; `--share {needed}%`, or `health: {{share: {needed}%}}` in the cluster file, allows it"


@dataclass(frozen=True)
class _Need:
    node: str
    action: HealthAction
    reason: str
    evidence: tuple[str, ...] = ()
    escalated_from: str = ""
    issue: Issue | None = None  # None: it was taken out before, and nothing is seen of it now
    is_urgent: bool = True  # of anything that the node leaves for, not only of the gravest
    stops_run: bool = False


def _needed(node: str, issues: Sequence[Issue], history: Sequence[LedgerEntry], now: float) -> _Need:
    table, stops_run = rules(), any(element.stops_run for element in issues)
    evidence = tuple(dict.fromkeys(element.evidence for element in issues))
    open_ones = [issue for issue in issues if not is_answered(history, issue, now)]
    if not open_ones:
        first = gravest(issues)
        reason = f"{first.evidence}; the node was given back since, and nothing new has happened"
        return _Need(node, "observe", reason, evidence, "", first, stops_run=stops_run)
    settled = [open_one for open_one in open_ones if not _doubt(open_one, history, now)]
    first = gravest(open_ones)
    if first not in settled and not any(entry.action in LEAVES for entry in settled) and first.action != "observe":
        reason = f"{first.evidence}; {_doubt(first, history, now)}"
        return _Need(node, "observe", reason, evidence, "", first, stops_run=stops_run)
    first = gravest(settled or open_ones)
    action, reason, before = first.action, first.evidence, ""
    if action in LEAVES:
        earlier = earlier_episodes(history, first, now)
        action = _graver(action, earlier)
        if earlier:
            before = first.action if action != first.action else ""
            times = "once" if earlier == 1 else f"{earlier} times"
            reason += f"; it had issues {times} before in {counted(round(table.repeat_seconds / 86400), 'day')}"
    elif first.device and first.run:
        others = other_runs_with(history, first, now)
        if len(others) + 1 >= table.same_card_runs:
            action, before = "reset", first.action
            reason += f"; the same card had it in {', '.join(sorted(others))} too, so it is not the program's"
    is_urgent = first.is_urgent or any(item.is_urgent for item in settled if item.action in LEAVES)
    return _Need(node, action, reason, evidence, before, first, is_urgent, stops_run)


def _doubt(issue: Issue, history: Sequence[LedgerEntry], now: float) -> str:
    """Why an issue is no reason yet to touch a node; empty: it is one."""
    table = rules()
    if issue.confidence < table.min_confidence:
        return f"it is not sure enough ({percent(issue.confidence)}) to touch the node"
    if not issue.is_sample or issue.action not in LEAVES:
        return ""
    looks, apart = num_looks(history, issue, now), f"{setting(table.look_seconds)} apart"
    return "" if looks >= table.looks else f"it may pass: seen in {looks} of {table.looks} looks, {apart}"


def _open_action(node: ServiceNode, history: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """What the ledger has of our taking the node out, where it is still out by that."""
    actions = [item for item in history if item.kind == "take_out" and (item.node, item.id) == (node.name, node.mark)]
    return actions[-1] if actions and node.is_out and actions[-1].action in LEAVES else None


def _graver_of(need: _Need | None, entry: LedgerEntry) -> _Need:
    action = cast(HealthAction, entry.action)
    if need is None:
        return _Need(entry.node, action, entry.text)
    if HEALTH_ACTIONS.index(need.action) >= HEALTH_ACTIONS.index(action):
        return need
    return replace(need, action=action, reason=entry.text)


def _is_leaving(need: _Need | None) -> bool:
    return need is not None and need.action in LEAVES


def _graver(action: HealthAction, earlier: int) -> HealthAction:
    if earlier >= rules().repeat_incidents:
        return "replace"
    return HEALTH_ACTIONS[min(HEALTH_ACTIONS.index(action) + earlier, len(HEALTH_ACTIONS) - 1)]


@dataclass
class _Cluster:
    """What is left to give while one node after the other is decided about."""

    nodes: Mapping[str, ServiceNode]
    num_out: int
    num_idle: int  # in service, and without issues
    share: float
    hands_over: Collection[str]
    runs_on: Mapping[str, Sequence[Evacuation]]
    moved: Collection[tuple[str, str]]  # runs that were just asked to leave a node
    ours: Collection[tuple[str, str]]  # nodes and the marks that we took them out with

    def decide(self, need: _Need) -> Decision:
        node, ways = self.nodes.get(need.node), self.runs_on.get(need.node, ())
        node_action, why_not = self._node_action(need, node, ways)
        if node_action == "take_out":
            self.num_out += 1
        if node_action in ("take_out", "move") and any(way.how in WAITS for way in ways):
            self.num_idle -= 1
        return Decision(
            need.node,
            need.action,
            node_action,
            need.reason,
            why_not,
            need.evidence,
            need.escalated_from,
            tuple(way.run for way in ways) if node_action in ("take_out", "move") else (),
            node.mark if node is not None else "",
            need.issue,
        )

    def _node_action(self, need: _Need, node: ServiceNode | None, ways: Sequence[Evacuation]) -> tuple[NodeAction, str]:
        if need.action not in LEAVES:
            return "none", ""
        if node is None:
            return "none", f"the scheduler has no {need.node} here: of another partition, powered down or gone"
        if node.is_out:
            return self._action_of_out(need, node, ways) if node.mark else ("none", "")
        if node.is_busy and not need.is_urgent:
            return "none", "it can wait until nothing runs there"
        if why_not := over_share(self.num_out, len(self.nodes), self.share):
            return "none", why_not
        if why_not := self._stuck(need, ways):
            return "none", why_not
        return "take_out", ""

    def _action_of_out(self, need: _Need, node: ServiceNode, ways: Sequence[Evacuation]) -> tuple[NodeAction, str]:
        if ways:
            if all((way.run, node.name) in self.moved for way in ways):
                return "none", ""
            why_not = self._stuck(need, ways)
            return ("none", why_not) if why_not else ("move", "")
        is_ours = (node.name, node.mark) in self.ours
        if need.action not in self.hands_over or node.reason.startswith(HANDED) or not is_ours:
            return "none", ""
        if node.is_busy is not False:
            return "none", "it is out of service; it is handed over when nothing runs there any more"
        return "hand_over", ""

    def _stuck(self, need: _Need, ways: Sequence[Evacuation]) -> str:
        """Why a run there had better stay for now; one that does not move has nothing to lose."""
        if lost := next((way for way in ways if not way.how), None):
            return lost.sentence
        if need.stops_run:
            return ""
        for way in ways:
            if way.how not in WAITS:
                continue
            theirs = [name for name, others in self.runs_on.items() if any(other.run == way.run for other in others)]
            needed = 1 + sum(self.nodes[name].is_out for name in theirs if name in self.nodes and name != need.node)
            if self.num_idle < needed:
                return (
                    f"{way.run} would give its nodes back and wait: it needs {needed} other idle in service, and "
                    f"{max(0, self.num_idle)} are known to be"
                )
        return ""


def _urgency(need: _Need) -> tuple[int, bool, float, str]:
    issue = need.issue
    grade, confidence = -HEALTH_ACTIONS.index(need.action), issue.confidence if issue else 1.0
    return grade, not need.is_urgent, -confidence, need.node


def _of(issues: Sequence[Issue], node: str) -> list[Issue]:
    return [issue for issue in issues if issue.node == node]
