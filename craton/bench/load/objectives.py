"""What a user calls good enough: limits on a request's latencies, such as `ttft=500ms,itl=50ms`.

A request is good when it was answered and meets every limit. `itl` is held against the 95th percentile of the request's
own gaps, the others against its one number. A request with a single token has no gaps and so no `itl` and no `tpot`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from craton.bench.load.errors import WorkloadError
from craton.bench.load.samples import RequestSample
from craton.formatting import setting

NAMES = ("ttft", "itl", "tpot", "e2e")
_LIMIT = re.compile(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*")


@dataclass(frozen=True)
class Objectives:
    """The limits by name, in seconds."""

    seconds: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} ≤ {setting(limit)}" if limit >= 1 else f"{name} ≤ {1e3 * limit:g} ms"
            for name, limit in self.seconds
        )

    def met_by(self, sample: RequestSample) -> bool:
        measured = (getattr(sample, f"{name}_seconds") for name, _ in self.seconds)
        return not sample.error and all(
            value is None or value <= limit for value, (_, limit) in zip(measured, self.seconds, strict=True)
        )


def parse_objectives(text: str) -> Objectives:
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part)
        if match is None or match[1] not in NAMES or match[1] in limits:
            raise WorkloadError(
                f"--slo {part.strip()!r} is no limit; write for instance ttft=500ms,itl=50ms, with each of "
                f"{', '.join(NAMES)} at most once, in ms or s"
            )
        limits[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return Objectives(tuple(limits.items()))
