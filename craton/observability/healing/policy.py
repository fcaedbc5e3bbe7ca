"""Decide what to do about the issues of a cluster's nodes. Pure, so that every rule is testable without a cluster.

- The most severe issue of a node decides: observe, restart, reset, reboot or replace.
- A transient state (a clock, a rate) must show in several looks first. After an undo, its issue is only observed until
  something new happens.
- A node with a further issue is a repeat offender: one action more severe each time, and from the third time on it is
  replaced. An error usually caused by the program counts against the GPU if the same GPU shows it in other runs.
- reset and above take the node out of service. Issues that can wait (a row to be remapped, or any that does not harm a
  healthy run) wait until the node is idle. A run that must give its nodes back moves only if enough others are idle.
- At most the given share of the nodes is out at a time, counting nodes that are out for other reasons. The most severe
  go first; the others are held back, with the reason and what would allow them.
- Nodes that are out already are left alone, except those that the ledger shows we took out: runs still there are moved,
  and an empty node is handed over for reboot or replacement.
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
JSON_NAMES = {"node_action": "deed", "issue": "trouble"}  # keys of `--json`
HANDED = "Action:"  # prefix of the reason of a node that was handed over
LEAVES: tuple[HealthAction, ...] = ("reset", "reboot", "replace")
WAITS = ("requeue", "pod")  # moves in which a run gives all its nodes back and waits for others


@dataclass(frozen=True)
class Decision:
    """The action for one node, or why there is none."""

    node: str
    action: HealthAction  # required
    node_action: NodeAction  # taken
    reason: str  # why it is required
    why_not: str = ""  # why the required action is not taken
    evidence: tuple[str, ...] = ()
    escalated_from: str = ""
    runs: tuple[str, ...] = ()  # that must move
    mark: str = ""  # ID of the action that took it out
    issue: Issue | None = None

    @property
    def is_held(self) -> bool:
        """Return whether a required action is not taken."""
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
    """Return one decision per node, most severe first. `hands_over`: actions for which a machine may be handed over;
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
    """Return how many nodes may be out at a time; 0.3 of 10 is 3, although 0.3 is slightly less in binary."""
    return math.floor(total * share + 1e-9)


def over_share(num_out: int, total: int, share: float) -> str:
    """Return why one more node may not go out, and what would allow it; empty: it may."""
    if num_out + 1 <= max_out(total, share):
        return ""
    out = f"{num_out} of {total} nodes are out already" if num_out else f"one of {total} nodes is too many"
    needed = math.ceil(100 * (num_out + 1) / total)
    limit = f"at most {percent(share)} of them ({max_out(total, share)}) may be out"
    return f"{out}: {limit}; allow it with `--share {needed}%`, or `health: {{share: {needed}%}}` in the cluster file"


@dataclass(frozen=True)
class _Need:
    node: str
    action: HealthAction
    reason: str
    evidence: tuple[str, ...] = ()
    escalated_from: str = ""
    issue: Issue | None = None  # None: it was taken out before, and shows no issue now
    is_urgent: bool = True  # of any issue that requires taking it out, not only the most severe
    stops_run: bool = False


def _needed(node: str, issues: Sequence[Issue], history: Sequence[LedgerEntry], now: float) -> _Need:
    table, stops_run = rules(), any(element.stops_run for element in issues)
    evidence = tuple(dict.fromkeys(element.evidence for element in issues))
    open_ones = [issue for issue in issues if not is_answered(history, issue, now)]
    if not open_ones:
        first = gravest(issues)
        reason = f"{first.evidence}; the node was put back in service since, and nothing new has happened"
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
            reason += f"; the same GPU had it in {', '.join(sorted(others))} too, so the program is not the cause"
    is_urgent = first.is_urgent or any(item.is_urgent for item in settled if item.action in LEAVES)
    return _Need(node, action, reason, evidence, before, first, is_urgent, stops_run)


def _doubt(issue: Issue, history: Sequence[LedgerEntry], now: float) -> str:
    """Return why an issue does not justify an action yet; empty: it does."""
    table = rules()
    if issue.confidence < table.min_confidence:
        return f"the confidence ({percent(issue.confidence)}) is too low to take the node out"
    if not issue.is_sample or issue.action not in LEAVES:
        return ""
    looks, apart = num_looks(history, issue, now), f"{setting(table.look_seconds)} apart"
    return "" if looks >= table.looks else f"it may be transient: seen in {looks} of {table.looks} looks, {apart}"


def _open_action(node: ServiceNode, history: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """Return the ledger entry of our action, if the node is still out because of it."""
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
    """The remaining capacity while nodes are decided one after the other."""

    nodes: Mapping[str, ServiceNode]
    num_out: int
    num_idle: int  # in service, and without issues
    share: float
    hands_over: Collection[str]
    runs_on: Mapping[str, Sequence[Evacuation]]
    moved: Collection[tuple[str, str]]  # (run, node) with a recent move
    ours: Collection[tuple[str, str]]  # (node, mark) of nodes that we took out

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
            return (
                "none",
                f"the scheduler has no node {need.node} here: it is in another partition, powered down or gone",
            )
        if node.is_out:
            return self._action_of_out(need, node, ways) if node.mark else ("none", "")
        if node.is_busy and not need.is_urgent:
            return "none", "it can wait until the node is idle"
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
            return "none", "it is out of service; it will be handed over when the node is idle"
        return "hand_over", ""

    def _stuck(self, need: _Need, ways: Sequence[Evacuation]) -> str:
        """Return why a run there should stay for now; a run without progress has nothing to lose."""
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
                    f"{way.run} would give its nodes back and wait: it needs {counted(needed, 'other idle node')}, and "
                    f"{max(0, self.num_idle)} are known"
                )
        return ""


def _urgency(need: _Need) -> tuple[int, bool, float, str]:
    issue = need.issue
    grade, confidence = -HEALTH_ACTIONS.index(need.action), issue.confidence if issue else 1.0
    return grade, not need.is_urgent, -confidence, need.node


def _of(issues: Sequence[Issue], node: str) -> list[Issue]:
    return [issue for issue in issues if issue.node == node]
