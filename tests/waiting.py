"""How tests wait: for a condition, with a deadline that only a defect reaches, however slow and busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 180.0  # an idle machine needs a hundredth of this; waiting longer costs time only where a test fails

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    what: object = "it did not happen",
    seconds: float = PATIENCE_SECONDS,
    look_seconds: float = 0.02,
) -> Found:
    """Return what the condition returns once that is true. `what` names the condition, or is a function that does."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what() if callable(what) else what}")
        time.sleep(look_seconds)
    return found
