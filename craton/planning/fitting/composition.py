"""What a fit knows of the seconds that it explains: their composition from terms and constants, and its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Terms = TypeVar("Terms")


@dataclass(frozen=True)
class Composition(Generic[Terms]):
    """Seconds of one kind of measurement, composed from terms without constants and the constants of a software stack.

    Stacked terms have the type of one row's terms; each field is an array whose last axis counts the rows.
    """

    stack: Callable[[Sequence[Terms]], Terms]
    seconds: Callable[[Terms, Array], Array]  # stacked terms, constants: [constants, rows] -> seconds: [rows]
    spread: tuple[float, ...]  # of each constant: standard deviation of its logarithm between software stacks


STEP = 1e-5  # of the forward differences


def linearise_one(composition: Composition[Terms], terms: Terms, theta: Array) -> tuple[float, Array]:
    """Return the same as `linearise` of one row's terms, which are not stacked, and its log-constants [constants]."""
    constants = np.tile(
        np.exp(theta)[:, None], len(theta) + 1
    )  # one column with each constant changed, after the first
    changed = np.arange(len(theta))
    constants[changed, changed + 1] *= 1.0 + STEP
    logs = np.log(composition.seconds(composition.stack([terms] * (len(theta) + 1)), constants))
    return float(logs[0]), (logs[1:] - logs[0]) / STEP


def linearise(composition: Composition[Terms], terms: Terms, theta: Array) -> tuple[Array, Array]:
    """Return log(seconds) of stacked terms [rows] and its derivative by the log-constants [rows, constants]."""
    constants = np.exp(theta.T)
    value = np.log(composition.seconds(terms, constants))
    jacobian = np.empty_like(theta)
    for j in range(theta.shape[1]):
        kept = constants[j].copy()
        constants[j] = kept * (1.0 + STEP)
        jacobian[:, j] = (np.log(composition.seconds(terms, constants)) - value) / STEP
        constants[j] = kept
    return value, jacobian
