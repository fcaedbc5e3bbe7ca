"""Rank × phase: how much longer than the median rank of its pipeline stage each rank is in each phase, as a share of
the step. Stages differ for good reasons: the last one computes the loss.

Shares of the step and not of the phase, so that a phase of a millisecond does not shine for being two. Where there are
more ranks than columns, a column stands for neighbours and shows the one that is furthest off. Pure.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.observability.web.readers import PHASES, RankTable

MAX_COLUMNS = 400
MIN_SCALE, MAX_SCALE = 0.1, 0.3  # of a step: where colours are full; small differences stay pale


def heat_map(table: RankTable) -> dict[str, Any]:
    """What the page draws; empty without measurements."""
    if not len(table):
        return {}
    shares, step_seconds = _shares(table)
    columns = min(len(table), MAX_COLUMNS)
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
    scale = min(MAX_SCALE, max(MIN_SCALE, float(np.abs(shares).max())))
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
