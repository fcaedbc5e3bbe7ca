"""Nodes of a cluster, in service or out of it: what a scheduler says of each, and taking one out and back.

Who takes a node out leaves a mark with it, and only a node that bears the mark is given back by it: what an operator,
a health check or a cloud has taken out stays out. Two schedulers have the same few verbs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MARK = "craton:"  # and the number of the action


@dataclass(frozen=True)
class ServiceNode:
    """One node as its scheduler has it."""

    name: str
    is_out: bool = False  # takes no new work, for whatever reason
    reason: str = ""
    is_busy: bool | None = False  # somebody's work is on it; None: not that anybody can see, which proves nothing
    mark: str = ""  # of who took it out, where that was Craton


class NodeService(Protocol):
    def nodes(self) -> list[ServiceNode]:
        """All nodes that there are for work to go to, and those that were taken out."""
        ...

    def take_out(self, node: str, mark: str, reason: str) -> None:
        """No new work goes there; what is on it goes on. SchedulerError where it is out already, by whomever."""
        ...

    def can_hand_over(self, action: str) -> bool:
        """Whether somebody here reboots or replaces machines that are handed over."""
        ...

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        """Asks whoever owns the machine to reboot or replace it; False: nobody does so here."""
        ...

    def give_back(self, node: str, mark: str) -> str:
        """Undoes `take_out`. Why not, where the node does not bear the mark any more; empty: done."""
        ...
