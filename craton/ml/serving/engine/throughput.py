"""How fast an engine is, over its last steps, and how fast the machine's roofs would let it be."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Protocol

from craton.ml.serving.messages import STEP_BOUNDS

if TYPE_CHECKING:
    from craton.ml.serving.schedule import ScheduledStep

STEPS = 64  # that means are taken over
IDLE_SECONDS = 1.0  # between two readings: longer than that, nobody asked for anything


class Floor(Protocol):
    """The least seconds that a step can take."""

    def step_seconds(self, tokens: int, context_tokens: int, sampled: int, pairs: float) -> float: ...


class Rates:
    """Means over the last steps. Steps overlap, so a step lasts from the reading of the one before to its own."""

    def __init__(self, floor: Floor | None = None) -> None:
        self.steps = self.step_tokens = 0
        self.steps_by_tokens = [0] * (len(STEP_BOUNDS) + 1)
        self._floor = floor
        self._last = 0.0
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=STEPS)  # seconds, least seconds, tokens

    def record(self, step: ScheduledStep, sampled: int) -> None:
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        tokens = step.tokens
        self.steps += 1
        self.step_tokens += tokens
        self.steps_by_tokens[bisect_left(STEP_BOUNDS, tokens)] += 1
        if seconds < IDLE_SECONDS:
            least = 0.0
            if self._floor is not None:
                context = sum(part.begin + part.count for part in step.parts)
                pairs = sum(part.count * (part.begin + (part.count + 1) / 2) for part in step.parts)
                least = self._floor.step_seconds(tokens, context, sampled, pairs)
            self._recent.append((seconds, least, sampled))

    @property
    def step_seconds(self) -> float:
        return self._mean(0)

    @property
    def plan_step_seconds(self) -> float:
        return self._mean(1)

    @property
    def roofline(self) -> float:
        return self.plan_step_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        is_fresh = time.monotonic() - self._last < IDLE_SECONDS
        return self._mean(2) / self.step_seconds if is_fresh and self.step_seconds else 0.0

    def _mean(self, index: int) -> float:
        return sum(item[index] for item in self._recent) / len(self._recent) if self._recent else 0.0
