"""Measures the planner's predictions of published runs, on held-out rows.

Holdout `group` (the default) predicts a run of the shipped corpus with constants fitted without any run of its group
(source family, GPU, model). The other holdouts leave out more: `family` all runs of its publisher, as for an unknown
cluster; `model` all runs of its model, at any depth; `gpu` all runs on its GPU; `release` all runs of that release of
its family. With `handed_runs`, `calibrate` gets some of a left-out family's runs on one GPU. Runs that repeat a
configuration (`dup_group`) are never in both the training and the test set. With holdout `group`, a run outside the
corpus is predicted with the whole corpus without its repetitions, as for a user.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from craton.job.model import ModelShape
from craton.planning.calibration import (
    Case,
    LoggedRun,
    Skipped,
    calibrate_from,
    case_machine,
    corpus,
    corpus_fit,
    effect_labels,
    load_cases,
    predict,
    profile_from_fit,
    row_of,
    with_traits,
)
from craton.planning.fitting import Fit, Prediction
from craton.planning.step import TRAINING_STEP, StepTerms

Holdout = Literal["group", "family", "model", "gpu", "release", "none"]
Progress = Callable[[int, int], None]

GIVEN_SEEDS = (0, 1, 2)  # seeds that select the runs for `calibrate`
SMALLEST_CLUSTER = 8  # minimum runs of a family on a GPU: some are for `calibrate`, the rest for the test
MANY_GPUS = 256
GOOD_CHOICE = 1.05  # a choice is right when it measured within 5% of the best
MIN_LAYOUTS = 3

# What a holdout leaves out: the runs that share this with the predicted one.
HOLDOUT_KEYS: dict[Holdout, Callable[[Case], Hashable]] = {
    "group": lambda case: case.group,
    "family": lambda case: case.family,
    "model": lambda case: _sizes(case.shape),
    "gpu": lambda case: case.machine.gpu,
    "release": lambda case: (case.family, case.release),
}


@dataclass(frozen=True)
class CaseResult:
    case: Case
    prediction: Prediction

    @property
    def error(self) -> float:
        return self.prediction.seconds / self.case.measured_step_seconds - 1.0

    @property
    def inside(self) -> bool:
        return self.prediction.low <= self.case.measured_step_seconds <= self.prediction.high

    @property
    def width(self) -> float:
        return self.prediction.high / self.prediction.low


class Scored(Protocol):
    """A prediction beside its measurement."""

    @property
    def error(self) -> float: ...
    @property
    def inside(self) -> bool: ...
    @property
    def width(self) -> float: ...


@dataclass(frozen=True)
class Bench:
    results: list[CaseResult]
    skipped: list[Skipped]
    holdout: Holdout
    given: int


@dataclass(frozen=True)
class Statistics:
    n: int
    median: float  # absolute error
    mean: float
    p90: float
    bias: float
    inside: float  # share of measurements inside the 80% interval
    width: float  # median high / low


@dataclass(frozen=True)
class LayoutDecision:
    """The planner's choice among several measured layouts of one model on one cluster, against the best."""

    family: str
    gpu: str
    num_gpus: int
    model: str
    sequence: int
    layouts: int
    chosen: str
    loss: float  # measured seconds per token of the chosen layout over the best one's, minus one


def bench_plan(
    path: str | Path, holdout: Holdout = "group", handed_runs: int = 0, progress: Progress | None = None
) -> Bench:
    """Predict every case in a file."""
    cases, skipped = load_cases(path)
    if holdout == "none":
        return Bench([CaseResult(case, _predict(corpus_fit(), case)) for case in cases], skipped, holdout, handed_runs)
    if handed_runs:
        results, too_few = _with_some_given(cases, handed_runs, progress)
        return Bench(results, [*skipped, *too_few], holdout, handed_runs)
    key_of = HOLDOUT_KEYS[holdout]
    corpus_ids = {case.id for case in corpus()}
    jobs: dict[Hashable, list[Case]] = defaultdict(list)
    for case in cases:
        left_out = holdout != "group" or case.id in corpus_ids
        jobs[key_of(case) if left_out else ("new", case.dup_group)].append(case)
    predictions: dict[Case, Prediction] = {}
    for done, (key, members) in enumerate(jobs.items()):
        repeated = {case.dup_group for case in members}
        rest = [case for case in corpus() if case.dup_group not in repeated and key_of(case) != key]
        fit = corpus_fit() if len(rest) == len(corpus()) else Fit(TRAINING_STEP, [row_of(case) for case in rest])
        predictions |= {case: _predict(fit, case) for case in members}
        if progress:
            progress(done + 1, len(jobs))
    return Bench([CaseResult(case, predictions[case]) for case in cases], skipped, holdout, handed_runs)


def statistics(results: Iterable[Scored]) -> Statistics | None:
    chosen = list(results)
    if not chosen:
        return None
    error = np.array([result.error for result in chosen])
    size = np.abs(error)
    return Statistics(
        n=len(chosen),
        median=float(np.median(size)),
        mean=float(size.mean()),
        p90=float(np.quantile(size, 0.9)),
        bias=float(error.mean()),
        inside=float(np.mean([result.inside for result in chosen])),
        width=float(np.median([result.width for result in chosen])),
    )


def tables(bench: Bench) -> dict[str, dict[str, Statistics]]:
    """Statistics by source family, hardware, dense or MoE, precision and quality."""
    views: dict[str, Callable[[Case], str]] = {
        "family": lambda case: case.family,
        "hardware": lambda case: case.machine.gpu,
        "kind": lambda case: case.kind,
        "precision": lambda case: case.layout.precision,
        "quality": lambda case: case.quality,
        "size": lambda case: f"{MANY_GPUS} GPUs or more" if case.machine.num_gpus >= MANY_GPUS else "fewer GPUs",
    }
    report: dict[str, dict[str, Statistics]] = {}
    for view, label in views.items():
        groups: dict[str, list[CaseResult]] = defaultdict(list)
        for result in bench.results:
            groups[label(result.case)].append(result)
        entries = {name: statistics(members) for name, members in sorted(groups.items())}
        report[view] = {name: entry for name, entry in entries.items() if entry}
    return report


def family_median(results: Sequence[CaseResult]) -> float | None:
    """Return the median of the families' median errors, so that no large family hides a small one."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        groups[result.case.family].append(abs(result.error))
    return float(np.median([np.median(errors) for errors in groups.values()])) if groups else None


def decisions(results: Sequence[CaseResult]) -> list[LayoutDecision]:
    """Return a decision for each model and cluster with three or more measured layouts."""
    groups: dict[Hashable, list[CaseResult]] = defaultdict(list)
    for result in results:
        case = result.case
        groups[(case.family, case.machine.gpu, case.machine.num_gpus, case.shape.name, case.sequence)].append(result)
    layout_decisions = []
    for members in groups.values():
        layouts = {result.case.layout for result in members}
        if len(layouts) < MIN_LAYOUTS:
            continue
        best = min(_per_token(result.case, result.case.measured_step_seconds) for result in members)
        chosen = min(members, key=lambda result: _per_token(result.case, result.prediction.seconds)).case
        layout_decisions.append(
            LayoutDecision(
                chosen.family,
                chosen.machine.gpu,
                chosen.machine.num_gpus,
                chosen.shape.name,
                chosen.sequence,
                len(layouts),
                chosen.id,
                _per_token(chosen, chosen.measured_step_seconds) / best - 1.0,
            )
        )
    return layout_decisions


def summary(bench: Bench) -> dict[str, Any]:
    """Return all statistics as plain data."""
    results = bench.results
    dense_a = [result for result in results if result.case.quality == "A" and not result.case.shape.is_moe]
    moe = [result for result in results if result.case.quality in ("A", "B") and result.case.shape.is_moe]
    large = [result for result in results if result.case.machine.num_gpus >= MANY_GPUS]
    choices = decisions(results)
    trusted = [entry for entry in bench.skipped if entry.quality in ("A", "B")]
    trusted_count = len(trusted) + sum(result.case.quality in ("A", "B") for result in results)
    right = [choice.loss <= GOOD_CHOICE - 1.0 for choice in choices]
    return {
        "holdout": bench.holdout,
        "given": bench.given,
        "all": _plain(statistics(results)),
        "dense quality A": _plain(statistics(dense_a)),
        "dense quality A, median of family medians": family_median(dense_a),
        "median of family medians": family_median(results),
        "moe quality A and B": _plain(statistics(moe)),
        f"{MANY_GPUS} GPUs or more": _plain(statistics(large)),
        "decisions": {
            "groups": len(choices),
            "right": int(sum(right)),
            "share": float(np.mean(right)) if right else None,
            "cases": [vars(choice) for choice in choices],
        },
        "skipped share of quality A and B": len(trusted) / trusted_count if trusted_count else 0.0,
        "by": {
            view: {name: _plain(entry) for name, entry in entries.items()} for view, entries in tables(bench).items()
        },
    }


def bench_json(bench: Bench) -> dict[str, Any]:
    return {
        "cases": [
            {
                "id": result.case.id,
                "measured_step_seconds": result.case.measured_step_seconds,
                "predicted_step_seconds": result.prediction.seconds,
                "low": result.prediction.low,
                "high": result.prediction.high,
                "error": result.error,
            }
            for result in bench.results
        ],
        "skipped": [{"id": entry.id, "reason": entry.reason} for entry in bench.skipped],
        "summary": summary(bench),
    }


def _with_some_given(
    cases: Sequence[Case], handed_runs: int, progress: Progress | None
) -> tuple[list[CaseResult], list[Skipped]]:
    """Leave each family out, `calibrate` with some of its runs on one GPU, and predict the others; several draws."""
    clusters: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        clusters[(case.family, case.machine.gpu)].append(case)
    large = {
        key: members for key, members in clusters.items() if len(members) >= max(SMALLEST_CLUSTER, handed_runs + 1)
    }
    fits: dict[str, Fit[StepTerms]] = {}
    results: list[CaseResult] = []
    for done, ((family, gpu), members) in enumerate(sorted(large.items())):
        if family not in fits:
            fits[family] = Fit(TRAINING_STEP, [row_of(case) for case in corpus() if case.family != family])
        generation = case_machine(members[0]).gpu.generation
        labels = effect_labels(family="", release="", gpu="", generation=generation)
        for seed in GIVEN_SEEDS:
            handed = random.Random(seed).sample(members, handed_runs)
            repeated = {case.dup_group for case in handed}
            traits = Counter(case.traits for case in handed).most_common(1)[0][0]
            start = profile_from_fit(fits[family], "unknown", gpu, labels, traits, 0, "priors")
            runs = [
                LoggedRun(case.id, row_of(case).terms, case_machine(case), case.measured_step_seconds)
                for case in handed
            ]
            profile = calibrate_from(start, runs).profile
            others = [case for case in members if case.dup_group not in repeated]
            seen = {case.traits for case in handed}  # runs with other traits move as their priors do
            results += [
                CaseResult(
                    case,
                    predict(profile if case.traits in seen else with_traits(profile, case.traits), row_of(case).terms),
                )
                for case in others
            ]
        if progress:
            progress(done + 1, len(large))
    tested = {result.case for result in results}
    reason = f"used by calibrate, or fewer than {max(SMALLEST_CLUSTER, handed_runs + 1)} runs of its family on this GPU"
    return results, [Skipped(case.id, case.quality, reason) for case in cases if case not in tested]


def _sizes(shape: ModelShape) -> Hashable:
    """Return what makes the layers of two models the same work, whatever their names, vocabularies and depths: sources
    also measure a model with a few layers more, so that they divide over pipeline stages."""
    attention = (shape.hidden, shape.heads, shape.kv_heads)
    return (*attention, shape.ffn_hidden, shape.experts, shape.top_k, shape.moe_ffn_hidden)


def _predict(fit: Fit[StepTerms], case: Case) -> Prediction:
    row = row_of(case)
    return fit.predict(row.terms, row.labels, row.prior_log, row.noise, row.unshared)


def _per_token(case: Case, seconds: float) -> float:
    return seconds * case.machine.num_gpus / (case.sequence * case.global_batch_sequences)


def _plain(entry: Statistics | None) -> dict[str, float] | None:
    return vars(entry) if entry else None
