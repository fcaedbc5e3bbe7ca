"""What something costs as the number of functions that it calls: the same on every machine, however slow or busy it is.

Seconds are for the benchmarks; a test that reads a clock fails where the machine is slow, not where the code is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Calls:
    number: int = 0


@contextmanager
def counted_calls(*, of_threads: bool = False) -> Iterator[Calls]:
    """Counts the functions, of Python and of C, that this thread calls; `of_threads`: and those that it starts."""
    calls = Calls()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls.number += 1

    before, before_of_threads = sys.getprofile(), threading.getprofile()
    if of_threads:
        threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(before_of_threads)
