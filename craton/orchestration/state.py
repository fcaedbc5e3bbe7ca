"""Whether a run runs, and one command at a time that starts something for it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from craton.orchestration.errors import RunStateError
from craton.orchestration.local import MOVING, living_agents
from craton.telemetry import RunDirectory, summarize


def wait_for_agents(run: RunDirectory, seconds: float = 10.0) -> None:
    """Until the agents of a run that has ended are gone too, so that it may be resumed at once."""
    deadline = time.monotonic() + seconds
    while living_agents(run) and time.monotonic() < deadline:
        time.sleep(0.02)


def check_running(run: RunDirectory, what: str = "stop") -> None:
    if not living_agents(run):
        state = summarize(run).state
        if state == "done":
            raise RunStateError(f"{run.name} is done already: there is nothing to {what}")
        raise RunStateError(
            f"{run.name} does not run here ({'lost' if state in MOVING else state}); `craton resume {run.name}` goes on"
        )


def check_not_running(run: RunDirectory) -> None:
    alive = living_agents(run)
    if alive:
        raise RunStateError(
            f"{run.name} is running ({', '.join(agent.node for agent in alive)}); `craton logs {run.name} -f` follows "
            f"it, `craton stop {run.name}` stops it with a checkpoint"
        )


@contextmanager
def launching(run: RunDirectory) -> Iterator[None]:
    """One command at a time starts processes for a run."""
    with open(run.path / "launch.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunStateError(f"{run.name} is being started by another command; `craton ps` shows it") from None
        yield


def write_whole(path: Path, text: str) -> None:
    """Replace a file as a whole, so that a reader sees the old or the new one."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
