"""The interface for taking a cluster's nodes out of service and back, for Slurm and Kubernetes.

Taking a node out leaves a mark on it, and only a node with the mark is put back: one that an operator, a health check
or a cloud took out stays out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MARK = "craton:"  # followed by the action's ID


@dataclass(frozen=True)
class ServiceNode:
    """A node's state in its scheduler."""

    name: str
    is_out: bool = False  # takes no new work, for whatever reason
    reason: str = ""
    is_busy: bool | None = False  # a job runs on it; None: unknown, because not all jobs are visible
    mark: str = ""  # of the action that took it out, if that was Craton's


class NodeService(Protocol):
    def nodes(self) -> list[ServiceNode]:
        """Return all nodes that jobs can use, and those taken out."""
        ...

    def take_out(self, node: str, mark: str, reason: str) -> None:
        """Stop new work on a node; running work continues. SchedulerError if it is already out."""
        ...

    def can_hand_over(self, action: str) -> bool:
        """Whether the cluster's provider reboots or replaces nodes on request."""
        ...

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        """Request a reboot or replacement from the cluster's provider; False if it offers none."""
        ...

    def give_back(self, node: str, mark: str) -> str:
        """Undo `take_out`. Return why not if the node no longer has the mark; empty on success."""
        ...
