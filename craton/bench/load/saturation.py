"""Where a server saturates: which rate to try next, and whether it kept up with one. Pure functions.

A sweep doubles the rate until the server does not keep up, then halves the gap between the highest rate that went well
and the lowest that did not, until they are within a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from craton.bench.load.load import Sweep
from craton.bench.load.samples import RequestSample
from craton.bench.load.summary import Summary
from craton.formatting import percent

MAX_FAILED = 0.01  # of the requests of a level that went well
MIN_GOOD = 0.9  # of the requests of a level that went well must meet the objectives, where there are any
_CLOSE_ENOUGH = 1.1


@dataclass(frozen=True)
class Saturation:
    """Between two rates in requests/s. `sustained` None: not even the lowest went well; `too_much` None: all did."""

    sustained: float | None
    too_much: float | None


def next_rate(sweep: Sweep, went_well: Mapping[float, bool]) -> float | None:
    """The rate to try after those that were; None when saturation is found, or lies outside of the sweep."""
    if not went_well:
        return sweep.low
    bounds = saturation(went_well)
    if bounds.too_much is None:
        highest = max(went_well)
        return min(2 * highest, sweep.high) if highest < sweep.high else None
    if bounds.sustained is None or bounds.too_much / bounds.sustained <= _CLOSE_ENOUGH:
        return None
    return float(f"{math.sqrt(bounds.sustained * bounds.too_much):.3g}")


def saturation(went_well: Mapping[float, bool]) -> Saturation:
    """A rate above one that did not go well is not believed, even when it went well."""
    too_much = min((rate for rate, well in went_well.items() if not well), default=None)
    below = [rate for rate, well in went_well.items() if well and (too_much is None or rate < too_much)]
    return Saturation(max(below, default=None), too_much)


def why_not(samples: Sequence[RequestSample], summary: Summary) -> str:
    """Why a level of a sweep did not go well, in two or three words for a table; empty when it did."""
    if summary.failed > MAX_FAILED * summary.requests:
        return f"{summary.failed} of {summary.requests} failed"
    if not keeps_up(samples):
        return "piles up"
    if summary.good_share is not None and summary.good_share < MIN_GOOD:
        return f"{percent(summary.good_share)} good"
    return ""


def keeps_up(samples: Sequence[RequestSample]) -> bool:
    """Whether requests ended as fast as they came, in the second half of the time in which they came.

    How many are inside of the server varies by chance: the number is about Poisson, so the difference of two of them
    has a variance of at most twice the mean. Growth beyond 2.5 deviations, 5% of the arrivals and two requests (small
    numbers have longer tails) is no chance. The mean is that of the first quarter, before a queue is long (Little:
    arrivals/s times seconds inside, of which the median), or a queue would excuse itself.
    """
    last = max((sample.due_seconds for sample in samples), default=0.0)
    middle = last / 2
    came = sum(middle < sample.due_seconds <= last for sample in samples)
    ended = sum(middle < sample.end_seconds <= last for sample in samples)
    early = [sample.e2e_seconds for sample in samples if sample.due_seconds <= last / 4]
    inside = len(early) * median(early) / (last / 4) if last > 0 else 0.0
    return came - ended <= 2.5 * math.sqrt(2 * inside) + 0.05 * came + 2


def too_short(samples: Sequence[RequestSample], summary: Summary) -> bool:
    """Whether requests took longer than half of the time in which they came: then nothing became steady."""
    last = max((sample.due_seconds for sample in samples), default=0.0)
    return summary.e2e_seconds is not None and summary.e2e_seconds.p50 > last / 2
