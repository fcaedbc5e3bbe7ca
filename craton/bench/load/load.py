"""Load shapes: a fixed concurrency (closed loop), or arrival times that do not wait for answers (open loop).

A closed loop shows a server's maximum throughput, but a slow server slows its own load. An open loop is like real
users: it continues when the server stalls, and latencies count from the time a request was due.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from craton.bench.load.errors import WorkloadError
from craton.bench.load.requests import ARRIVALS
from craton.formatting import setting

_SWEEP = re.compile(r"\s*(\d+(?:\.\d+)?)\s*\.\.\s*(\d+(?:\.\d+)?)\s*")


@dataclass(frozen=True)
class Closed:
    """A closed loop of `concurrency` requests: the next is sent when one ends."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} at a time"


@dataclass(frozen=True)
class Open:
    """An open loop. Gaps between requests follow a gamma distribution with mean 1/rate and shape `burstiness`: 1 is
    Poisson, less is burstier, more is steadier."""

    requests_per_second: float
    burstiness: float = 1.0

    def __str__(self) -> str:
        kind = "Poisson" if self.burstiness == 1 else f"burstiness {self.burstiness:g}"
        return f"{self.requests_per_second:g} requests/s, {kind}"

    def times(self, seed: int, stream: int) -> Iterator[float]:
        """Yield the seconds after the start at which requests are due; the first at once."""
        generator = np.random.default_rng([seed, ARRIVALS, stream])
        scale = 1 / (self.requests_per_second * self.burstiness)
        at = 0.0
        for _ in count():
            yield at
            at += float(generator.gamma(self.burstiness, scale))


@dataclass(frozen=True)
class Timed:
    """Requests are due at the times of their trace."""

    def __str__(self) -> str:
        return "at the times of the trace"


@dataclass(frozen=True)
class Sweep:
    """Open loads with rates from `low` up to `high`, to find the highest that the server sustains."""

    low: float
    high: float
    burstiness: float = 1.0

    def __str__(self) -> str:
        return f"sweep over {self.low:g}..{self.high:g} requests/s"


@dataclass(frozen=True)
class Limit:
    """When a load stops sending: after `requests`, or after `seconds`. Sent requests are awaited."""

    requests: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.requests:,} requests" if self.requests is not None else setting(self.seconds)


def parse_sweep(text: str, burstiness: float = 1.0) -> Sweep:
    match = _SWEEP.fullmatch(text)
    if match is None or not 0 < float(match[1]) < float(match[2]):
        raise WorkloadError(f"--sweep {text!r} is not a range of rates; write 1..64 (requests/s, above 0)")
    return Sweep(float(match[1]), float(match[2]), burstiness)
