"""Waiting times in closed form, and percentiles of times of which the mean and the variance are known.

Sources: Krämer and Langenbach-Belz (1976) for one queue with general arrivals and services; Sakasegawa (1977) for the
probability that all servers of several are busy; Wilson and Hilferty (1931) for the gamma distribution.
All functions broadcast over arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # an array of floats, or a float

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
NORMAL_QUANTILES = {"p50": 0.0, "p90": 1.2816, "p95": 1.6449, "p99": 2.3263}
FULL = 0.98  # utilization up to which queues follow the formulas; they grow without bound above it
ROUNDS = 18  # of the bisection for a percentile
REACH = 12.0  # a percentile up to p99 is below the mean plus this many standard deviations


def chunk_queue_tokens(load: Array, capacity: Array, dispersion: Array) -> Array:
    """Return the mean number of prompt tokens left over from earlier steps, where a step takes up to `capacity` tokens
    and the tokens that arrive during it have the mean load · capacity and the variance dispersion · mean.

    A D/G/1 queue: each step brings work of variable size, and works off a fixed amount (Krämer and Langenbach-Belz).
    For prompts of many chunks it is the M/G/1 formula of Pollaczek and Khinchine.
    """
    load = np.minimum(load, FULL)
    damping = np.exp(-2.0 * (1.0 - load) * capacity / (3.0 * np.maximum(dispersion, 1e-300)))
    return load * dispersion / (2.0 * (1.0 - load)) * damping


def waiting_probability(servers: Array, load: Array) -> Array:
    """Return the probability that all servers are busy at this utilization (Sakasegawa's exponent)."""
    return np.minimum(load, 1.0) ** (np.sqrt(2.0 * (servers + 1.0)) - 1.0)


def multiserver_wait_seconds(servers: Array, load: Array, service_seconds: Array, variability: Array) -> Array:
    """Return the mean wait for one of several servers. `variability`: the mean of the squared coefficients of variation
    of arrivals and services (Allen and Cunneen)."""
    idle = 1.0 - np.minimum(load, FULL)
    return service_seconds / servers * waiting_probability(servers, load) / idle * variability


def arrivals_beside(rate: Array, window_seconds: Array, variability: float) -> Array:
    """Return the mean number of other requests in the same window as one that arrives at a random place in it.

    Gaps are gamma distributed with this squared coefficient of variation. The renewal function is joined from its
    limits: (rate · time / variability)^(1 / variability) / Γ for short times, and for long ones
    rate · time + (variability − 1) / 2.
    """
    mean = rate * window_seconds
    half, most = 0.5 * mean, 0.5 * (variability - 1.0)
    if variability <= 1.0:
        return mean + 2.0 * most * -np.expm1(-2.0 * half)
    shape = 1.0 / variability
    soon = (half * shape) ** shape / math.gamma(1.0 + shape)
    return mean + 2.0 * most * -np.expm1(-soon / most)


def gamma_percentiles(mean: Array, variance: Array) -> Array:
    """Return the PERCENTILES, as the first axis, of a gamma distribution with these moments."""
    mean = np.asarray(mean)
    z = _leading(np.array(list(NORMAL_QUANTILES.values())), mean)
    width = np.sqrt(np.maximum(variance, 1e-12 * mean**2)) / (3.0 * mean)  # 1 / (3 · root of the shape)
    return mean * np.maximum(1.0 - width**2 + z * width, 0.0) ** 3


def delayed_percentiles(mean: Array, variance: Array, delayed: Array, delay: Array) -> Array:
    """Return the PERCENTILES, as the first axis, of a gamma-distributed time to which, with probability `delayed`, an
    exponential delay with mean `delay` is added; by bisection."""
    mean = np.asarray(mean)
    later_mean, later_variance = mean + delay, variance + delay**2

    def share_below(time: Array) -> Array:
        soon, late = gamma_share(time, mean, variance), gamma_share(time, later_mean, later_variance)
        return soon + delayed * (late - soon)

    return mixture_percentiles(share_below, later_mean + REACH * np.sqrt(later_variance))


def mixture_percentiles(share_below: Callable[[Array], Array], most: Array) -> Array:
    """Return the PERCENTILES, as the first axis, of times whose share below a time is known; none is above `most`. By
    bisection."""
    most = np.asarray(most)
    share = _leading(np.array(list(PERCENTILES.values())), most)
    low, high = np.zeros(share.shape[:1] + np.shape(most)), most + np.zeros(share.shape[:1] + np.shape(most))
    for _ in range(ROUNDS):
        middle = 0.5 * (low + high)
        is_low = share_below(middle) < share
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return middle


def uniform_share(time: Array, low: Array, high: Array) -> Array:
    """Return the share of a uniform distribution that is below `time`; both ends may be the same."""
    width = np.maximum(high - low, 1e-9 * np.maximum(high, 1e-9))
    return np.clip((time - low) / width, 0.0, 1.0)


def gamma_share(time: Array, mean: Array, variance: Array) -> Array:
    """Return the share of a gamma distribution that is below `time`. The normal distribution: Page (1977), to 2e-4."""
    time = np.maximum(time, 0.0)
    width = np.sqrt(np.maximum(variance, 1e-12 * mean**2)) / (3.0 * mean)
    z = (np.cbrt(time / mean) - 1.0 + width**2) / width
    return 1.0 / (1.0 + np.exp(np.clip(-z * (1.5976 + 0.07056 * z * z), -50.0, 50.0)))


def bounded_variance(least: Array, mean: Array, most: Array) -> Array:
    """Return the largest variance of times between two ends with this mean (Bhatia and Davis, 2000)."""
    return (most - mean) * (mean - least)


def floored_share(time: Array, least: Array, mean: Array, variance: Array) -> Array:
    """Return the share below `time` of times that are at least `least`: it, and a gamma-distributed rest."""
    return gamma_share(time - least, np.maximum(mean - least, 1e-3 * mean), variance)


def _leading(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    return values.reshape(-1, *[1] * like.ndim)
