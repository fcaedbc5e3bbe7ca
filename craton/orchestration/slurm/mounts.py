"""The container image of a run, and its mounts, at the same paths as on the node: runs, data, weights, code, caches.

A path that the container runtime would misread, or that would hide the image's own system folders, is refused before
submission.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from craton.orchestration.errors import StartError
from craton.remote import is_url
from craton.telemetry import RunDirectory

if TYPE_CHECKING:
    from craton.agent import Launch
    from craton.job import Job

# Folders that an image cannot do without.
SYSTEM = (
    "/",
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/opt",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var",
)
FILES = (".sqsh", ".squashfs", ".sif")  # suffixes of image files
SEPARATORS = ":,"  # between the parts of a mount, and between mounts


def image_of(job: Job, launch: Launch) -> str:
    """Return the image of the ranks; empty without one. An image file is returned as an absolute path: pyxis takes a
    name that begins with neither / nor . for a registry's (NVIDIA/pyxis#127)."""
    from craton.orchestration.draft import JOB_FOLDER

    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    image = job.run.image or (scheduler.image if scheduler else None) or ""
    is_file = "://" not in image and (image.startswith(("/", ".", "~")) or image.endswith(FILES))
    if not is_file:
        return image
    return os.path.abspath(Path(launch.env.get(JOB_FOLDER, ".")) / Path(image).expanduser())


def mounts_of(job: Job, run: RunDirectory, launch: Launch) -> tuple[str, ...]:
    """Return the paths to mount, none inside another; StartError names a path that cannot be mounted."""
    image = image_of(job, launch)
    wanted = [os.path.normpath(path) for path in _paths(job, run, launch)]
    for path in wanted:
        if path in SYSTEM:
            raise StartError(
                f"{job.where('run', 'image')}{path} cannot be mounted into the image {image}: it would hide the "
                f"image's own {path}; keep the job's files in another folder"
            )
        if any(item in path for item in SEPARATORS) or not path.isprintable():
            raise StartError(
                f"{job.where('run', 'image')}{path!r} cannot be mounted into the image {image}: container runtimes "
                "read : and , as separators; rename it"
            )
    return tuple(path for path in dict.fromkeys(wanted) if not _is_inside(path, wanted))


def _paths(job: Job, run: RunDirectory, launch: Launch) -> Iterable[str]:
    from craton.infrastructure.storage import cache_root
    from craton.job import TRAINING_KINDS, files_of_suites
    from craton.job.sections import place_of
    from craton.orchestration.draft import JOB_FOLDER

    yield str(run.root)  # a member also reads the files of its owner
    storage = job.cluster.file.storage if job.cluster.file else None
    for place in (storage.nvme, storage.shared) if storage else ():
        if place and place.path:
            yield place.path
    if folder := launch.env.get(JOB_FOLDER):  # the folder of the user's own functions
        yield folder
    data = [path for path, _ in (*job.data.mixture, *job.data.validation_mixture)]
    yield from (path for path in data if not is_url(path))
    if job.data.tokenizer and job.data.tokenizer.startswith("/"):
        yield job.data.tokenizer
    yield from (path for _, path in files_of_suites(job))
    if job.kind in TRAINING_KINDS or job.serve or job.eval:
        if (weights := job.weights_folder) is not None:
            yield str(_whole_snapshot(weights))
        if (trained := job.trained_run) is not None:
            yield str(trained)
    yield from job.reference_folders.values()
    yield from job.reward_model_folders.values()
    if any(map(is_url, data)) or (isinstance(job.model, str) and is_url(job.model)):
        yield str(cache_root())  # remote data is cached there
    for tier in job.checkpoint.places if job.kind in TRAINING_KINDS else ():
        located = place_of(tier, storage, run.path)
        if not located.is_url and not located.is_inside_run:
            yield str(located.place)


def _whole_snapshot(folder: Path) -> Path:
    """Return the whole model folder of a Hub cache snapshot, whose files are links into it."""
    return next((parent.parent for parent in folder.parents if parent.name == "snapshots"), folder)


def _is_inside(path: str, others: Iterable[str]) -> bool:
    return any(path != other and Path(path).is_relative_to(other) for other in others)
