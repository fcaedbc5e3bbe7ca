"""Find the newest checkpoint of a run in the tiers that this machine sees, and rescued states that no tier has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from craton.infrastructure import StorageError
from craton.infrastructure.storage import open_store
from craton.job import Job, load_job
from craton.job.sections import RESCUE, TierPlace, place_of, rescue_place
from craton.telemetry import RunDirectory
from craton.telemetry.files import first_link, paths_in, tail_lines

_STEP = re.compile(r"step-([0-9]{8,15})")
EVENT_BYTES = 256 << 10  # read from the end of a node's events, to find its last save


@dataclass(frozen=True)
class SavedStep:
    """The newest complete checkpoint of a run."""

    step: int
    tier: str
    path: Path | str  # a folder or an s3:// prefix


@dataclass(frozen=True)
class Rescue:
    """A state saved in the run directory because no durable tier accepted it."""

    step: int
    path: Path
    reason: str  # why the tiers failed


def newest_checkpoint(run: RunDirectory, job: Job | None = None) -> SavedStep | None:
    """Return the newest step with a COMPLETE marker in any tier visible from this machine, from the fastest tier that
    has it. An S3 error is ignored if another tier has a checkpoint."""
    job = job or load_job(run.job_path)
    storage = job.cluster.file.storage if job.cluster.file else None
    saved_steps: list[SavedStep] = []
    failed: StorageError | None = None
    places = {tier.to: place_of(tier, storage, run.path) for tier in job.checkpoint.places}
    for name, located in {**places, RESCUE: rescue_place(run.path)}.items():
        try:
            saved_steps += _saved_objects(name, located) if located.is_url else _saved_folders(name, located, run.path)
        except StorageError as error:
            failed = error
    if failed is not None and not saved_steps:
        raise failed
    return max(saved_steps, key=lambda saved: saved.step, default=None)


def find_rescue(run: RunDirectory) -> Rescue | None:
    """Return the state in the run directory that no tier has, or None; it is deleted once a tier has it."""
    saved = max(_saved_folders(RESCUE, rescue_place(run.path), run.path), key=lambda saved: saved.step, default=None)
    if saved is None:
        return None
    reasons: dict[str, str] = {}  # tier → its last error
    for path in paths_in(run.path / "events", "*.jsonl"):
        for event in tail_lines(path, EVENT_BYTES):
            if event.get("event") == "checkpoint_failed" and event.get("step") == saved.step:
                reasons[str(event.get("tier"))] = str(event.get("reason") or "")
    prefix = f"step {saved.step} was not saved: "
    messages = [text.removeprefix(prefix) for tier, text in reasons.items() if tier != RESCUE and text]
    return Rescue(saved.step, Path(saved.path), "; ".join(messages) or "no tier accepted it")


def _saved_folders(name: str, located: TierPlace, run: Path) -> list[SavedStep]:
    if located.is_inside_run and first_link(located.place, run) is not None:
        return []
    pattern = "*/step-*/COMPLETE" if located.is_node_local else "step-*/COMPLETE"
    base = Path(located.place)
    return [
        SavedStep(int(step[1]), name, marker.parent)
        for marker in sorted(base.glob(pattern))
        if (step := _STEP.fullmatch(marker.parent.name)) and marker.is_file() and first_link(marker, base) is None
    ]


def _saved_objects(name: str, located: TierPlace) -> list[SavedStep]:
    store = open_store(located.place)
    folders = [item for item in store.folders() if _STEP.fullmatch(item)]
    for folder in sorted(folders, key=lambda entry: -int(entry.removeprefix("step-"))):
        if store.exists(f"{folder}/COMPLETE"):
            return [SavedStep(int(folder.removeprefix("step-")), name, store.where(folder))]
    return []
