"""Heartbeats of a serving rank to its node's agent, which restarts a rank without one for too long.

A rank sends them between steps, and as often when idle. So only a step that never returns, or a stopped process, counts
as a hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from craton.ml.serving.settings import EngineSettings
from craton.planning.serving import ServedSteps
from craton.telemetry.rank import RankPage

MIN_SECONDS = 60.0  # minimum timeout of a step: it may have to compile a kernel
SLOWNESS = 10.0  # timeout of a step as a multiple of the predicted time of the largest one
CONTROL_SECONDS = 3600.0  # timeout of weight updates and other controls of a rank


class EngineHeartbeat:
    """Heartbeats of a rank whose steps take up to `patience_seconds`; without an agent `page` is None. It is active
    inside its `with` block: loading before it and shutdown after it send none."""

    def __init__(self, page: RankPage | None, patience_seconds: float = MIN_SECONDS) -> None:
        self._page = page
        self._patience_seconds = patience_seconds

    def __enter__(self) -> EngineHeartbeat:
        self._expect(self._patience_seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._expect(CONTROL_SECONDS)

    def beat(self) -> None:
        if self._page is not None:
            self._page.beat()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Allow the block to take CONTROL_SECONDS."""
        self._expect(CONTROL_SECONDS)
        try:
            yield
        finally:
            self._expect(self._patience_seconds)

    def _expect(self, seconds: float) -> None:
        """Send a heartbeat and expect the next one within `seconds`."""
        if self._page is not None:
            self._page.beat()
            self._page.patience = seconds


def patience_of(steps: ServedSteps, settings: EngineSettings, kv_tokens: int) -> float:
    """Return the seconds after which a step counts as hung: no step computes more than a chunk of the longest prompt or
    reads more than the whole KV cache."""
    running, chunk = float(settings.max_running), float(settings.chunk_tokens)
    largest = steps.mixed_seconds(running, kv_tokens / running, chunk, 2.0 * settings.max_length)
    return max(MIN_SECONDS, SLOWNESS * float(largest))
