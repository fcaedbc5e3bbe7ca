"""Take Slurm nodes out of service and back: `scontrol update nodename=… state=drain reason=…`.

The reason carries the mark: `craton:4f2a reboot: XID 79, …`. SageMaker HyperPod reboots or replaces a node whose state
is `fail` and whose reason is exactly `Action:Reboot` or `Action:Replace`. There the mark goes into the node's comment.

Powered-down cloud nodes are names without a machine: they are not listed, unless they were taken out before.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from craton.job.cluster import SchedulerSettings
from craton.orchestration.errors import SchedulerError
from craton.orchestration.node_maintenance import MARK, ServiceNode
from craton.orchestration.slurm.records import AWAY, NodeRecord, nodes_of_text, records_of_text
from craton.orchestration.slurm.step import HYPERPOD
from craton.orchestration.slurm.tools import ask

# https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-replace-faulty-instance.html,
# read 2026-11-16: both are case-sensitive and the whole reason.
HYPERPOD_REASONS = {"reset": "Action:Reboot", "reboot": "Action:Reboot", "replace": "Action:Replace"}
WORKING = ("ALLOCATED", "MIXED", "COMPLETING")
OUT = tuple(state for state in AWAY if state != "POWERING_DOWN")  # normal for idle cloud nodes, which come back
NO_MACHINE = ("FUTURE", "POWERED_DOWN", "POWERING_DOWN")
REASON_LETTERS = 200
_MARK = re.compile(rf"{MARK}(\S+)")


class SlurmService:
    def __init__(self, scheduler: SchedulerSettings, is_hyperpod: bool | None = None) -> None:
        self._partitions = frozenset((scheduler.partition or "").split(",")) - {""}  # a job may name several
        self._is_hyperpod = HYPERPOD.exists() if is_hyperpod is None else is_hyperpod

    def nodes(self) -> list[ServiceNode]:
        """Return the nodes of the partitions, else of the default partition, else of all partitions."""
        partitions = self._partitions or default_partitions(ask("scontrol", "show", "partition"))
        return service_nodes(ask("scontrol", "show", "node"), partitions)

    def take_out(self, node: str, mark: str, reason: str) -> None:
        record = _found(node)
        if record is not None and record.is_out:  # changed meanwhile; Slurm would silently overwrite the reason
            raise SchedulerError(f"{node} was taken out by someone else meanwhile ({record.reason or 'no reason'})")
        _update(node, "state=drain", f"reason={_plain(f'{MARK}{mark} {reason}')}")

    def can_hand_over(self, action: str) -> bool:
        return self._is_hyperpod and action in HYPERPOD_REASONS

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        if not self.can_hand_over(action):
            return False
        record = _found(node)
        if record is None or record.mark != mark:  # changed meanwhile; another's node is not replaced
            now = "in service" if record is None or not record.is_out else f"taken out by someone else: {record.reason}"
            raise SchedulerError(f"{node} is not handed over to HyperPod: meanwhile it is {now}")
        _update(node, f"comment={MARK}{mark}")  # first: the node must never be out without its mark
        _update(node, "state=fail", f"reason={HYPERPOD_REASONS[action]}")
        return True

    def give_back(self, node: str, mark: str) -> str:
        record = _found(node)
        if record is None:
            return f"Slurm has no node {node}"
        if record.mark != mark:
            why = f": {record.reason}" if record.reason else ""
            return f"{node} is {'taken out by someone else' if record.is_out else 'already in service'}{why}"
        _update(node, "state=resume")
        if record.reason in HYPERPOD_REASONS.values():
            _update(node, "comment=")
        return ""


def service_nodes(text: str, partitions: Collection[str]) -> list[ServiceNode]:
    """Parse `scontrol show node`: nodes of these partitions, or of all, that have a machine or were taken out."""
    comments = _comments(text)
    return [
        _node(record, comments[record.name])
        for record in nodes_of_text(text)
        if _counts(record) and (not partitions or not set(partitions).isdisjoint(record.partitions))
    ]


def default_partitions(text: str) -> frozenset[str]:
    """Parse the default partitions from `scontrol show partition`."""
    records = records_of_text(text, "PartitionName")
    return frozenset(fields["PartitionName"] for fields in records if fields.get("Default") == "YES")


def _counts(record: NodeRecord) -> bool:
    """Whether to list a node. A drained node that powered down still counts as out, so that no further one is taken."""
    is_taken = any(state in OUT and state != "NOT_RESPONDING" for state in record.states)
    return is_taken or not any(state in NO_MACHINE for state in record.states)


def _found(node: str) -> ServiceNode | None:
    """Find a node in any partition."""
    text = ask("scontrol", "show", "node")
    comments = _comments(text)
    return next((_node(item, comments[node]) for item in nodes_of_text(text) if item.name == node), None)


def _comments(text: str) -> dict[str, str]:
    return {fields["NodeName"]: fields.get("Comment", "") for fields in records_of_text(text, "NodeName")}


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
        raise SchedulerError(f"{node!r} is not a single Slurm node name; give one name, without brackets or commas")
    ask("scontrol", "update", f"nodename={node}", *words)


def _plain(text: str) -> str:
    """Return one line without quotes, at the length that tools display."""
    return re.sub(r"[\s\"']+", " ", text).strip()[:REASON_LETTERS]
