"""Remove a run: everything in the run directory, and nothing outside it.

A run that is running, waiting or in an unknown state is never removed. Checkpoints in tiers outside the run directory
stay: another run may have started from them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from craton.errors import CratonError
from craton.job import load_job
from craton.job.sections import place_of
from craton.orchestration.errors import RunStateError
from craton.orchestration.watching import GOES_ON, check_not_running, launching, living_members, standing_of
from craton.telemetry import RunDirectory, list_runs, summarize
from craton.telemetry.files import noting_unread
from craton.telemetry.members import living_manager, owner_of, read_members, with_members


@dataclass(frozen=True)
class Removal:
    """What removing a run deletes, and what it keeps."""

    run: RunDirectory
    size_bytes: int
    num_checkpoints: int  # in the run directory
    stays: tuple[str, ...]  # checkpoint tiers outside it


def plan_removal(run: RunDirectory) -> Removal:
    """Plan the removal of a run; RunStateError if it has not ended."""
    _check_ended(run)
    size_bytes, num_checkpoints = 0, 0
    for folder, folders, files in os.walk(run.path):
        num_checkpoints += sum(name.startswith("step-") for name in folders) if "checkpoints" in folder else 0
        size_bytes += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
    places = [place for owned in with_members([run]) for place in _places_elsewhere(owned)]
    return Removal(run, size_bytes, num_checkpoints, tuple(dict.fromkeys(places)))


def remove_run(run: RunDirectory) -> None:
    """Delete the run directory and a link to it; links inside it are removed, not followed."""
    with launching(run):
        _check_ended(run)
        # Rename first: a half-removed directory must not look like a run that a command could start.
        place = run.path.resolve()
        aside = place.with_name(f".{place.name}.removed.{os.getpid()}")
        try:
            os.rename(place, aside)
        except OSError as error:
            raise RunStateError(f"{run.path} cannot be removed: {error.strerror}") from None
        if run.path.is_symlink():
            run.path.unlink()
    shutil.rmtree(aside)


def _check_ended(run: RunDirectory) -> None:
    owner = owner_of(run)
    if owner is not None and (living_manager(owner) is not None or standing_of(owner).condition in GOES_ON):
        raise RunStateError(
            f"{run.name} is not removed: its owner {owner.name} runs and would start it again; "
            f"`craton stop {owner.name}` stops both"
        )
    try:
        check_not_running(run)
    except RunStateError as error:
        raise RunStateError(f"{run.name} is not removed: {error}") from None
    with noting_unread():  # a run with unreadable files can be removed too
        state = summarize(run).state
    for owned in with_members([run]):
        if living_manager(owned) is not None or living_members(owned):
            raise RunStateError(f"{run.name} is not removed: members of it run; `craton stop {run.name}` stops them")
    for other in _runs_from(run):
        raise RunStateError(
            f"{run.name} is not removed: {other.name} runs and starts from its weights; `craton stop {other.name}` "
            "stops it"
        )
    if state in ("running", "stopping"):  # by its heartbeat, on a machine that is not visible from here
        raise RunStateError(
            f"{run.name} is not removed: its agents report that it is {state}; `craton stop {run.name}` stops it"
        )


def _runs_from(run: RunDirectory) -> Iterator[RunDirectory]:
    """Yield running runs that start from the weights of this one: after a lost node they may read them again."""
    for other in list_runs(run.root):
        kept = [item.result for item in read_members(other).members if item.is_kept]
        uses = any(Path(result).is_relative_to(run.path) for result in kept)
        if uses and other != run and standing_of(other).condition in GOES_ON:
            yield other


def _places_elsewhere(run: RunDirectory) -> list[str]:
    try:
        job = load_job(run.job_path)
        storage = job.cluster.file.storage if job.cluster.file else None
        located = [place_of(tier, storage, run.path) for tier in job.checkpoint.places]
    except CratonError as error:
        return [f"checkpoints outside {Path(run.path).name}, if any: its job cannot be read ({error})"]
    places = [item.place for item in located if not item.is_inside_run]
    return [place for place in places if "://" in place or Path(place).exists()]
