"""The saturation search: which rate to try next, and whether the server sustained one. Pure functions.

A sweep doubles the rate until the server does not keep up, then bisects between the highest rate that passed and the
lowest that failed, until they are within 10%.
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

MAX_FAILED = 0.01  # maximum share of failed requests in a level that passes
MIN_GOOD = 0.9  # minimum share of requests that meet the objectives, if any, in a level that passes
_CLOSE_ENOUGH = 1.1


@dataclass(frozen=True)
class Saturation:
    """The saturation point between two rates in requests/s. `sustained` None: all failed; `too_much` None: none did."""

    sustained: float | None
    too_much: float | None


def next_rate(sweep: Sweep, went_well: Mapping[float, bool]) -> float | None:
    """Return the next rate to try; None if saturation is found or outside the sweep."""
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
    """Return the saturation range; a rate above a failed one does not count, even if it passed."""
    too_much = min((rate for rate, well in went_well.items() if not well), default=None)
    below = [rate for rate, well in went_well.items() if well and (too_much is None or rate < too_much)]
    return Saturation(max(below, default=None), too_much)


def why_not(samples: Sequence[RequestSample], summary: Summary) -> str:
    """Return why a level of a sweep failed, in a few words for a table; empty if it passed."""
    if summary.failed > MAX_FAILED * summary.requests:
        return f"{summary.failed} of {summary.requests} failed"
    if not keeps_up(samples):
        return "backlog"
    if summary.good_share is not None and summary.good_share < MIN_GOOD:
        return f"{percent(summary.good_share)} good"
    return ""


def keeps_up(samples: Sequence[RequestSample]) -> bool:
    """Whether requests ended as fast as they arrived, in the second half of the arrival time.

    The number of requests in the server is about Poisson, so the difference of two such numbers has a variance of up
    to twice the mean. Growth beyond 2.5 standard deviations, 5% of the arrivals and two requests (small numbers have
    longer tails) is not random. The mean is that of the first quarter, before a queue builds up (Little's law:
    arrivals/s times the median seconds in the server).
    """
    last = max((sample.due_seconds for sample in samples), default=0.0)
    middle = last / 2
    came = sum(middle < sample.due_seconds <= last for sample in samples)
    ended = sum(middle < sample.end_seconds <= last for sample in samples)
    early = [sample.e2e_seconds for sample in samples if sample.due_seconds <= last / 4]
    inside = len(early) * median(early) / (last / 4) if last > 0 else 0.0
    return came - ended <= 2.5 * math.sqrt(2 * inside) + 0.05 * came + 2


def too_short(samples: Sequence[RequestSample], summary: Summary) -> bool:
    """Whether requests took longer than half the arrival time, so that there was no steady state."""
    last = max((sample.due_seconds for sample in samples), default=0.0)
    return summary.e2e_seconds is not None and summary.e2e_seconds.p50 > last / 2
