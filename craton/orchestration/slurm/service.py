"""Nodes of Slurm taken out of service and back: `scontrol update nodename=… state=drain reason=…`.

The reason carries the mark: `craton:4f2a reboot: XID 79, …`. On SageMaker HyperPod a node whose state is `fail` and
whose reason is exactly `Action:Reboot` or `Action:Replace` is rebooted or replaced by HyperPod itself. No mark fits in
there, so the mark of such a node goes into its comment.
"""

from __future__ import annotations

import re

from craton.job import Scheduler
from craton.orchestration.errors import SchedulerError
from craton.orchestration.service import MARK, ServiceNode
from craton.orchestration.slurm.records import AWAY, NodeRecord, nodes_of_text, records_of_text
from craton.orchestration.slurm.step import HYPERPOD
from craton.orchestration.slurm.tools import ask

# https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-replace-faulty-instance.html,
# read 2026-11-16: both are case-sensitive and the whole reason.
HYPERPOD_REASONS = {"reset": "Action:Reboot", "reboot": "Action:Reboot", "replace": "Action:Replace"}
WORKING = ("ALLOCATED", "MIXED", "COMPLETING")
OUT = tuple(state for state in AWAY if state != "POWERING_DOWN")  # which idle nodes of a cloud do, and come back from
REASON_LETTERS = 200
_MARK = re.compile(rf"{MARK}(\S+)")


class SlurmService:
    def __init__(self, scheduler: Scheduler, is_hyperpod: bool | None = None) -> None:
        self._partitions = frozenset((scheduler.partition or "").split(",")) - {""}  # a job may name several
        self._is_hyperpod = HYPERPOD.exists() if is_hyperpod is None else is_hyperpod

    def nodes(self) -> list[ServiceNode]:
        text = ask("scontrol", "show", "node")
        records = nodes_of_text(text)
        comments = {fields["NodeName"]: fields.get("Comment", "") for fields in records_of_text(text, "NodeName")}
        ours = [node for node in records if not self._partitions or self._partitions & set(node.partitions)]
        return [_node(node, comments.get(node.name, "")) for node in ours]

    def take_out(self, node: str, mark: str, reason: str) -> None:
        found = next((each for each in self.nodes() if each.name == node), None)
        if found is not None and found.is_out:  # while somebody was asked; a reason is overwritten without a word
            raise SchedulerError(f"{node} was taken out by somebody else meanwhile ({found.reason or 'no reason'})")
        _update(node, "state=drain", f"reason={_plain(f'{MARK}{mark} {reason}')}")

    def can_hand_over(self, action: str) -> bool:
        return self._is_hyperpod and action in HYPERPOD_REASONS

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        if not self.can_hand_over(action):
            return False
        _update(node, f"comment={MARK}{mark}")  # first: nobody must find the node out without its mark
        _update(node, "state=fail", f"reason={HYPERPOD_REASONS[action]}")
        return True

    def give_back(self, node: str, mark: str) -> str:
        found = next((each for each in self.nodes() if each.name == node), None)
        if found is None:
            return f"Slurm has no node {node}"
        if found.mark != mark:
            why = f": {found.reason}" if found.reason else ""
            return f"{node} is {'out by somebody else' if found.is_out else 'in service already'}{why}"
        _update(node, "state=resume")
        if found.reason in HYPERPOD_REASONS.values():
            _update(node, "comment=")
        return ""


def _node(record: NodeRecord, comment: str) -> ServiceNode:
    is_out = any(state in OUT for state in record.states)
    marked = _MARK.match(record.reason)
    if marked is None and record.reason in HYPERPOD_REASONS.values():
        marked = _MARK.match(comment)
    return ServiceNode(
        record.name,
        is_out=is_out,
        reason=record.reason if is_out else "",
        is_busy=any(state in WORKING for state in record.states),
        mark=marked[1] if marked and is_out else "",
    )


def _update(node: str, *words: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", node):
        raise SchedulerError(f"{node!r} is not one node of Slurm: give one name, without brackets or commas")
    ask("scontrol", "update", f"nodename={node}", *words)


def _plain(text: str) -> str:
    """One line without quotes, as long as tools show it."""
    return re.sub(r"[\s\"']+", " ", text).strip()[:REASON_LETTERS]
