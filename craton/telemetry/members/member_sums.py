"""All members of a run together: how many are in which state, their time and their dollars.

A member that runs on the nodes of its owner adds neither node-seconds nor dollars, because its owner pays for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

FORWARD = (
    "done",
    "ready",
    "running",
    "stopping",
    "starting",
    "restarting",
    "waiting",
)  # the first that occurs is shown as N of M
TROUBLE = ("failed", "lost", "stuck", "stopped", "unreadable")


@dataclass(frozen=True)
class MembersSum:
    """The direct members of a run by state; time and dollars with the members of members."""

    states: dict[str, int] = field(default_factory=dict)  # state for users → number of members in it
    node_seconds: float = 0.0  # on nodes of their own
    cost_dollars: float | None = None  # for these nodes; None: no price is known
    ledger: dict[str, float] = field(default_factory=dict)  # node-seconds of all members by kind

    @property
    def num_members(self) -> int:
        return sum(self.states.values())

    @property
    def text(self) -> str:
        """`3 of 6 members done, 1 failed, 2 waiting`."""
        number = self.num_members
        members = f"{number:,} member{'' if number == 1 else 's'}"
        present = [state for state in FORWARD if self.states.get(state)]
        others = [*TROUBLE, *(state for state in self.states if state not in (*FORWARD, *TROUBLE)), *present[1:]]
        first = f"{self.states[present[0]]:,} of {members} {present[0]}" if present else members
        counts = [f"{self.states[state]:,} {state}" for state in others if self.states.get(state)]
        return ", ".join([first, *counts]) if present else f"{first}: {', '.join(counts)}"


def members_sum_of(document: Any) -> MembersSum | None:
    """Return a sum that was stored as JSON; None if it is damaged."""
    if not isinstance(document, Mapping):
        return None
    states, ledger = document.get("states"), document.get("ledger")
    seconds, dollars = document.get("node_seconds"), document.get("cost_dollars")
    if not _are_numbers(states) or not _are_numbers(ledger) or not _is_number(seconds):
        return None
    if dollars is not None and not _is_number(dollars):
        return None
    return MembersSum({state: int(number) for state, number in states.items()}, seconds, dollars, dict(ledger))


def _are_numbers(document: Any) -> TypeGuard[Mapping[str, float]]:
    return isinstance(document, Mapping) and all(_is_number(value) for value in document.values())


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
