"""The metrics of a rank as a table: one row per step, one column per metric."""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from craton.telemetry.files import paths_in, read_lines
from craton.telemetry.rundirectory import RunDirectory

STAMP = ("time", "step", "generation", "node", "rank")  # of every line


def read_table(run: RunDirectory, rank: int = 0) -> Any:
    """Return a pandas DataFrame indexed by step if pandas is installed, else a dict of arrays with `step`. A step that
    a later generation did again has the later values; missing values are NaN."""
    steps: dict[int, dict[str, float]] = {}
    generations: dict[int, int] = {}
    for path in paths_in(run.path / "metrics", "*.jsonl"):
        lines, _ = read_lines(path, 0)
        for line in lines:
            step, generation = line.get("step"), line.get("generation")
            if line.get("rank") != rank or not isinstance(step, int) or not isinstance(generation, int) or step < 1:
                continue
            if generation > generations.get(step, -1):
                steps[step], generations[step] = {}, generation
            if generation == generations[step]:
                steps[step] |= {name: float(value) for name, value in line.items() if _is_number(name, value)}
    order = sorted(steps)
    names = list(dict.fromkeys(name for step in order for name in steps[step]))
    columns = {name: np.array([steps[step].get(name, math.nan) for step in order]) for name in names}
    if find_spec("pandas") is None:
        return {"step": np.array(order, dtype=np.int64), **columns}
    pandas = import_module("pandas")
    return pandas.DataFrame(columns, index=pandas.Index(order, name="step"))


def _is_number(name: str, value: object) -> bool:
    return name not in STAMP and isinstance(value, int | float) and not isinstance(value, bool)
