"""What was seen of one request. All times are seconds after the start of its load.

Latencies count from when the request was due, not from when it was sent: a client that was late, or waited for a free
connection, does not make the server look faster than its users find it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
