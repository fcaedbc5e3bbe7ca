"""Count the starts of a run that made no progress. `run.restarts` limits these, not the total number of starts.

A start that made progress and did not fail is not counted: a long training may have any number of time limits,
preemptions and lost nodes. Nor is a start that Slurm ended and that reports no steps: a server, a command without
`progress:`, a start still in pre-flight. Only the batch program writes RUN/starts.json, and only one runs at a time.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from craton.telemetry import RunDirectory, read_json

STARTS_FILE = "starts.json"
CLOCK_SECONDS = 60.0  # by which clocks of the controller and of file servers may differ


@dataclass(frozen=True)
class Starts:
    """The newest start, and the count of earlier ones."""

    nonce: str  # of their submission: a resume restarts the count
    furthest: int = 0  # step of the run before the newest start
    fruitless: int = 0  # earlier starts that failed or made no progress
    has_failed: bool = False  # the newest failed
    is_excused: bool = False  # Slurm ended the newest, and its progress is unknown
    number: int = 1  # of the newest; Slurm's own count includes starts that never reached the batch program

    def spent(self, step: int) -> int:
        """Return the counted starts if the newest ends at this step."""
        came_no_further = step <= self.furthest and not self.is_excused
        return self.fruitless + (1 if self.has_failed or came_no_further else 0)


def next_start(last: Starts | None, nonce: str, step: int) -> Starts:
    """Return the next start of a run that is at `step`."""
    if last is None or last.nonce != nonce:
        return Starts(nonce, step)
    return Starts(nonce, max(step, last.furthest), last.spent(step), number=last.number + 1)


def may_start_again(spent: int, restarts: int) -> bool:
    """Whether a run may be requeued; never with `run.restarts: 0`."""
    return restarts > 0 and spent <= restarts


def read_starts(run: RunDirectory) -> Starts | None:
    try:
        return Starts(**read_json(run.path / STARTS_FILE))
    except TypeError:
        return None


def has_begun(run: RunDirectory, since: float) -> bool:
    """Return whether a batch script of the run has begun since (epoch seconds), give or take CLOCK_SECONDS: writing the
    start is the first that it does, before checks of its nodes."""
    try:
        return (run.path / STARTS_FILE).stat().st_mtime >= since - CLOCK_SECONDS
    except OSError:
        return False


def write_starts(run: RunDirectory, starts: Starts) -> None:
    fresh = run.path / f".{STARTS_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(starts), indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, run.path / STARTS_FILE)
