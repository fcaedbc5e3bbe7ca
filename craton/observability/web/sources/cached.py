"""Values that are costly to make and asked for by many: made anew now and then, by whoever asks first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_SHARE = 0.1  # of the time is spent on making one value, however costly it is


class Cached(Generic[T]):
    """The value is at least `seconds` old before it is made again, and older where making it takes long. Whoever asks
    while another thread makes it gets the old one."""

    def __init__(self, make: Callable[[], T], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._lock = threading.Lock()
        self._value: tuple[T] | None = None
        self._due = float("-inf")

    def get(self) -> T:
        value = self._value
        if value is not None and time.monotonic() < self._due:
            return value[0]
        if not self._lock.acquire(blocking=value is None):
            assert value is not None
            return value[0]
        try:
            if self._value is None or time.monotonic() >= self._due:
                began = time.monotonic()
                self._value = (self._make(),)
                ended = time.monotonic()
                self._due = ended + max(self._seconds, (ended - began) / MAX_SHARE)
            return self._value[0]
        finally:
            self._lock.release()
