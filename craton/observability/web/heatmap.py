"""Rank × phase: how much longer than the median rank of its pipeline stage each rank is in each phase, as a share of
the step. Stages differ for good reasons: the last one computes the loss.

Shares of the step and not of the phase, so that a phase of a millisecond does not shine for being two. Where there are
more ranks than columns, a column stands for neighbours and shows the one that is furthest off. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton import figures
from craton.observability.web.ranks import MEAN_LINES, PHASES, RankTable

MOST_COLUMNS = 400
LEAST_SCALE, MOST_SCALE = 0.1, 0.3  # of a step: where colours are full; small differences stay pale
STRAGGLER_SHARE = 0.1  # of a step, from where a rank is named
WAITS_LESS = 0.3  # of what it is late by, that a rank which others wait for waits less than they do


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for: it computes, or waits for data, longest, and waits for others least."""

    rank: int
    node: str
    phase: str
    late_seconds: float
    late_share: float  # of the median step


def heat_map(table: RankTable) -> dict[str, Any]:
    """What the page draws; empty without measurements."""
    if not len(table):
        return {}
    shares, step_seconds = _shares(table)
    columns = min(len(table), MOST_COLUMNS)
    edges = [round(index * len(table) / columns) for index in range(columns + 1)]
    cells: list[list[float]] = []
    furthest: list[list[int]] = []
    for phase in range(len(PHASES)):
        row, which = [], []
        for low, high in pairwise(edges):
            index = low + int(np.argmax(np.abs(shares[low:high, phase])))
            row.append(round(float(shares[index, phase]), 4))
            which.append(index)
        cells.append(row)
        furthest.append(which)
    shown = sorted({index for which in furthest for index in which})
    place = {index: number for number, index in enumerate(shown)}
    scale = min(MOST_SCALE, max(LEAST_SCALE, float(np.abs(shares).max())))
    return {
        "phases": list(PHASES),
        "edges": [table.ranks[low] for low in edges[:-1]] + [table.ranks[-1] + 1],
        "cells": cells,
        "furthest": [[place[index] for index in which] for which in furthest],
        "ranks": [table.ranks[index] for index in shown],
        "nodes": [table.nodes[index] for index in shown],
        "seconds": [[_rounded(value) for value in table.phase_seconds[index]] for index in shown],
        "medians": [_rounded(value) for value in _medians(table.phase_seconds)],
        "scale": round(scale, 4),
        "step_seconds": round(step_seconds, 6),
    }


def straggler(table: RankTable) -> Straggler | None:
    """In lock-step training the slow rank is the one that waits least in collectives, so what counts is what a rank
    does before it gets there: data, compute and optimizer together."""
    known = np.array([lines >= MEAN_LINES for lines in table.num_lines], dtype=bool)
    if known.sum() < 2:
        return None  # one step says little: anything may hold a rank up once
    shares, step_seconds = _shares(table)
    own = shares[:, [PHASES.index("data"), PHASES.index("compute"), PHASES.index("optimizer")]]
    late = own.sum(axis=1)
    waits_less = -shares[:, PHASES.index("communication")] >= WAITS_LESS * late
    late = np.where(known & waits_less, late, 0.0)
    worst = int(np.argmax(late))
    if late[worst] < STRAGGLER_SHARE:
        return None
    phase = ("data", "compute", "optimizer")[int(np.argmax(own[worst]))]
    share = float(late[worst])
    return Straggler(table.ranks[worst], table.nodes[worst], phase, share * step_seconds, share)


def finding(table: RankTable) -> str:
    """One sentence above the picture."""
    if not len(table):
        return "No rank has told of a step yet"
    late = straggler(table)
    if late is None and len(table) > 1 and min(table.num_lines) < MEAN_LINES:
        return f"Ranks are compared when each has told of {MEAN_LINES} steps"
    if late is None:
        return "The only rank has nobody to be compared with" if len(table) == 1 else "No rank is far from the others"
    share = figures.percent(late.late_share)
    return (
        f"Rank {late.rank} on {late.node} is {figures.duration(late.late_seconds)} ({share} of a step) later than the "
        f"median rank{' of its stage' if len(set(table.stages)) > 1 else ''}, in {late.phase}; the others wait for it"
    )


def _shares(table: RankTable) -> tuple[NDArray[np.float64], float]:
    """[ranks, PHASES] differences from the median rank of a stage over the median step, and that step's seconds."""
    seconds = table.phase_seconds
    steps = table.column("run_step_seconds")
    step_seconds = float(np.nanmedian(steps)) if np.isfinite(steps).any() else 1.0
    stages = np.array(table.stages)
    shares = np.empty_like(seconds)
    for stage in set(table.stages):
        of_stage = stages == stage
        shares[of_stage] = (seconds[of_stage] - _medians(seconds[of_stage])) / max(step_seconds, 1e-9)
    return np.nan_to_num(shares), step_seconds


def _medians(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """By column; NaN where nothing was measured, without numpy's warning."""
    return np.array([np.nanmedian(column) if np.isfinite(column).any() else np.nan for column in seconds.T])


def _rounded(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
