"""Where the directories of runs lie, which on a cluster must be a folder that every node sees.

A cluster file's `runs:` wins there; the run is then linked into the folder where `ps` and the other verbs look.
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
# File systems that several machines can have mounted at once, by the names the kernel has for them.
SHARED_KINDS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs"),
    *("panfs", "smb3", "virtiofs", "wekafs"),
)


def root_of(job: Job, on: str | None = None) -> Path:
    """The folder that the job's runs are kept in."""
    stated = job.cluster.file.runs if job.cluster.file else None
    if backend_name(job, on) != "slurm" or stated is None:
        return runs_root()
    if is_url(stated):
        raise StartError(f"runs on Slurm need a folder that every node sees, and `runs:` of the cluster is {stated}")
    return Path(stated).expanduser()


def link_run(run: RunDirectory) -> None:
    """Makes a run that lies elsewhere visible among the runs of this folder."""
    root = runs_root()
    if run.path.parent == root:
        return
    root.mkdir(parents=True, exist_ok=True)
    link = root / run.name
    if link.is_symlink() and not link.exists():  # of a run that is gone
        link.unlink()
    if not link.exists():
        link.symlink_to(run.path)


@contextmanager
def linking(runs: Iterable[Path]) -> Iterator[None]:
    """Links those of these runs that are there afterwards, however it ends: one that a scheduler may have is kept when
    its start was broken off."""
    try:
        yield
    finally:
        for path in runs:
            if path.is_dir():
                link_run(RunDirectory(path))


def sharing_doubt(root: Path, job: Job) -> str:
    """A warning where nothing shows that the nodes of a cluster see this folder; empty where something does."""
    storage = job.cluster.file.storage if job.cluster.file else None
    stated = [tier.path for tier in (storage.shared if storage else None,) if tier and tier.path]
    if any(Path(os.path.realpath(root)).is_relative_to(os.path.realpath(place)) for place in stated):
        return ""
    kind = kind_of_mount(root, MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.exists() else "")
    if kind in SHARED_KINDS or kind.startswith("fuse."):
        return ""
    return (
        f"{root} is on a file system of the kind {kind or 'unknown'}, which other machines may not see; runs on a "
        "cluster need one that all nodes have (CRATON_RUNS, or `runs:` in the cluster file)"
    )


def kind_of_mount(path: Path, mounts: str) -> str:
    """The file system that a path is on, by a table like /proc/self/mounts."""
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
