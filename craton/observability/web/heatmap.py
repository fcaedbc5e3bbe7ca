"""Heat map of ranks × phases: how much longer each rank takes in each phase than the median rank of its pipeline stage,
as a share of the step. Stages are not compared with each other: the last one also computes the loss.

Shares are of the step, not of the phase, so that a phase of 1 ms that takes 2 ms does not stand out. With more ranks
than columns, a column covers neighbouring ranks and shows the one with the largest difference. Pure.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.observability.web.readers import PHASES, RankTable
from craton.telemetry import step_phases

MAX_COLUMNS = 400
MIN_SCALE, MAX_SCALE = 0.1, 0.3  # share of a step with full colour; small differences stay pale


def heat_map(table: RankTable) -> dict[str, Any]:
    """Return the data that the page draws; empty without measurements."""
    if not len(table):
        return {}
    shares, step_seconds = _shares(table)
    columns = min(len(table), MAX_COLUMNS)
    edges = [round(index * len(table) / columns) for index in range(columns + 1)]
    cells: list[list[float]] = []
    furthest: list[list[int]] = []
    measured = {name for phase, name in enumerate(PHASES) if np.isfinite(table.phase_seconds[:, phase]).any()}
    phases = [PHASES.index(name) for name in step_phases(measured)]
    for phase in phases:
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
        "phases": [PHASES[phase] for phase in phases],
        "edges": [table.ranks[low] for low in edges[:-1]] + [table.ranks[-1] + 1],
        "cells": cells,
        "furthest": [[place[index] for index in which] for which in furthest],
        "ranks": [table.ranks[index] for index in shown],
        "nodes": [table.nodes[index] for index in shown],
        "seconds": [[_rounded(table.phase_seconds[index, phase]) for phase in phases] for index in shown],
        "medians": [_rounded(value) for value in _medians(table.phase_seconds[:, phases])],
        "scale": round(scale, 4),
        "step_seconds": round(step_seconds, 6),
    }


def _shares(table: RankTable) -> tuple[NDArray[np.float64], float]:
    """Return [ranks, PHASES] differences from the stage's median rank over the median step, and that step's seconds."""
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
    """Return medians by column; NaN without measurements, without numpy's warning."""
    return np.array([np.nanmedian(column) if np.isfinite(column).any() else np.nan for column in seconds.T])


def _rounded(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
