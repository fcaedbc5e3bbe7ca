"""What was seen of one request, and whether that is good enough. All times are seconds after the start of its load.

Latencies count from when the request was due, not from when it was sent: a client that was late, or waited for a free
connection, does not make the server look faster than its users find it.

A request is good when it was answered and meets every limit that a user set, such as `ttft=500ms,itl=50ms`. `itl` is
held against the 95th percentile of the request's own gaps, the others against its one number. A request with a single
token has no gaps and so no `itl` and no `tpot`.
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
    """One request, from due to its end. `chunk_seconds`: when each piece with tokens arrived."""

    due_seconds: float
    sent_seconds: float
    end_seconds: float
    chunk_seconds: np.ndarray = field(default_factory=lambda: _NO_TIMES, repr=False)
    prompt_tokens: int | None = None  # None: neither the server nor the prompt says
    output_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, found computed; None: the server does not say
    has_usage: bool = False  # False: tokens are chunks, counted
    error: str = ""  # its kind; empty: answered to the end
    error_detail: str = ""

    @property
    def late_seconds(self) -> float:
        """How long after it was due the client sent it."""
        return self.sent_seconds - self.due_seconds

    @property
    def ttft_seconds(self) -> float | None:
        return float(self.chunk_seconds[0]) - self.due_seconds if len(self.chunk_seconds) else None

    @property
    def e2e_seconds(self) -> float:
        return self.end_seconds - self.due_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first, however the tokens came in pieces."""
        if self.output_tokens < 2 or not len(self.chunk_seconds):
            return None
        return (self.end_seconds - float(self.chunk_seconds[0])) / (self.output_tokens - 1)

    @property
    def gap_seconds(self) -> np.ndarray:
        """Between one piece and the next: once a piece, even when it carries several tokens."""
        return np.diff(self.chunk_seconds)

    @property
    def itl_seconds(self) -> float | None:
        """The 95th percentile of this request's gaps."""
        gaps = self.gap_seconds
        return float(np.percentile(gaps, 95)) if len(gaps) else None


@dataclass(frozen=True)
class Objectives:
    """What a user calls good enough: limits on latencies by name, in seconds."""

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
