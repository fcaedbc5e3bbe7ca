"""The root folder of run directories, which on a cluster must be on shared storage.

On Slurm a cluster file's `runs:` takes precedence; the run is then linked into the folder that `ps` and other verbs
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from craton.job import Job
from craton.orchestration.draft import backend_name
from craton.orchestration.errors import StartError
from craton.remote import is_url
from craton.telemetry import RunDirectory, runs_root

MOUNTS = Path("/proc/self/mounts")
# File systems that several machines can mount at once, by the kernel's names.
SHARED_KINDS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs"),
    *("panfs", "smb3", "virtiofs", "wekafs"),
)


def root_of(job: Job, on: str | None = None) -> Path:
    """Return the root folder of the job's runs."""
    stated = job.cluster.file.runs if job.cluster.file else None
    if backend_name(job, on) != "slurm" or stated is None:
        return runs_root()
    if is_url(stated):
        raise StartError(
            f"runs on Slurm need a shared folder, and `runs:` of the cluster file is {stated}; give a path"
        )
    return Path(stated).expanduser()


def link_run(run: RunDirectory) -> None:
    """Link a run in another folder into the default root; a member is found through its owner."""
    root = runs_root()
    if run.path.parent == root or next(run.owners(), None) is not None:
        return
    root.mkdir(parents=True, exist_ok=True)
    link = root / run.name
    if link.is_symlink() and not link.exists():  # dangling link of a deleted run
        link.unlink()
    if not link.exists():
        link.symlink_to(run.path)


@contextmanager
def linking(runs: Iterable[Path]) -> Iterator[None]:
    """Link those of these runs that exist afterwards, also after an error: a run that a scheduler may have is kept when
    its start was aborted."""
    try:
        yield
    finally:
        for path in runs:
            if path.is_dir():
                link_run(RunDirectory(path))


def sharing_doubt(root: Path, job: Job) -> str:
    """Return a warning if this folder does not look shared between the nodes of a cluster; else empty."""
    storage = job.cluster.file.storage if job.cluster.file else None
    stated = [tier.path for tier in (storage.shared if storage else None,) if tier and tier.path]
    if any(Path(os.path.realpath(root)).is_relative_to(os.path.realpath(place)) for place in stated):
        return ""
    kind = kind_of_mount(root, MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.exists() else "")
    if kind in SHARED_KINDS or kind.startswith("fuse."):
        return ""
    return (
        f"{root} is on a file system of type {kind or 'unknown'}, which other machines may not see; runs on a cluster "
        "need shared storage (CRATON_RUNS, or `runs:` in the cluster file)"
    )


def kind_of_mount(path: Path, mounts: str) -> str:
    """Return the file system type of a path, from a table like /proc/self/mounts."""
    target = Path(os.path.realpath(path))
    longest = ("", "")
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        place = words[1].replace("\\040", " ")
        if target.is_relative_to(place) and len(place) >= len(longest[0]):
            longest = (place, words[2])
    return longest[1]
