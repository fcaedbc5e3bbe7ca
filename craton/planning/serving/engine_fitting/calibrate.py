"""Calibrate an engine profile with measurements of a reader's own server.

The measurements update the constants and the residual of each metric of a starting profile: the posterior of the same
step model that the published measurements were fitted with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from craton.errors import CratonError
from craton.planning.fitting import DAMPING, ITERATIONS, Array, linearise
from craton.planning.serving.engine_fitting.cases import ServingCase
from craton.planning.serving.engine_fitting.fit import SERVING_STEP, served_row, stack_rows
from craton.planning.serving.profile import ENGINE_SPREAD, METRICS, EngineProfile

MIN_MEASUREMENTS = 3
NEW_SERVER = 0.3  # share of a constant's spread that one server may add to a shipped profile
# Standard deviation of log(metric) between repetitions on one server, and what the step model leaves of one server.
REPEATED = {"tpot_seconds": 0.02, "ttft_seconds": 0.10, "tokens_per_second_per_gpu": 0.02}
UNMODELLED = {"tpot_seconds": 0.03, "ttft_seconds": 0.12, "tokens_per_second_per_gpu": 0.03}
RANDOM_ARRIVALS = 3.0  # factor on both: an open load of a few hundred requests is rarely at its long-run means
# Correlation of a metric's residual with what all metrics of a server share: a TTFT also depends on its queue.
SHARED = np.sqrt([0.95, 0.4, 0.95])


# Measured over predicted, or its inverse: beyond the first factor a measurement has another unit or another setting;
# two measurements of one load that are further apart than the second cannot both be right, and a fit that leaves more
# than that fits no server.
INCREDIBLE, CONTRADICTORY = 30.0, 2.0


class EngineCalibrationError(CratonError):
    """Measurements from which no engine profile can be fitted."""


@dataclass(frozen=True)
class EngineCalibration:
    profile: EngineProfile
    cases: list[ServingCase]
    before: list[float]  # the metric, with the starting profile
    after: list[float]

    @property
    def warnings(self) -> list[str]:
        """Measurements that the fitted profile does not explain."""
        return [
            f"{case.id}: {case.metric} is {_times(value, case.measured)} after the fit; it contradicts the others, or "
            "its settings are not those that are stated"
            for case, value in zip(self.cases, self.after, strict=True)
            if _apart(value, case.measured) > CONTRADICTORY
        ]


def calibrate_engine(start: EngineProfile, cases: Sequence[ServingCase], source: str = "") -> EngineCalibration:
    """Return the posterior of a profile, given measurements on one kind of GPU."""
    if len(cases) < MIN_MEASUREMENTS:
        raise EngineCalibrationError(
            f"{len(cases)} measurements given; a profile needs at least {MIN_MEASUREMENTS}, preferably at several loads"
        )
    cards = sorted({case.gpu for case in cases})
    if len(cards) > 1:
        raise EngineCalibrationError(
            f"the measurements are on {' and '.join(cards)}; a profile covers one GPU: use one file per GPU"
        )
    _refuse_contradictions(cases)
    count, scales = len(ENGINE_SPREAD), len(METRICS)
    mean = np.array([*start.log_constants, *start.log_scales])
    covariance = np.zeros((count + scales, count + scales))
    covariance[:count, :count] = np.array(start.covariance) + np.diag((NEW_SERVER * np.array(ENGINE_SPREAD)) ** 2)
    alike = np.where(np.eye(scales, dtype=bool), 1.0, np.outer(SHARED, SHARED))
    covariance[count:, count:] = alike * np.outer(start.deviations, start.deviations)
    terms = stack_rows([served_row(case) for case in cases])
    marks = np.array([[float(case.metric == metric) for metric in METRICS] for case in cases])
    target = np.log([case.measured if case.metric.endswith("_seconds") else 1.0 / case.measured for case in cases])
    noise = np.diag([_noise(case) ** 2 for case in cases])

    def linear(theta: Array) -> tuple[Array, Array]:
        value, jacobian = linearise(SERVING_STEP, terms, np.tile(theta[:count], (len(cases), 1)))
        return value + marks @ theta[count:], np.hstack([jacobian, marks])

    before = _metrics(linear(mean)[0], cases)
    for case, predicted in zip(cases, before, strict=True):
        if _apart(predicted, case.measured) > INCREDIBLE:
            raise EngineCalibrationError(
                f"{case.id}: {case.metric} {case.measured:.3g} is not credible: {start.name} predicts {predicted:.3g}; "
                "check its unit and its load, or leave it out"
            )
    theta = mean.copy()
    for iteration in range(ITERATIONS):
        value, jacobian = linear(theta)
        gain = np.linalg.solve(jacobian @ covariance @ jacobian.T + noise, jacobian @ covariance).T
        goal = mean + gain @ (target - value + jacobian @ (theta - mean))
        theta = theta + DAMPING[min(iteration, len(DAMPING) - 1)] * (goal - theta)
    posterior = covariance - gain @ jacobian @ covariance
    profile = replace(
        start,
        gpu=cards[0],
        log_constants=tuple(float(x) for x in theta[:count]),
        covariance=tuple(tuple(float(x) for x in line) for line in posterior[:count, :count]),
        log_scales=tuple(float(x) for x in theta[count:]),
        deviations=tuple(
            math.sqrt(max(float(posterior[count + index, count + index]), 0.0) + UNMODELLED[metric] ** 2)
            for index, metric in enumerate(METRICS)
        ),
        rows=len(cases),
        source=source or f"{len(cases)} measurements on {cards[0]}, starting from {start.name}",
    )
    return EngineCalibration(profile, list(cases), before, _metrics(linear(theta)[0], cases))


def _refuse_contradictions(cases: Sequence[ServingCase]) -> None:
    """Raise EngineCalibrationError for two measurements of one metric of one server under one load that disagree."""
    found: dict[tuple[object, ...], ServingCase] = {}
    for case in cases:
        key = (case.metric, case.shape, case.layouts, case.prefill, case.precision, case.load, case.version)
        other = found.setdefault(key, case)
        if _apart(other.measured, case.measured) > CONTRADICTORY:
            raise EngineCalibrationError(
                f"{other.id} and {case.id} contradict each other: {case.metric} {other.measured:.3g} and "
                f"{case.measured:.3g} of one load; leave out the wrong one"
            )


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def _times(value: float, measured: float) -> str:
    ratio = value / measured
    return f"{ratio:.2g} times too high" if ratio > 1.0 else f"{1.0 / ratio:.2g} times too low"


def _noise(case: ServingCase) -> float:
    deviation = math.hypot(REPEATED[case.metric], UNMODELLED[case.metric])
    return deviation * (RANDOM_ARRIVALS if case.load.kind == "open" else 1.0)


def _metrics(log_seconds: Array, cases: Sequence[ServingCase]) -> list[float]:
    values = np.exp(log_seconds)
    return [float(v if case.metric.endswith("_seconds") else 1.0 / v) for v, case in zip(values, cases, strict=True)]
