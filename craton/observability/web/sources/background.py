"""Values that another server is asked for: asked in the background, so that one that hangs keeps no page waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
FIRST_SECONDS = 0.1  # for which whoever asks first waits, so that a quick answer is in the page


class Background(Generic[T]):
    """The last value, which is asked for anew when it is `seconds` old. `late` stands in before there is one, and when
    an answer takes longer than `deadline_seconds` as a whole; there is never more than one question under way."""

    def __init__(self, make: Callable[[], T], seconds: float, late: T, deadline_seconds: float) -> None:
        self._make, self._seconds, self._late, self._deadline = make, seconds, late, deadline_seconds
        self._changed = threading.Condition()
        self._value: tuple[T] | None = None
        self._asked_at = float("-inf")
        self._is_asking = False

    def get(self, wait_seconds: float = FIRST_SECONDS) -> T:
        """At once, but for the first value, which is waited for a moment."""
        with self._changed:
            now = time.monotonic()
            if not self._is_asking and now - self._asked_at >= self._seconds:
                self._is_asking, self._asked_at = True, now
                threading.Thread(target=self._ask, name="background", daemon=True).start()
            if self._value is None:
                self._changed.wait_for(lambda: self._value is not None, timeout=wait_seconds)
            is_late = self._is_asking and time.monotonic() - self._asked_at > self._deadline
            return self._late if self._value is None or is_late else self._value[0]

    def _ask(self) -> None:
        value = None
        try:
            value = (self._make(),)
        finally:
            with self._changed:
                self._is_asking = False
                self._value = value or self._value
                self._changed.notify_all()
