"""Orders of `craton chaos` that wait in a run directory."""

from __future__ import annotations

from craton.telemetry import RunDirectory
from craton.telemetry.files import paths_in


def disarm(run: RunDirectory) -> None:
    """Forget the orders of earlier generations: whoever resumes a run wants it whole."""
    for path in paths_in(run.chaos_folder, "*.json"):
        path.unlink(missing_ok=True)
