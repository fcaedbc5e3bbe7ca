"""Fit constants of software to measured seconds, with uncertainties; the composition of the seconds is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.fitting.composition import Array, Composition, linearise, linearise_one
    from craton.planning.fitting.hierarchy import (
        DAMPING,
        EXPERT_NOISE,
        EXPERT_UNSHARED,
        ITERATIONS,
        LEVELS,
        NOISE,
        OPEN_NOISE,
        QUANTILE_80,
        SCALES,
        TAIL_WIDTH,
        UNSHARED,
        Fit,
        FitRow,
        Prediction,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
