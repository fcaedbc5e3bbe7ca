"""How often Slurm has started a run for nothing. `run.restarts` bounds that, and not how often a run goes on.

A start that came further than the one before and was not ended by a failure of its own costs nothing: a long training
has as many slices of the time limit, preemptions and lost nodes as it takes. Nor does one that was asked to leave where
nobody can see how far it came: a server, a command without progress, a start that was still checking its nodes.
RUN/starts.json is written by the batch program alone, of which there is one at a time.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from craton.telemetry import RunDirectory, read_json

STARTS_FILE = "starts.json"


@dataclass(frozen=True)
class Starts:
    """The newest start, and what those before it were."""

    nonce: str  # of the submission they belong to: one that is resumed begins anew
    furthest: int = 0  # step that the run had come to before the newest start
    fruitless: int = 0  # starts before it that came no further, or failed
    has_failed: bool = False  # the newest was ended by a failure
    is_excused: bool = False  # the newest was asked to leave, and how far it came cannot be told
    number: int = 1  # of the newest; Slurm's own count has those that never got as far as the batch program, too

    def spent(self, step: int) -> int:
        """How many have been for nothing, should the newest end at this step."""
        came_no_further = step <= self.furthest and not self.is_excused
        return self.fruitless + (1 if self.has_failed or came_no_further else 0)


def next_start(last: Starts | None, nonce: str, step: int) -> Starts:
    """One more start, of a run that has come to `step`."""
    if last is None or last.nonce != nonce:
        return Starts(nonce, step)
    return Starts(nonce, max(step, last.furthest), last.spent(step), number=last.number + 1)


def may_start_again(spent: int, restarts: int) -> bool:
    """With `run.restarts: 0` a run is never started again."""
    return restarts > 0 and spent <= restarts


def read_starts(run: RunDirectory) -> Starts | None:
    try:
        return Starts(**read_json(run.path / STARTS_FILE))
    except TypeError:
        return None


def write_starts(run: RunDirectory, starts: Starts) -> None:
    fresh = run.path / f".{STARTS_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(starts), indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, run.path / STARTS_FILE)
