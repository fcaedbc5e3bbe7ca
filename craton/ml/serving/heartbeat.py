"""Signs of life of a rank that serves, for its node's agent: one without them for too long is ended and started again.

It gives them between two steps, and just as often when it has nothing to do. So only a step that never returns, or a
process that was stopped, is taken for one that hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from craton.ml.serving.settings import EngineSettings
from craton.planning.serving import Roofline
from craton.telemetry.rank import RankPage

MIN_SECONDS = 60.0  # that any step may take: a kernel may have to be compiled for it
SLOWNESS = 10.0  # how much longer than the machine's roofs allow the largest step may take
CONTROL_SECONDS = 3600.0  # that loading or receiving other weights, or any other change of a rank, may take


class EngineHeartbeat:
    """Of a rank whose steps take at most `patience_seconds`; without an agent (page None) nobody listens. It begins and
    ends with a `with`: loading before it, and the end of the process behind it, give no signs."""

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
        """What is done within it may take as long as a control may."""
        self._expect(CONTROL_SECONDS)
        try:
            yield
        finally:
            self._expect(self._patience_seconds)

    def _expect(self, seconds: float) -> None:
        """The next sign within so much time from now."""
        if self._page is not None:
            self._page.beat()
            self._page.patience = seconds


def patience_of(floor: Roofline, settings: EngineSettings, kv_tokens: int) -> float:
    """Seconds after which a step is one that never returns: none computes more than a chunk, or reads more than all
    keys and values."""
    chunk, length = settings.chunk_tokens, settings.max_length
    largest = floor.step_seconds(chunk, kv_tokens, settings.max_running, pairs=float(chunk * length))
    return max(MIN_SECONDS, SLOWNESS * largest)
