"""File systems that a run uses: those of its directory, its data and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from craton.errors import CratonError
from craton.job import load_job
from craton.job.sections import place_of
from craton.observability.diagnosis.snapshot import SnapshotMount
from craton.observability.diagnosis.used_mounts import is_under
from craton.telemetry import RunDirectory


def paths_of(run: RunDirectory, on: str) -> dict[str, tuple[str, ...]]:
    """Return run, data, checkpoints → folders; only the run directory if the job cannot be read. Empty on Kubernetes:
    pods have other paths than their nodes."""
    if on == "kubernetes":
        return {}
    result: dict[str, tuple[str, ...]] = {"run": (str(run.path.absolute()),)}
    try:
        job = load_job(run.job_path)
        storage = job.cluster.file.storage if job.cluster.file else None
        places = [place_of(tier, storage, run.path.absolute()) for tier in job.checkpoint.places]
    except (CratonError, OSError):
        return result
    result["checkpoints"] = tuple(place.place for place in places if not place.is_url)
    data = [path for path, _ in (*job.data.mixture, *job.data.validation_mixture) if Path(path).is_absolute()]
    return {**result, **({"data": tuple(dict.fromkeys(data))} if data else {})}


def with_holders(mounts: Sequence[SnapshotMount], paths: Mapping[str, Sequence[str]]) -> tuple[SnapshotMount, ...]:
    """Return the mounts with what they hold for the run; existing values stay."""
    holds: dict[str, list[str]] = {}
    for holder, folders in paths.items():
        for folder in folders:
            points = [mount.path for mount in mounts if is_under(folder, mount.path)]
            if points:
                holds.setdefault(max(points, key=len), []).append(holder)
    return tuple(
        replace(mount, holds=tuple(dict.fromkeys((*mount.holds, *holds.get(mount.path, ()))))) for mount in mounts
    )
