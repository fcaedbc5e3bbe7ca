"""The image of a run, and what it must be shown of the nodes' files, at the paths they have outside: runs, data,
weights, code, caches.

A path that the container runtime would read as something else, or that would cover the image's own system, is refused
before anything is submitted.
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

# Folders of an image that it cannot do without.
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
FILES = (".sqsh", ".squashfs", ".sif")  # how images that are files end
SEPARATORS = ":,"  # between the parts of a mount, and between mounts


def image_of(job: Job, launch: Launch) -> str:
    """The image that ranks are started in; empty where it is the virtual environment. One that is a file by its whole
    path: pyxis takes anything that begins with neither / nor . for the name of a registry's (NVIDIA/pyxis#127)."""
    from craton.orchestration.draft import JOB_FOLDER

    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    image = job.run.image or (scheduler.image if scheduler else None) or ""
    is_file = "://" not in image and (image.startswith(("/", ".", "~")) or image.endswith(FILES))
    if not is_file:
        return image
    return os.path.abspath(Path(launch.env.get(JOB_FOLDER, ".")) / Path(image).expanduser())


def mounts_of(job: Job, run: RunDirectory, launch: Launch) -> tuple[str, ...]:
    """The folders and files to show, none inside another; StartError names one that cannot be."""
    image = image_of(job, launch)
    wanted = [os.path.normpath(path) for path in _paths(job, run, launch)]
    for path in wanted:
        if path in SYSTEM:
            raise StartError(
                f"{job.where('run', 'image')}{path} cannot be shown to the image {image}, whose own {path} it "
                "would cover; keep what the job needs in a folder of its own"
            )
        if any(item in path for item in SEPARATORS) or not path.isprintable():
            raise StartError(
                f"{job.where('run', 'image')}{path!r} cannot be shown to the image {image}: container runtimes "
                "read : and , as the end of a path; rename it"
            )
    return tuple(path for path in dict.fromkeys(wanted) if not _is_inside(path, wanted))


def _paths(job: Job, run: RunDirectory, launch: Launch) -> Iterable[str]:
    from craton.infrastructure.storage import cache_root
    from craton.job import TRAINING_KINDS
    from craton.job.sections import place_of
    from craton.orchestration.draft import JOB_FOLDER

    yield str(run.path.parent)
    storage = job.cluster.file.storage if job.cluster.file else None
    for place in (storage.nvme, storage.shared) if storage else ():
        if place and place.path:
            yield place.path
    if folder := launch.env.get(JOB_FOLDER):  # a user's own functions are looked for there
        yield folder
    data = [path for path, _ in (*job.data.mixture, *job.data.validation_mixture)]
    yield from (path for path in data if not is_url(path))
    if job.data.tokenizer and job.data.tokenizer.startswith("/"):
        yield job.data.tokenizer
    if job.kind in TRAINING_KINDS or job.serve:
        if (weights := job.weights_folder) is not None:
            yield str(_whole_snapshot(weights))
        if (trained := job.trained_run) is not None:
            yield str(trained)
    if any(map(is_url, data)) or (isinstance(job.model, str) and is_url(job.model)):
        yield str(cache_root())  # what is read from afar is kept there
    for tier in job.checkpoint.places if job.kind in TRAINING_KINDS else ():
        located = place_of(tier, storage, run.path)
        if not located.is_url and not located.is_inside_run:
            yield str(located.place)


def _whole_snapshot(folder: Path) -> Path:
    """A snapshot of the Hub's cache is made of links into the folder of its model."""
    return next((parent.parent for parent in folder.parents if parent.name == "snapshots"), folder)


def _is_inside(path: str, others: Iterable[str]) -> bool:
    return any(path != other and Path(path).is_relative_to(other) for other in others)
