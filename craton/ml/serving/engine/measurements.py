"""Engine throughput and latencies, beside what the last steps should have taken.

Latencies are time to first token, inter-token latency and queue time, measured from when the engine receives a request.
The front end measures the same from the HTTP request, for /metrics; these go to the run's metric files, which outlive
the server.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from craton.ml.serving.engine.planned_steps import BatchWork, PlannedSteps, batch_work
from craton.ml.serving.messages import STEP_BOUNDS, OutputDelta

if TYPE_CHECKING:
    from craton.ml.serving.schedule import DraftInput, ScheduledStep

STEPS = 64  # the last steps, over which means are taken
IDLE_SECONDS = 1.0  # after a longer gap between two steps the engine was idle
WINDOW_SECONDS = 60.0
MAX_SAMPLES = 1024  # of each latency, the newest

Sample = tuple[float, float]  # when, and how many seconds


class Rates:
    """Means over the last steps. Steps overlap, so a step lasts from the previous step's read-back to its own."""

    def __init__(self, planned: PlannedSteps | None = None) -> None:
        self.steps = self.step_tokens = 0
        self.context_tokens = self.shared_tokens = 0  # KV cache tokens of all steps; of these, not read again
        self.steps_by_tokens = [0] * (len(STEP_BOUNDS) + 1)
        self._planned = planned
        self._last = 0.0
        self._recent: deque[tuple[float, int, BatchWork]] = deque(maxlen=STEPS)  # seconds, tokens, work

    def record(
        self, step: ScheduledStep, sampled: int, generated: int | None = None, drafts: DraftInput | None = None
    ) -> None:
        """Count a step that sampled so many tokens, of which `generated` were kept: all, without draft tokens."""
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        tokens = step.tokens
        self.steps += 1
        self.step_tokens += tokens
        self.steps_by_tokens[bisect_left(STEP_BOUNDS, tokens)] += 1
        context, shared = sum(part.begin + part.count for part in step.parts), step.saved_tokens
        self.context_tokens += context
        self.shared_tokens += shared
        if seconds < IDLE_SECONDS:
            self._recent.append((seconds, sampled if generated is None else generated, batch_work(step, drafts)))

    @property
    def step_seconds(self) -> float:
        return self._mean(0)

    @property
    def plan_step_seconds(self) -> float:
        """The predicted time of the same steps; 0 without a plan."""
        return self._planned.mean_seconds(self._work) if self._planned is not None else 0.0

    @property
    def roofline(self) -> float:
        """The minimum time of the same steps over the measured one; 0 without a plan."""
        if self._planned is None or not self.step_seconds:
            return 0.0
        return self._planned.mean_roofline_seconds(self._work) / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        is_fresh = time.monotonic() - self._last < IDLE_SECONDS
        return self._mean(1) / self.step_seconds if is_fresh and self.step_seconds else 0.0

    @property
    def _work(self) -> list[BatchWork]:
        return [work for _, _, work in self._recent]

    def _mean(self, index: Literal[0, 1]) -> float:
        return sum(item[index] for item in self._recent) / len(self._recent) if self._recent else 0.0


class Latencies:
    """Latency samples of the last minute. Times are of the monotonic clock, as `OutputDelta.admitted` is."""

    def __init__(self) -> None:
        self._submitted: dict[int, float] = {}  # requests without a token
        self._newest: dict[tuple[int, int], float] = {}  # request and copy → time of its newest token
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
        """Return median and 95th percentile of each latency that has samples in the last minute."""
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
