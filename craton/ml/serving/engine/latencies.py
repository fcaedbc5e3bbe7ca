"""How long requests take as the engine sees them: to the first token, between tokens, in the queue.

The front end counts the same from when a request came over HTTP, for /metrics. These are for the run's metric files,
which outlive the server: they begin when the engine has the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from craton.ml.serving.messages import OutputDelta

WINDOW_SECONDS = 60.0
MAX_SAMPLES = 1024  # of each latency; of more, the newest

Sample = tuple[float, float]  # when, and how many seconds


class Latencies:
    """Samples of the last minute. Times are of the monotonic clock, as `Piece.admitted` is."""

    def __init__(self) -> None:
        self._submitted: dict[int, float] = {}  # requests without a token
        self._newest: dict[tuple[int, int], float] = {}  # request and copy → when its newest token came
        self._samples: dict[str, deque[Sample]] = {
            name: deque(maxlen=MAX_SAMPLES) for name in ("first_token", "inter_token", "queue")
        }

    def begin(self, request: int, now: float) -> None:
        self._submitted[request] = now

    def note(self, pieces: Iterable[OutputDelta], now: float) -> None:
        for piece in pieces:
            if piece.tokens:
                self._note_tokens(piece, now)
            if piece.finish is not None:
                self._submitted.pop(piece.id, None)
                self._newest.pop((piece.id, piece.index), None)

    def quantiles(self, now: float) -> dict[str, tuple[float, float]]:
        """Median and 95th percentile of each latency; without those that nobody waited for in the last minute."""
        result = {}
        for name, samples in self._samples.items():
            while samples and now - samples[0][0] > WINDOW_SECONDS:
                samples.popleft()
            ordered = sorted(seconds for _, seconds in samples)
            if ordered:
                result[name] = (ordered[len(ordered) // 2], ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)])
        return result

    def _note_tokens(self, piece: OutputDelta, now: float) -> None:
        key = (piece.id, piece.index)
        before = self._newest.get(key)
        self._newest[key] = now
        if before is not None:
            self._samples["inter_token"].append((now, (now - before) / len(piece.tokens)))
        submitted = self._submitted.pop(piece.id, None)
        if submitted is not None:
            self._samples["first_token"].append((now, now - submitted))
            if piece.admitted:
                self._samples["queue"].append((now, max(0.0, piece.admitted - submitted)))
