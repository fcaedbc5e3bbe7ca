"""Fit software constants to measured seconds, with uncertainties.

A stack's constants are a sum of effects in logs: of all stacks, of a GPU generation, of a software family, of one
release, and of that family on one GPU. Every effect has a normal prior; its width is the constant's spread times the
level's share. Residuals are a scale per family, model and group, and noise. Given the derivative of log(seconds) by the
constants this is one Gaussian system, solved at the posterior mode by repeated linearisation. A run of an unknown
family gets the prior of its traits and a wide interval, a run of a fitted family a narrow one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from threadpoolctl import ThreadpoolController

from craton.planning.fitting.composition import Array, Composition, Terms, linearise

Labels = Mapping[str, str]

# Share of a constant's spread that each level may explain, and standard deviations of log(seconds) that no constant
# explains. Chosen by the density and coverage of left-out groups, families, models, GPUs and releases, then rounded;
# docs/measurements.md shows the resulting accuracy.
LEVELS: dict[str, float] = {"all": 0.3, "generation": 0.4, "family": 0.7, "release": 0.6, "family-gpu": 0.4}
SCALES: dict[str, float] = {"family-scale": 0.03, "release-kind": 0.025, "model": 0.03, "group": 0.025}
UNSHARED_SCALES: dict[str, float] = {name: value for name, value in SCALES.items() if name != "family-scale"}
UNSHARED = math.sqrt(sum(deviation**2 for deviation in UNSHARED_SCALES.values()))
NOISE = 0.025
OPEN_NOISE = 1.2  # factor on the noise if a source does not state all settings
EXPERT_NOISE = 3.0  # factor on the noise of mixture-of-experts models
EXPERT_UNSHARED = 3.5  # factor on the scales of their releases, models and groups
TAILS = 4.0  # degrees of freedom of the noise: published tables have outliers
TAIL_WIDTH = 1.2  # factor of these tails on the spread of a new measurement
ITERATIONS = 14
NEAR_ITERATIONS = 5  # from the constants of a fit to almost the same rows
DAMPING = (1.0, 0.7, 0.5, 0.4)  # full steps overshoot where overlap makes log(seconds) nonlinear
QUANTILE_80 = 1.2816
# A larger log_deviation only says that the linear model ends there, as at the load that saturates a server.
WIDEST = 3.0

# For matrices of a few hundred rows thread synchronisation costs more than the compute: up to 40 times on a busy
# machine.
_BLAS = ThreadpoolController()


@dataclass(frozen=True)
class FitRow(Generic[Terms]):
    """One measurement: its terms, the labels of the effects it shares with others, and where its constants start."""

    terms: Terms
    log_measured: float
    labels: Labels
    prior_log: tuple[float, ...]
    noise: float = NOISE  # standard deviation of log(measured) between repetitions
    unshared: float = 1.0  # factor on the scales that differ by release, model and group


@dataclass(frozen=True)
class Prediction:
    """The median of the seconds and the standard deviation of its logarithm."""

    seconds: float
    log_deviation: float

    @property
    def low(self) -> float:
        return self.seconds * math.exp(-QUANTILE_80 * min(self.log_deviation, WIDEST))

    @property
    def high(self) -> float:
        return self.seconds * math.exp(QUANTILE_80 * min(self.log_deviation, WIDEST))


class Fit(Generic[Terms]):
    """The posterior over all effects, given measured rows."""

    def __init__(
        self,
        composition: Composition[Terms],
        rows: Sequence[FitRow[Terms]],
        levels: Mapping[str, float] = LEVELS,
        scales: Mapping[str, float] = SCALES,
        start: Fit[Terms] | None = None,
    ) -> None:
        """`levels` and `scales`: the effects that rows share by these labels, and their widths. `start`: a fit to
        almost the same rows, whose constants are near the solution; the search from there is shorter."""
        self.composition = composition
        self.level_shares, self.scale_deviations = dict(levels), dict(scales)
        self.variance = np.array(composition.spread) ** 2
        self.prior = np.array([row.prior_log for row in rows])
        self.labels = {name: np.array([row.labels.get(name, "") for row in rows]) for name in (*levels, *scales)}
        self.has = {name: np.array([name in row.labels for row in rows]) for name in (*levels, *scales)}
        self.unshared = np.array([row.unshared for row in rows])
        self.levels = self._shared(levels)
        self.scales = self._shared({name: width for name, width in scales.items() if name not in UNSHARED_SCALES})
        unshared = {name: width for name, width in scales.items() if name in UNSHARED_SCALES}
        self.scales += self._shared(unshared) * np.outer(self.unshared, self.unshared)
        terms = composition.stack([row.terms for row in rows])
        target = np.array([row.log_measured for row in rows])
        theta = self.prior.copy()
        if start is not None:
            theta = np.array([start.constants(row.labels, row.prior_log) for row in rows])
        noise = np.array([row.noise for row in rows])
        weight = np.ones(len(rows))
        with _BLAS.limit(limits=1):
            for iteration in range(ITERATIONS if start is None else NEAR_ITERATIONS):
                value, self.jacobian = linearise(composition, terms, theta)
                gap = target - value + np.einsum("ik,ik->i", self.jacobian, theta - self.prior)
                covariance = self._covariance() + np.diag(noise**2 * weight)
                self.alpha: Array = np.linalg.solve(covariance, gap)
                goal = self.prior + self._effects()
                theta = theta + DAMPING[min(iteration, len(DAMPING) - 1)] * (goal - theta)
                unexplained = noise * weight * self.alpha
                weight = np.maximum(1.0, (TAILS + unexplained**2) / (TAILS + 1.0))
            self.weight = weight
            # whitens rows: w.T @ w is the inverse of their covariance
            self.whitener: Array = np.linalg.inv(np.linalg.cholesky(covariance))

    def predict(
        self, terms: Terms, labels: Labels, prior_log: Sequence[float], noise: float = NOISE, unshared: float = 1.0
    ) -> Prediction:
        """Predict the seconds of a run with these labels, measured or not."""
        return self.predict_rows([FitRow(terms, 0.0, labels, tuple(prior_log), noise, unshared)])[0]

    def predict_rows(self, rows: Sequence[FitRow[Terms]]) -> list[Prediction]:
        """Predict the seconds of several rows at once; what they measured does not count."""
        stacked = self.composition.stack([row.terms for row in rows])
        theta = np.array([self.constants(row.labels, row.prior_log) for row in rows])
        value, jacobian = linearise(self.composition, stacked, theta)
        return [self._prediction(float(value[i]), jacobian[i], row) for i, row in enumerate(rows)]

    def _prediction(self, value: float, slope: Array, row: FitRow[Terms]) -> Prediction:
        labels = row.labels
        own = float(slope @ (self.variance * slope))
        link = self.jacobian @ (self.variance * slope)
        cross = sum(share**2 * link * self._same(name, labels) for name, share in self.level_shares.items())
        prior_variance = sum(share**2 * own for share in self.level_shares.values())
        scale = 0.0
        for name, deviation in self.scale_deviations.items():
            if name not in labels:
                continue
            factor = row.unshared if name in UNSHARED_SCALES else 1.0
            same = deviation**2 * factor * self._same(name, labels)
            same = same * self.unshared if name in UNSHARED_SCALES else same
            cross = cross + same
            prior_variance += (factor * deviation) ** 2
            scale += float(self.alpha @ same)
        explained = self.whitener @ cross
        variance = max(prior_variance - float(explained @ explained), 0.0) + (TAIL_WIDTH * row.noise) ** 2
        return Prediction(math.exp(value + scale), math.sqrt(variance))

    def constants(self, labels: Labels, prior_log: Sequence[float]) -> Array:
        """Return the posterior mean of the log-constants of a stack with these labels."""
        return np.array(prior_log) + self._weights(labels) @ self.alpha

    def posterior(
        self, labels: Labels, prior_log: Sequence[float], scale_names: Sequence[str] = ("family-scale",)
    ) -> tuple[Array, Array]:
        """Return mean and covariance of the log-constants of a stack with these labels, followed by its log-scale: the
        residual on all seconds of the stack. UNSHARED are the effects that differ by release and model."""
        variances = {name: self.scale_deviations[name] ** 2 for name in scale_names}
        scale = sum(variances.values())
        shared = sum(variance * self._same(name, labels) for name, variance in variances.items())
        weights = np.vstack([self._weights(labels), shared])
        prior = np.append(self.variance * sum(share**2 for share in self.level_shares.values()), scale)
        explained = self.whitener @ weights.T
        mean = np.append(np.array(prior_log), 0.0) + weights @ self.alpha
        return mean, np.diag(prior) - explained.T @ explained

    def _weights(self, labels: Labels) -> Array:
        """Return the weight of each row's residual in each constant of a stack with these labels: [constants, rows]."""
        strength = sum(share**2 * self._same(name, labels) for name, share in self.level_shares.items())
        return np.asarray(self.variance[:, None] * self.jacobian.T * strength)

    def _same(self, name: str, labels: Labels) -> Array:
        label = labels.get(name, "")
        return (self.labels[name] == label).astype(np.float64) if label else np.zeros(len(self.alpha))

    def _shared(self, effects: Mapping[str, float]) -> Array:
        """Return the variance that rows share by equal labels [rows, rows]; an empty label shares nothing, and a row
        without the label has no such effect."""
        total = np.zeros((len(self.prior), len(self.prior)))
        for name, deviation in effects.items():
            values = self.labels[name]
            same = (values[:, None] == values[None, :]) & (values != "")[:, None]
            total += deviation**2 * (same | np.diag(self.has[name]))
        return total

    def _covariance(self) -> Array:
        return np.asarray((self.jacobian * self.variance) @ self.jacobian.T * self.levels + self.scales)

    def _effects(self) -> Array:
        return np.asarray(self.levels @ (self.jacobian * self.alpha[:, None] * self.variance))
