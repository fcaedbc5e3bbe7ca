"""Alternatives and why they were not chosen: other layouts on the same cluster, and other clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from craton.formatting import percent
from craton.job.layout import Layout
from craton.planning.economics import RunOutcome, outcome_of
from craton.planning.report import why_lost
from craton.planning.result import Alternative, ScalingPoint
from craton.planning.search import Candidate, Search
from craton.planning.setting import Setting, tokens_of_step
from craton.planning.step import compose

TOP = 5


def layout_alternatives(
    setting: Setting, chosen: Candidate, search: Search, constants: np.ndarray
) -> list[Alternative]:
    """Return the best layouts that differ in more than a detail, and the best one that does not fit in memory."""
    winner_times = compose(chosen.terms, constants)
    seen = {_kind(chosen.layout)}
    losers = []
    for candidate in search.candidates:
        if candidate.layout != chosen.layout and _kind(candidate.layout) not in seen:
            seen.add(_kind(candidate.layout))
            losers.append(candidate)
        if len(losers) == TOP - 1:
            break
    faster = [candidate for candidate in search.too_large if candidate.step_seconds < chosen.step_seconds]
    losers += faster[:1]
    steps = setting.job.steps or 1
    outcomes = [outcome_of(setting, loser) for loser in losers]
    return [
        Alternative(
            cluster=setting.cluster.name,
            layout=loser.layout,
            step_seconds=outcome.step_seconds,
            memory_bytes=loser.memory_bytes,
            run_seconds=outcome.run_seconds if loser.fits else steps * loser.step_seconds,
            cost_dollars=outcome.cost_dollars,
            reason=why_lost(loser, chosen, compose(loser.terms, constants), winner_times),
            fits=loser.fits,
            goodput=outcome.goodput,
        )
        for loser, outcome in zip(losers, outcomes, strict=True)
    ]


def _kind(layout: Layout) -> tuple[int, ...]:
    return (layout.pp, layout.replicate, layout.fsdp, layout.cp, layout.tp, layout.ep, layout.zero)


def cluster_alternative(outcome: RunOutcome, best: RunOutcome) -> Alternative:
    return Alternative(
        cluster=outcome.setting.cluster.name,
        layout=outcome.candidate.layout,
        step_seconds=outcome.step_seconds,
        memory_bytes=outcome.candidate.memory_bytes,
        run_seconds=outcome.run_seconds,
        cost_dollars=outcome.cost_dollars,
        reason=_compared(outcome, best),
        fits=outcome.candidate.fits,
        goodput=outcome.goodput,
    )


def _compared(outcome: RunOutcome, best: RunOutcome) -> str:
    if outcome is best:
        return "chosen"
    texts = []
    time_ratio = outcome.run_seconds / best.run_seconds
    texts.append(_ratio(time_ratio, "longer", "shorter", "same run time"))
    if outcome.cost_dollars is not None and best.cost_dollars:
        texts.append(_ratio(outcome.cost_dollars / best.cost_dollars, "more expensive", "cheaper", "same cost"))
    return ", ".join(texts)


def _ratio(ratio: float, more: str, less: str, same: str) -> str:
    if 0.99 < ratio < 1.01:
        return same
    if ratio > 2.0 or ratio < 0.5:
        return f"{max(ratio, 1 / ratio):.1f} × {more if ratio > 1 else less}"
    return f"{percent(abs(ratio - 1))} {more if ratio > 1 else less}"


def scaling_points(outcomes: Sequence[RunOutcome]) -> list[ScalingPoint]:
    points = [
        ScalingPoint(
            num_gpus=outcome.setting.world,
            step_seconds=outcome.step_seconds,
            tokens_per_second=tokens_of_step(outcome.setting.job) / outcome.step_seconds,
            run_seconds=outcome.run_seconds,
            cost_dollars=outcome.cost_dollars,
            layout=outcome.candidate.layout,
            cluster=outcome.setting.cluster.name,
        )
        for outcome in outcomes
    ]
    return sorted(points, key=lambda point: point.num_gpus)


def by_run_time(outcomes: Sequence[RunOutcome]) -> list[RunOutcome]:
    """Return all candidates by run time, for the Pareto front of time and cost."""
    return sorted(outcomes, key=lambda outcome: outcome.run_seconds)


def preference(outcome: RunOutcome, by: str) -> tuple[float, float]:
    cost = outcome.cost_dollars if outcome.cost_dollars is not None else math.inf
    if by == "time":
        return (outcome.run_seconds, cost)
    if by == "gpus":
        return (float(outcome.setting.world), outcome.run_seconds)
    return (cost, outcome.run_seconds)
