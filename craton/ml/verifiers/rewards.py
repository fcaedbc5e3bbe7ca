"""Rewards as users' functions return them: a finite number, or an error that says what came instead."""

from __future__ import annotations

import math
import numbers

from craton.ml.verifiers.answers import shortened
from craton.ml.verifiers.errors import VerifierError


class RewardValueError(VerifierError):
    """A function returned something that is no reward."""


def as_reward(value: object, name: str) -> float:
    """Return a number as float; NumPy's numbers and 0-d arrays count. RewardValueError for anything else."""
    is_number = isinstance(value, numbers.Real) or (hasattr(value, "__float__") and getattr(value, "ndim", None) == 0)
    if not is_number:
        what = "nothing" if value is None else f"{shortened(value)} ({type(value).__name__})"
        raise RewardValueError(f"{name} returned {what}; return a finite number")
    reward = float(value)  # type: ignore[arg-type]
    if not math.isfinite(reward):
        raise RewardValueError(f"{name} returned {reward}; return a finite number")
    return reward
