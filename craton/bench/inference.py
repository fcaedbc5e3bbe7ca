"""Measures the predictions of served models, on published measurements that were held out of the fit.

Holdout `group` (the default) predicts a row of the shipped file with constants fitted without any row of its group
(source, GPU, model architecture, engine); `engine` leaves out all rows of its engine, `none` nothing. A row that is not
in the shipped file is predicted by the fit to the whole shipped file, and is never fitted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from craton.bench.planner import GOOD_CHOICE, MIN_LAYOUTS, Progress, Statistics, statistics
from craton.planning.calibration import CaseFileError, Skipped, read_case_file
from craton.planning.fitting import Prediction
from craton.planning.serving.engine_fitting import (
    ServingCase,
    fit_serving,
    fitted_serving_cases,
    is_serving_row,
    load_serving_cases,
    predict_served,
    serving_corpus,
    serving_corpus_fit,
)

ServingHoldout = Literal["group", "engine", "none"]


@dataclass(frozen=True)
class ServingResult:
    case: ServingCase
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.case.measured - 1.0

    @property
    def inside(self) -> bool:
        return self.low <= self.case.measured <= self.high

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.predicted, self.low, self.high))

    @property
    def width(self) -> float:
        return self.high / self.low


@dataclass(frozen=True)
class ServingBench:
    results: list[ServingResult]
    skipped: list[Skipped]
    rows: int
    holdout: ServingHoldout


@dataclass(frozen=True)
class ServingDecision:
    """The planner's choice among three or more measured layouts of one model under one load, against the best."""

    engine: str
    gpu: str
    model: str
    metric: str
    layouts: int
    chosen: str
    loss: float  # how much worse the choice measured than the best


def is_inference_file(path: str | Path) -> bool:
    """Return whether the file has inference rows; a malformed row is neither kind. CaseFileError: it has both kinds."""
    rows, _ = read_case_file(path)
    serves = any(is_serving_row(row) for row in rows)
    if serves and any(isinstance(row, dict) and "seq_len" in row for row in rows):
        raise CaseFileError(f"{path}: has training runs and inference measurements; use one file for each")
    return serves


def bench_inference(
    path: str | Path, holdout: ServingHoldout = "group", progress: Progress | None = None
) -> ServingBench:
    """Predict every case of a file."""
    cases, skipped = load_serving_cases(path)
    rows = len(read_case_file(path)[0])
    shipped = {case.id for case in serving_corpus()}
    jobs: dict[Hashable, list[ServingCase]] = defaultdict(list)
    for case in cases:
        jobs[_left_out(case, holdout) if case.id in shipped else None].append(case)
    predictions: dict[ServingCase, Prediction] = {}
    for done, (key, members) in enumerate(jobs.items(), start=1):
        fit = serving_corpus_fit()
        if key is not None:
            fit = fit_serving([case for case in fitted_serving_cases() if _left_out(case, holdout) != key], fit)
        predictions |= dict(zip(members, predict_served(fit, members), strict=True))
        if progress:
            progress(done, len(jobs))
    results = [_result(case, predictions[case]) for case in cases]
    skipped += [
        Skipped(result.case.id, "", f"{result.case.metric}: the prediction is not a finite number")
        for result in results
        if not result.is_finite
    ]
    return ServingBench([result for result in results if result.is_finite], skipped, rows, holdout)


def _left_out(case: ServingCase, holdout: ServingHoldout) -> Hashable:
    return {"group": case.group, "engine": case.engine, "none": None}[holdout]


def _result(case: ServingCase, prediction: Prediction) -> ServingResult:
    if case.metric == "tokens_per_second_per_gpu":
        return ServingResult(case, 1.0 / prediction.seconds, 1.0 / prediction.high, 1.0 / prediction.low)
    return ServingResult(case, prediction.seconds, prediction.low, prediction.high)


VIEWS: dict[str, Callable[[ServingCase], str]] = {
    "metric": lambda case: f"{case.metric}, {_load_name(case)}",
    "metric and kind": lambda case: f"{case.metric}, {case.kind}",
    "engine": lambda case: f"{case.engine} {case.metric}",
    "gpu": lambda case: f"{case.gpu} {case.metric}",
    "source": lambda case: f"{case.source} {case.metric}",
}


def inference_tables(results: Sequence[ServingResult]) -> dict[str, dict[str, Statistics]]:
    """Return statistics of the rows with a stated layout by metric, dense or MoE, engine, GPU and source."""
    report: dict[str, dict[str, Statistics]] = {}
    for view, label in VIEWS.items():
        groups: dict[str, list[ServingResult]] = defaultdict(list)
        for result in results:
            if not result.case.open_fields:
                groups[label(result.case)].append(result)
        entries = {name: statistics(members) for name, members in sorted(groups.items())}
        report[view] = {name: entry for name, entry in entries.items() if entry}
    return report


def _load_name(case: ServingCase) -> str:
    return "open load" if case.load.kind == "open" else "closed load"


def inference_decisions(results: Sequence[ServingResult]) -> list[ServingDecision]:
    """Return a decision for each model and load with three or more measured layouts on one kind of GPU."""
    groups: dict[Hashable, list[ServingResult]] = defaultdict(list)
    for result in results:
        case = result.case
        if not case.open_fields and case.metric != "ttft_seconds":
            groups[(case.group, case.version, case.precision, case.load, case.metric)].append(result)
    choices = []
    for members in groups.values():
        if len({result.case.layouts for result in members}) < MIN_LAYOUTS:
            continue
        sign = -1.0 if members[0].case.metric == "tokens_per_second_per_gpu" else 1.0
        best = min(members, key=lambda result: sign * result.case.measured).case
        chosen = min(members, key=lambda result: sign * result.predicted).case
        choices.append(
            ServingDecision(
                chosen.engine,
                chosen.gpu,
                chosen.shape.name,
                chosen.metric,
                len({result.case.layouts for result in members}),
                chosen.id,
                (chosen.measured / best.measured) ** sign - 1.0,
            )
        )
    return choices


def inference_summary(bench: ServingBench) -> dict[str, Any]:
    """Return all statistics as plain data."""
    contradictory = sum("contradicts itself" in entry.reason for entry in bench.skipped)
    choices = inference_decisions(bench.results)
    right = sum(choice.loss <= GOOD_CHOICE - 1.0 for choice in choices)
    searched = [result for result in bench.results if result.case.open_fields]
    consistent = bench.rows - contradictory
    metrics = sorted({result.case.metric for result in searched})
    opened = {name: statistics(result for result in searched if result.case.metric == name) for name in metrics}
    return {
        "holdout": bench.holdout,
        "rows": bench.rows,
        "contradictory": contradictory,
        "skipped share of consistent rows": (len(bench.skipped) - contradictory) / consistent if consistent else 0.0,
        "stated layout": {
            view: {name: vars(entry) for name, entry in entries.items()}
            for view, entries in inference_tables(bench.results).items()
        },
        "open layout": {name: vars(entry) for name, entry in opened.items() if entry},
        "decisions": {
            "groups": len(choices),
            "right": right,
            "share": right / len(choices) if choices else None,
            "cases": [vars(choice) for choice in choices],
        },
    }


def inference_json(bench: ServingBench) -> dict[str, Any]:
    return {
        "cases": [
            {
                "id": result.case.id,
                "metric": result.case.metric,
                "measured": result.case.measured,
                "predicted": result.predicted,
                "low": result.low,
                "high": result.high,
                "error": result.error,
            }
            for result in bench.results
        ],
        "skipped": [{"id": entry.id, "reason": entry.reason} for entry in bench.skipped],
        "summary": inference_summary(bench),
    }


def median_error(results: Sequence[ServingResult], metric: str, kind: str | None = None) -> float:
    """Return the median absolute error of rows with a stated layout."""
    chosen = [
        abs(result.error)
        for result in results
        if result.case.metric == metric and not result.case.open_fields and kind in (None, result.case.kind)
    ]
    return float(np.median(chosen)) if chosen else float("nan")
