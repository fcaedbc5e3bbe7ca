"""The measurements of one request, and whether it meets the objectives. Times are seconds after the start of its load.

Latencies count from when the request was due, not from when it was sent, so that a late client does not make the server
look faster (coordinated omission).

A request is good if it was answered and meets every limit of the user, such as `ttft=500ms,itl=50ms`. `itl` applies to
the 95th percentile of the request's own gaps. A request with a single token has no gaps, so no `itl` and no `tpot`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from craton.bench.load.errors import WorkloadError
from craton.formatting import setting

NAMES = ("ttft", "itl", "tpot", "e2e")
_LIMIT = re.compile(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*")

_NO_TIMES = np.empty(0)


@dataclass(frozen=True, eq=False)
class RequestSample:
    """One request, from its due time to its end. `chunk_seconds`: arrival of each chunk with tokens."""

    due_seconds: float
    sent_seconds: float
    end_seconds: float
    chunk_seconds: np.ndarray = field(default_factory=lambda: _NO_TIMES, repr=False)
    prompt_tokens: int | None = None  # None: unknown
    output_tokens: int = 0
    cached_tokens: int | None = None  # prefix cache hits of the prompt; None: the server does not report them
    has_usage: bool = False  # False: `output_tokens` counts chunks
    error: str = ""  # kind of error; empty: answered completely
    error_detail: str = ""

    @property
    def late_seconds(self) -> float:
        """Return how late the client sent it."""
        return self.sent_seconds - self.due_seconds

    @property
    def ttft_seconds(self) -> float | None:
        return float(self.chunk_seconds[0]) - self.due_seconds if len(self.chunk_seconds) else None

    @property
    def e2e_seconds(self) -> float:
        return self.end_seconds - self.due_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Return the time per output token after the first, however tokens are split into chunks."""
        if self.output_tokens < 2 or not len(self.chunk_seconds):
            return None
        return (self.end_seconds - float(self.chunk_seconds[0])) / (self.output_tokens - 1)

    @property
    def gap_seconds(self) -> np.ndarray:
        """Return the gaps between chunks; a chunk with several tokens counts once."""
        return np.diff(self.chunk_seconds)

    @property
    def itl_seconds(self) -> float | None:
        """Return the 95th percentile of this request's gaps."""
        gaps = self.gap_seconds
        return float(np.percentile(gaps, 95)) if len(gaps) else None


@dataclass(frozen=True)
class Objectives:
    """Service level objectives: latency limits by name, in seconds."""

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
                f"--slo {part.strip()!r} is not a limit; write for example ttft=500ms,itl=50ms, each of "
                f"{', '.join(NAMES)} no more than once, in ms or s"
            )
        limits[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return Objectives(tuple(limits.items()))
