"""Plan test-time compute: accuracy, tokens, KV cache, seconds and dollars of strategies, and the best under a budget.

Guarantees: pure functions; the same input gives the same plan. A measured row is predicted from fewer samples than it
was measured with (at most a quarter, and at least two where it has four), so that the comparison says something.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from craton.formatting import counted
from craton.job.sections.strategy import DEFAULT_STOP, LOGPROBS
from craton.planning.setting import PlanError
from craton.planning.strategies.budget import ProblemBudget
from craton.planning.strategies.early_stop import stopped_votes
from craton.planning.strategies.evaluation_file import MeasuredRow, SampleRecord
from craton.planning.strategies.posterior import KnownAccuracy
from craton.planning.strategies.prediction import AccuracyCurve, PredictedAccuracy
from craton.planning.strategies.price import PriceModel, ProblemPrice
from craton.planning.strategies.usage import PlannedUsage, SampleLengths, StrategyShape, strategy_usage
from craton.planning.strategies.votes import MAX_VOTES

SIZES = (2, 4, 8, 16, 32, 64)
STOPPED_SIZES = (8, 16, 32)
CLOSE = 0.01  # accuracies that differ less are equal: the cheaper one is better


@dataclass(frozen=True)
class PlannedStrategy:
    """One strategy. `predicted` None: its accuracy is known only where it was measured."""

    shape: StrategyShape
    name: str
    n: int
    needs_truth: bool  # a verifier that knows the right answer
    predicted: PredictedAccuracy | None
    measured: MeasuredRow | None
    usage: PlannedUsage | None  # None: lengths are not known
    price: ProblemPrice
    dollars_per_solved: tuple[float, float, float] | None  # with the accuracy's interval: middle, low, high
    is_affordable: bool
    is_on_front: bool = False

    @property
    def accuracy(self) -> float | None:
        """The measured accuracy, else the predicted one."""
        if self.measured is not None:
            return self.measured.accuracy
        return self.predicted.accuracy if self.predicted is not None else None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if self.measured is None or self.predicted is None or not self.predicted.accuracy:
            return None
        return self.measured.accuracy / self.predicted.accuracy

    @property
    def is_inside(self) -> bool | None:
        """Whether what was measured lies in the predicted interval."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted.low - 1e-9 <= self.measured.accuracy <= self.predicted.high + 1e-9

    @property
    def cost(self) -> float | None:
        """Dollars per problem, or where they are not known completion tokens."""
        if self.price.dollars is not None:
            return self.price.dollars
        return self.usage.completion_tokens if self.usage is not None else float(self.n)


@dataclass(frozen=True)
class StrategiesPlan:
    """The plan of all strategies on one suite."""

    title: str
    known: KnownAccuracy
    lengths: SampleLengths | None
    price_source: str
    budget: ProblemBudget | None
    rows: tuple[PlannedStrategy, ...]
    best: PlannedStrategy | None  # without a verifier that knows the answer
    best_with_truth: PlannedStrategy | None
    notes: tuple[str, ...]
    lengths_source: str = ""  # how the lengths are known; empty: from the samples, or given


def plan_strategies(
    record: SampleRecord,
    prices: PriceModel,
    budget: ProblemBudget | None = None,
    shapes: Sequence[StrategyShape] = (),
    lengths: SampleLengths | None = None,
) -> StrategiesPlan:
    """Plan the usual strategies, those that were measured, and `shapes`; `lengths` replace those of the record."""
    lengths_source = record.lengths_source if lengths is None else ""
    lengths = lengths or record.lengths
    wanted_only = bool(shapes)
    wanted = shapes or (*_usual(record), *record.wanted)
    shapes = list(dict.fromkeys((StrategyShape("sample"), *wanted, *(row.shape for row in record.measured))))
    shapes = [
        shape for shape in shapes if shape.kind == "sample" or shape.n > 1 or shape.kind in ("beam", "tree", "budget")
    ]
    too_many = [shape for shape in shapes if shape.kind == "vote" and shape.n > MAX_VOTES]
    if too_many:
        raise PlanError(f"a vote of {too_many[0].n} samples is not planned; allowed: up to {MAX_VOTES}")
    if budget is not None and lengths is None:
        raise PlanError("--budget needs the tokens of a prompt and a completion; give --tokens PROMPT,COMPLETION")
    if not wanted_only:
        kinds = list(dict.fromkeys(shape.name for shape in shapes))
        shapes.sort(key=lambda shape: (kinds.index(shape.name), shape.n))
    measured = {row.shape: row for row in record.measured}
    rows = [_planned(record, prices, budget, lengths, shape, measured.get(shape)) for shape in shapes]
    front = _front(rows)
    rows = [replace(row, is_on_front=row.shape in front) for row in rows]
    return StrategiesPlan(
        record.title,
        record.known,
        lengths,
        prices.source,
        budget,
        tuple(rows),
        _best(row for row in rows if not row.needs_truth),
        _best(row for row in rows if row.needs_truth),
        (*record.notes, *_notes(record, lengths, rows)),
        lengths_source,
    )


def _usual(record: SampleRecord) -> list[StrategyShape]:
    sizes = sorted({*SIZES, *(size for size in record.known.pass_at if size > 1)})
    shapes = [StrategyShape("best_of", size) for size in sizes]
    shapes += [StrategyShape("vote", size) for size in sizes if 2 < size <= MAX_VOTES]
    return shapes + [StrategyShape("vote", size, DEFAULT_STOP) for size in STOPPED_SIZES]


def _planned(
    record: SampleRecord,
    prices: PriceModel,
    budget: ProblemBudget | None,
    lengths: SampleLengths | None,
    shape: StrategyShape,
    measured: MeasuredRow | None,
) -> PlannedStrategy:
    if shape.kind == "sample" and measured is None and 1 in record.known.pass_at:
        measured = MeasuredRow(shape, record.known.pass_at[1])
    curve = _curve(_knowledge(record.known, shape, measured)) if record.known.most_samples else None
    predicted = _predicted(curve, shape, measured, record.known.samples) if curve else None
    votes = (0.0, 1.0)
    if curve and shape.kind == "vote" and shape.stop:
        stopped = stopped_votes(shape.n, shape.stop)
        votes = curve.mean_by_vote(stopped.samples), curve.mean_by_vote(stopped.rounds)
    usage = strategy_usage(shape, lengths, *votes) if lengths is not None else None
    price = prices.price(usage) if usage is not None else ProblemPrice()
    row = PlannedStrategy(
        shape,
        shape.name,
        shape.n,
        shape.needs_truth,
        predicted,
        measured,
        usage,
        price,
        None,
        budget is None or (usage is not None and budget.allows(usage, price)),
    )
    return replace(row, dollars_per_solved=_per_solved(row))


def _knowledge(known: KnownAccuracy, shape: StrategyShape, measured: MeasuredRow | None) -> KnownAccuracy:
    """Return what a prediction may know: of samples that it is compared with, a quarter of their number."""
    if measured is None or not measured.is_same_samples:
        return known
    limit = max(shape.n // 4, 2 if shape.n >= 4 else 1)
    passes = {size: share for size, share in known.pass_at.items() if size <= limit}
    votes = {size: share for size, share in known.majority_at.items() if size <= limit}
    return KnownAccuracy(known.num_problems, passes or dict([min(known.pass_at.items())]), votes, known.samples)


def _curve(known: KnownAccuracy) -> AccuracyCurve:
    key = tuple(tuple(sorted(part.items())) for part in (known.pass_at, known.majority_at, known.counts))
    return _cached_curve(known.num_problems, known.samples, *key)


@cache
def _cached_curve(problems: int, samples: int | None, passes: tuple, votes: tuple, counts: tuple) -> AccuracyCurve:
    return AccuracyCurve(KnownAccuracy(problems, dict(passes), dict(votes), samples, dict(counts)))


def _predicted(
    curve: AccuracyCurve, shape: StrategyShape, measured: MeasuredRow | None, samples: int | None
) -> PredictedAccuracy | None:
    estimated_from = samples if measured is not None and measured.is_same_samples else None
    if shape.needs_truth:
        return curve.best_of(shape.n, estimated_from)
    if shape.kind == "vote" and shape.stop:
        return curve.vote_by(stopped_votes(shape.n, shape.stop).wins, shape.n)
    if shape.kind == "vote":
        return curve.vote(shape.n, estimated_from)
    if shape.kind == "sample" and measured is None:
        return curve.best_of(1)
    return None


def _per_solved(row: PlannedStrategy) -> tuple[float, float, float] | None:
    if row.price.dollars is None or not row.accuracy:
        return None
    source = row.predicted if row.measured is None else row.measured
    low, high = (source.low, source.high) if source is not None else (None, None)
    dollars = row.price.dollars
    middle = dollars / row.accuracy
    return middle, dollars / high if high else middle, dollars / low if low else math.inf if low == 0 else middle


def _front(rows: Sequence[PlannedStrategy]) -> set[StrategyShape]:
    """Return the strategies that no cheaper one reaches, without and with a verifier that knows the answer."""
    front = set()
    for needs_truth in (False, True):
        best = -1.0
        found = [row for row in rows if row.accuracy is not None and (needs_truth or not row.needs_truth)]
        for row in sorted(found, key=lambda item: (item.cost or 0.0, -(item.accuracy or 0.0))):
            assert row.accuracy is not None
            if row.accuracy > best:
                best = row.accuracy
                front |= {row.shape} if row.needs_truth == needs_truth else set()
    return front


def _best(rows: Iterable[PlannedStrategy]) -> PlannedStrategy | None:
    found = [(row.accuracy, row) for row in rows if row.accuracy is not None and row.is_affordable]
    if not found:
        return None
    top = max(accuracy for accuracy, _ in found)
    return min((row for accuracy, row in found if accuracy >= top - CLOSE), key=lambda row: row.cost or 0.0)


def _notes(record: SampleRecord, lengths: SampleLengths | None, rows: Sequence[PlannedStrategy]) -> list[str]:
    known = record.known
    notes = []
    if not known.most_samples:
        notes.append(
            "no accuracy is known, so no strategy is best, and a vote that ends early has the cost of a full one: "
            "run `craton eval MODEL SUITE --samples 4`, or give --accuracy 1:0.5"
        )
    elif any(row.accuracy is None for row in rows):
        notes.append(
            "beam and tree search, budgets and other scores: their accuracy is known only where it was measured"
        )
    if any(row.shape.score not in ("", LOGPROBS) for row in rows):
        notes.append("tokens, seconds and dollars are those of the samples; a judge or reward model comes on top")
    if known.most_samples == 1:
        notes.append(
            "only one sample of each problem is known: how unequal the problems are is assumed from published models; "
            "evaluate with n: 4 for narrower intervals"
        )
    if known.most_samples and not any(size > 2 for size in known.majority_at):
        notes.append("no vote was counted: how often wrong answers agree is assumed from published models")
    if lengths is None:
        notes.append("tokens, seconds and dollars need the lengths of a sample: give --tokens PROMPT,COMPLETION")
    if known.counts:
        samples = {size for _, size in known.counts}
        notes.append(
            f"predicted from the correct samples of each of {counted(known.num_problems, 'problem')}, "
            f"{'–'.join(str(size) for size in sorted({min(samples), max(samples)}))} samples each"
        )
    return notes
