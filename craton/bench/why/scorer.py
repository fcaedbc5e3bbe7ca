"""Score the outcomes of `craton bench why`: accuracy against the bars, confusion matrix, calibration of the confidence.
Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from craton.bench.why.benchmark import ScenarioOutcome
from craton.formatting import percent
from craton.observability.diagnosis import LAYERS, Verdict

LAYER_BAR, VICTIM_BAR = 0.95, 0.90
BINS = (0.0, 0.6, 0.7, 0.8, 0.9, 1.0)
GROUPS = ("quiet", "single", "double", "blind")
COLUMNS = ("none", "cannot tell", *LAYERS)


@dataclass(frozen=True)
class Bin:
    low: float
    high: float
    count: int
    mean_confidence: float
    right_share: float


@dataclass(frozen=True)
class Score:
    num_scenarios: int
    num_live: int
    groups: dict[str, tuple[int, int]]  # group → (right, of)
    layers: dict[str, tuple[int, int]]  # layer of a single fault → (right, of)
    layer_share: float  # right layer, of all scenarios with sufficient evidence
    blind_share: float  # "not enough evidence" (cannot_tell), where that is right
    victim_share: float
    num_victims: int
    false_alarms: int  # in runs without a fault, or before the fault
    num_quiet: int  # runs in which a false alarm is possible
    brier: float | None  # of the confidence of verdicts that name a layer
    bins: tuple[Bin, ...]
    confusion: dict[str, dict[str, int]]  # true layer → layer of the verdict → count
    misses: tuple[str, ...] = field(default=())

    @property
    def is_good(self) -> bool:
        return (
            self.layer_share >= LAYER_BAR
            and self.blind_share >= LAYER_BAR
            and self.victim_share >= VICTIM_BAR
            and not self.false_alarms
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_good": self.is_good}


def score(outcomes: Sequence[ScenarioOutcome]) -> Score:
    groups = {name: _count([judged for judged in outcomes if judged.group == name]) for name in GROUPS}
    singles = [judged for judged in outcomes if judged.group == "single"]
    layers = {name: _count([single for single in singles if single.true_layer == name]) for name in LAYERS}
    faulty = [judged for judged in outcomes if judged.group in ("single", "double")]
    victims = [judged for judged in faulty if judged.has_victim]
    named = [judged for judged in faulty if judged.verdict.layer]
    errors = [(judged.verdict.confidence - judged.is_right) ** 2 for judged in named]
    return Score(
        num_scenarios=len(outcomes),
        num_live=sum(judged.is_live for judged in outcomes),
        groups=groups,
        layers=layers,
        layer_share=_share(sum(element.is_right for element in faulty), len(faulty)),
        blind_share=_share(*groups["blind"]),
        victim_share=_share(sum(victim.is_victim_right for victim in victims), len(victims)),
        num_victims=len(victims),
        false_alarms=sum(_is_false_alarm(entry) for entry in outcomes),
        num_quiet=sum(item.group == "quiet" or item.is_live for item in outcomes),
        brier=sum(errors) / len(errors) if errors else None,
        bins=_bins(named),
        confusion=_confusion(outcomes),
        misses=tuple(_miss(outcome) for outcome in outcomes if _is_missed(outcome)),
    )


def _count(outcomes: Sequence[ScenarioOutcome]) -> tuple[int, int]:
    return sum(outcome.is_right for outcome in outcomes), len(outcomes)


def _share(right: int, of: int) -> float:
    return right / of if of else 1.0


def _bins(named: Sequence[ScenarioOutcome]) -> tuple[Bin, ...]:
    bins = []
    for low, high in pairwise(BINS):
        inside = [element for element in named if low < element.verdict.confidence <= high]
        if inside:
            mean = sum(entry.verdict.confidence for entry in inside) / len(inside)
            bins.append(Bin(low, high, len(inside), mean, _share(sum(item.is_right for item in inside), len(inside))))
    return tuple(bins)


def _confusion(outcomes: Sequence[ScenarioOutcome]) -> dict[str, dict[str, int]]:
    """Return the confusion matrix without double faults; a fault with two right layers counts for the one named."""
    table = {row: dict.fromkeys(COLUMNS, 0) for row in COLUMNS}
    for outcome in outcomes:
        if outcome.group == "double":
            continue
        named = _named_layer(outcome)
        truth = {"quiet": "none", "blind": "cannot tell"}.get(outcome.group, outcome.true_layer)
        if outcome.group == "single" and named in outcome.truths[0].layers:
            truth = named
        table[truth][named] += 1
    return table


def _named_layer(outcome: ScenarioOutcome) -> str:
    if outcome.verdict.cause == "cannot_tell":
        return "cannot tell"
    return (
        outcome.verdict.layer
        if outcome.verdict.layer and (outcome.verdict.is_alarm or outcome.group != "quiet")
        else "none"
    )


def _is_false_alarm(outcome: ScenarioOutcome) -> bool:
    return outcome.early is not None or (outcome.group == "quiet" and not outcome.is_right)


def _is_missed(outcome: ScenarioOutcome) -> bool:
    return not outcome.is_right or (outcome.has_victim and not outcome.is_victim_right) or outcome.early is not None


def _miss(outcome: ScenarioOutcome) -> str:
    truth = "; ".join(
        f"{'/'.join(one.layers)} {one.victim.leaf or one.victim.node or ''} "
        f"{f'rank {min(one.victim.ranks)}' if len(one.victim.ranks) == 1 else ''}".strip()
        for one in outcome.truths
    )
    early = f"; before the fault: {_words(outcome.early)}" if outcome.early else ""
    return f"{outcome.group}, {outcome.name}: expected {truth or 'no fault'}; got {_words(outcome.verdict)}{early}"


def _words(verdict: Verdict) -> str:
    who = f" rank {verdict.rank}" if verdict.rank is not None else ""
    message = f"{verdict.condition} {verdict.layer or '-'} {verdict.cause or '-'} {verdict.node}{who}"
    others = "".join(f" + {one.cause}" for one in verdict.others)
    return f"{message} ({percent(verdict.confidence)}){others}"
