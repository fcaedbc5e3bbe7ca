"""Files of a run that commands write and remove: atomic replacement, the user's STOP, orders of `craton chaos`."""

from __future__ import annotations

from pathlib import Path

from craton.telemetry import RunDirectory
from craton.telemetry.files import paths_in, replace_text

USER_STOP = "craton stop"  # prefix of a user's STOP marker; agents and schedulers set it too
SCHEDULER_STOP = "leaving for Slurm:"  # prefix of a STOP marker that Slurm's warning causes


def stopped_by_scheduler(run: RunDirectory) -> bool:
    """Return whether Slurm asked the run to leave: its time limit is near, or another job takes the nodes."""
    return any(line.startswith(SCHEDULER_STOP) for line in run.marker_text("STOP").splitlines())


def stopped_by_user(run: RunDirectory) -> bool:
    return any(line.startswith(USER_STOP) for line in run.marker_text("STOP").splitlines())


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old or the new one, also after a power loss."""
    path.parent.mkdir(exist_ok=True)
    replace_text(path, text)


def disarm(run: RunDirectory) -> None:
    """Delete the fault orders of earlier generations: a resumed run starts without them."""
    for path in paths_in(run.chaos_folder, "*.json"):
        path.unlink(missing_ok=True)
