"""Scores the records of live faults against fixed bars. Pure functions.

A verdict has the right layer if its layer and its condition are among the expected ones; "not enough evidence" is wrong
for layer and victim. The remedy is judged by regular expressions that were written with the fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, LiveFault
from craton.bench.why.faults.watch import FaultRecord, Look
from craton.observability.diagnosis import Verdict

LAYER_BAR, VICTIM_BAR, REMEDY_BAR, CONFIDENT_BAR = 0.85, 0.85, 0.80, 0.90
CONFIDENT = 0.9  # verdicts from this confidence on must be right in CONFIDENT_BAR of cases
SECONDS_BAR = 10.0  # median time to a right verdict
MAX_NOT_RUN = 6
CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True)
class Judgement:
    """One fault, judged."""

    name: str
    family: str
    is_layer_right: bool
    is_victim_right: bool | None  # None: not judged
    is_remedy_useful: bool
    is_false_health: bool  # "runs well" although the fault is in effect
    confidence: float
    right_seconds: float | None  # from the onset to the first right verdict that stayed right; None: never
    had_early_alarm: bool
    said: str  # condition, layer, cause, victim
    expected: str
    sentence: str


@dataclass(frozen=True)
class Tally:
    """Shares of a family or of all faults."""

    faults: int
    layers: int
    victims: int
    judged_victims: int
    remedies: int
    false_health: int
    confident: int
    confident_right: int
    early_alarms: int
    median_seconds: float | None


@dataclass(frozen=True)
class LiveScore:
    total: Tally
    families: dict[str, Tally]
    judgements: tuple[Judgement, ...]
    not_run: dict[str, str]  # fault → what this machine lacks
    errors: dict[str, str]  # fault → why the bench could not run it

    @property
    def failures(self) -> list[str]:
        """The bars that are missed."""
        total = self.total
        bars = {
            "layer": _share(total.layers, total.faults) >= LAYER_BAR,
            "victim": _share(total.victims, total.judged_victims) >= VICTIM_BAR,
            "remedy": _share(total.remedies, total.faults) >= REMEDY_BAR,
            'false "runs well"': total.false_health == 0,
            "confident verdicts": _share(total.confident_right, total.confident) >= CONFIDENT_BAR,
            "time": total.median_seconds is not None and total.median_seconds <= SECONDS_BAR,
            "faults not run": len(self.not_run) <= MAX_NOT_RUN,
            "faults that the bench could not run": not self.errors,
        }
        return [name for name, is_met in bars.items() if not is_met]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "failures": self.failures}


def score(records: Sequence[FaultRecord]) -> LiveScore:
    judgements = tuple(judge(record) for record in records if record.final is not None)
    families = dict.fromkeys(item.family for item in judgements)
    return LiveScore(
        total=tally(judgements),
        families={name: tally([item for item in judgements if item.family == name]) for name in families},
        judgements=judgements,
        not_run={record.fault.name: record.not_run for record in records if record.not_run},
        errors={record.fault.name: record.error for record in records if record.error},
    )


def tally(judgements: Sequence[Judgement]) -> Tally:
    confident = [item for item in judgements if item.confidence >= CONFIDENT]
    seconds = [item.right_seconds for item in judgements if item.right_seconds is not None]
    victims = [item.is_victim_right for item in judgements if item.is_victim_right is not None]
    return Tally(
        faults=len(judgements),
        layers=sum(item.is_layer_right for item in judgements),
        victims=sum(victims),
        judged_victims=len(victims),
        remedies=sum(item.is_remedy_useful for item in judgements),
        false_health=sum(item.is_false_health for item in judgements),
        confident=len(confident),
        confident_right=sum(item.is_layer_right for item in confident),
        early_alarms=sum(item.had_early_alarm for item in judgements),
        median_seconds=median(seconds) if seconds else None,
    )


def judge(record: FaultRecord) -> Judgement:
    """Judge the last verdict of a record."""
    verdict, expected = record.final, record.fault.expected
    assert verdict is not None, "a fault without verdicts is an error of the bench"
    return Judgement(
        name=record.fault.name,
        family=record.fault.family,
        is_layer_right=is_layer_right(verdict, expected),
        is_victim_right=is_victim_right(verdict, record.fault),
        is_remedy_useful=is_remedy_useful(verdict, expected),
        is_false_health=is_false_health(verdict, expected, record.has_ended),
        confidence=verdict.confidence,
        right_seconds=right_seconds(record.looks, record.fault),
        had_early_alarm=bool(record.early),
        said=_named(verdict.condition, verdict.layer, verdict.cause, verdict.node, verdict.rank),
        expected=f"{' or '.join(expected.conditions)}, {' or '.join(expected.layers)}, {_victim_text(expected)}",
        sentence=verdict.sentence,
    )


def is_layer_right(verdict: Verdict, expected: ExpectedVerdict) -> bool:
    return (
        verdict.cause not in ("", CANNOT_TELL)
        and verdict.layer in expected.layers
        and verdict.condition in expected.conditions
    )


def is_victim_right(verdict: Verdict, fault: LiveFault) -> bool | None:
    """Return whether the verdict names the victim; None if the fault has none to judge."""
    expected = fault.expected
    if expected.ranks is None and expected.node is None:
        return None
    if verdict.cause in ("", CANNOT_TELL):
        return False
    if verdict.rank is not None:
        return expected.ranks is not None and verdict.rank in expected.ranks
    if expected.node is not None:
        return verdict.node == expected.node
    if expected.ranks:
        return False
    return not verdict.node or fault.job.nodes == 1  # all ranks alike: on one node its name says nothing


def is_remedy_useful(verdict: Verdict, expected: ExpectedVerdict) -> bool:
    """Return whether the verdict names the cause or the next step, and that its action does not mislead."""
    text = " ".join((verdict.sentence, verdict.because, verdict.action, *verdict.evidence))
    is_named = any(re.search(pattern, text, re.IGNORECASE) for pattern in expected.remedy)
    is_misleading = any(re.search(pattern, verdict.action, re.IGNORECASE) for pattern in expected.misleading)
    return is_named and not is_misleading


def is_false_health(verdict: Verdict, expected: ExpectedVerdict, has_ended: bool) -> bool:
    if verdict.condition == "healthy":
        return not verdict.cause
    return verdict.condition == "done" and not has_ended and "done" not in expected.conditions


def right_seconds(looks: Sequence[Look], fault: LiveFault) -> float | None:
    """Return the time of the first right verdict after which all were right."""
    found = None
    for item in reversed(looks):
        is_right = is_layer_right(item.verdict, fault.expected) and is_victim_right(item.verdict, fault) is not False
        if not is_right:
            break
        found = item.seconds
    return found


def _share(right: int, of: int) -> float:
    return right / of if of else 1.0


def _victim_text(expected: ExpectedVerdict) -> str:
    if expected.ranks is None and expected.node is None:
        return "any victim"
    ranks = [f"rank {rank}" for rank in sorted(expected.ranks or ())]
    return " or ".join([*ranks, *([expected.node] if expected.node is not None else [])]) or "no rank in particular"


def _named(condition: str, layer: str, cause: str, node: str, rank: int | None) -> str:
    victim = f"rank {rank}" if rank is not None else node
    return ", ".join(word for word in (condition, layer, cause, victim) if word)
