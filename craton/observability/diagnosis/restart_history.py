"""Restart loops: how often a run restarted, which rank or node is always involved, and how it fails.

A single look finds such a run healthy or recovering; only its generations show the loop. Requested changes, and
restarts before the run was last started, do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from craton.observability.diagnosis.snapshot import Restart, Snapshot
from craton.observability.diagnosis.tables import threshold

T = TypeVar("T", int, str)
COMMON_SHARE = 0.75  # of the restarts that must have the same victim
_RANK = re.compile(r"\brank (\d+)\b(?: on ([\w.-]+))?")
LOST = re.compile(r"(?:^|; )([\w.-]+) is lost: ([^;\n]+)", re.MULTILINE)  # node and reason, as agents report it
# As agents and torchrun report it: a signal that a program does not send itself, its exit code, or a stop.
_FROM_OUTSIDE = re.compile(
    r"killed by SIG(?:KILL|TERM|INT|HUP)|exited with code 1(?:37|43)\b|Signal (?:9|15) \(SIG|stopped by a signal"
)


@dataclass(frozen=True)
class Loop:
    """The common features of the restarts of the last hour."""

    restarts: tuple[Restart, ...]
    seconds: float  # since the first failure
    lost_share: float  # of these seconds
    rank: int | None  # common victim; None: not always the same
    node: str  # common victim; "": not always the same
    way: str  # lost (the node), killed (from outside), broke (by itself), mixed


def find_loop(snapshot: Snapshot) -> Loop | None:
    """Return the restart loop; None if there were too few restarts."""
    restarts = snapshot.run.recent_restarts
    if len(restarts) < threshold("restarts_per_hour"):
        return None
    seconds = max(1.0, snapshot.moment - min(element.broke_at for element in restarts))
    lost = sum(max(entry.lost_seconds or 0.0, entry.moment - entry.broke_at) for entry in restarts)
    victims = [_victim(item.reason, snapshot) for item in restarts]
    rank = _common(number for number, _ in victims)
    node = _common(name for _, name in victims) or ""
    if rank is not None and not node:
        rank_state = snapshot.rank(rank)
        node = rank_state.node if rank_state is not None else ""
    way = _common(_way(restart.reason) for restart in restarts) or "mixed"
    return Loop(restarts, seconds, min(1.0, lost / seconds), rank, node, way)


def _victim(reason: str, snapshot: Snapshot) -> tuple[int | None, str | None]:
    """Return the rank and node that a reason names first."""
    if lost := LOST.match(reason):
        return None, lost[1]
    named = _RANK.search(reason)
    if named is None:
        return None, None
    rank_state = snapshot.rank(int(named[1]))
    return int(named[1]), named[2] or (rank_state.node if rank_state is not None else None)


def _way(reason: str) -> str:
    if LOST.match(reason):
        return "lost"
    return "killed" if _FROM_OUTSIDE.search(reason) else "broke"


def _common(values: Iterable[T | None]) -> T | None:
    """Return the most common value; None if the values differ or are not known."""
    listed = list(values)
    counts = Counter(item for item in listed if item is not None)
    if not counts:
        return None
    first, times = counts.most_common(1)[0]
    return first if times >= COMMON_SHARE * len(listed) else None
