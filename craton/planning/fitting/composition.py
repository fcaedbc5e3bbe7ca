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


def linearise(composition: Composition[Terms], terms: Terms, theta: Array) -> tuple[Array, Array]:
    """Return log(seconds) of stacked terms [rows] and its derivative by the log-constants [rows, constants]."""
    constants = np.exp(theta.T)
    value = np.log(composition.seconds(terms, constants))
    jacobian = np.empty_like(theta)
    step = 1e-5  # of the forward differences
    for j in range(theta.shape[1]):
        kept = constants[j].copy()
        constants[j] = kept * (1.0 + step)
        jacobian[:, j] = (np.log(composition.seconds(terms, constants)) - value) / step
        constants[j] = kept
    return value, jacobian
