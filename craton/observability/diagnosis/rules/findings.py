"""Shared by all rules: make a finding from evidence, a victim and the symptom that it may explain."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from craton.observability.diagnosis.verdict import Condition, Finding, Symptoms

SHOWN_NAMES = 4
TALKING = ("communication",)  # phases that the network may slow
CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
    signal.SIGSYS,  # a system call that a filter (seccomp) forbids
)


def finding(
    symptoms: Symptoms,
    cause: str,
    sentence: str,
    explains: tuple[Condition, ...],
    *,
    evidence: Iterable[str] = (),
    base: float = 1.0,
    node: str = "",
    rank: int | None = None,
    leaf: str = "",
    phases: tuple[str, ...] = (),
    is_risk: bool = False,
    health: str = "",
    moment: float | None = None,
    is_urgent: bool = False,
    first_hand: float | None = None,
    detail: str = "",
) -> list[Finding]:
    """Return one finding, as a list to extend; empty if it explains no symptom of the run and is not a risk.

    `base` is the quality of the evidence alone; another victim or phase than that of the symptom lowers the strength.
    """
    share, number = symptoms.fit(explains, node, rank, leaf, phases)
    if number is None and not is_risk:
        return []
    lost = None if number is None else symptoms.all[number].lost_share
    strength = base if number is None else base * share
    lines = tuple(evidence) or (sentence,)
    where = (node, rank, leaf)
    return [
        Finding(
            cause,
            explains,
            strength,
            sentence,
            lines,
            *where,
            lost,
            is_risk,
            number,
            base,
            health,
            moment,
            is_urgent,
            first_hand,
            detail,
        )
    ]


def named(names: Sequence[object], what: str = "") -> str:
    """Return `node-1, node-2 and 3 more`."""
    shown = ", ".join(str(name) for name in names[:SHOWN_NAMES])
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{what}{shown}{more}"
