"""The CPU time that a step of a rank takes: now, and as a rule.

A rank that waits for a CPU takes longer for a step, but hardly more CPU time. A step that does more work takes more of
both. The agent sees a new step only at its next read, so one step cannot be measured. The CPU time of a step is the
mean over a window of several steps, which begins and ends at reads that saw a new one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MIN_WINDOW_SECONDS, MIN_WINDOW_STEPS = 4.0, 4
MIN_WINDOW_CHANGES = 3  # reads that saw a new step, within a window
MAX_CHANGES = 400
NEWEST_SECONDS, USUAL_SECONDS = 10.0, 600.0  # usual are the windows of the last minutes without the newest ones


@dataclass(frozen=True)
class _Change:
    """A read that saw a new step."""

    moment: float  # monotonic
    step: int
    cpu_seconds: float  # of the rank and its children so far


class StepWork:
    """Measures the CPU time per step of one rank."""

    def __init__(self) -> None:
        self._changes: deque[_Change] = deque(maxlen=MAX_CHANGES)
        self._windows: deque[tuple[float, float]] = deque(maxlen=MAX_CHANGES)  # end of a window, CPU seconds per step

    def add(self, moment: float, step: int, cpu_seconds: float) -> None:
        """Take in one read: the last step that has begun, and the CPU time so far."""
        newest = _Change(moment, step, cpu_seconds)
        last = self._changes[-1] if self._changes else None
        if last is not None and (step < last.step or cpu_seconds < last.cpu_seconds):  # repeated, or a child is gone
            self._changes.clear()
        elif last is not None and step == last.step:
            return
        self._changes.append(newest)
        starts = reversed(list(self._changes)[:-MIN_WINDOW_CHANGES])
        start = next((change for change in starts if _is_window(change, newest)), None)
        if start is not None:
            self._windows.append((moment, (cpu_seconds - start.cpu_seconds) / (step - start.step)))

    @property
    def recent_seconds(self) -> float:
        """Return the CPU time per step of the newest window; 0: there is none yet."""
        return self._windows[-1][1] if self._windows else 0.0

    @property
    def usual_seconds(self) -> float:
        """Return the CPU time per step before: the 20th percentile of the earlier windows; 0: there are none."""
        last = self._windows[-1][0] if self._windows else 0.0
        before = sorted(work for moment, work in self._windows if NEWEST_SECONDS <= last - moment <= USUAL_SECONDS)
        return before[len(before) // 5] if before else 0.0


def _is_window(start: _Change, end: _Change) -> bool:
    return end.moment - start.moment >= MIN_WINDOW_SECONDS and end.step - start.step >= MIN_WINDOW_STEPS
