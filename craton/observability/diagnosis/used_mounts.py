"""Whether a run uses a file system.

A full boot partition, or an unrelated mount that does not respond, does not affect the run. If the job does not name
its data path, shared and large file systems count, and those of the operating system do not.
"""

from __future__ import annotations

import re

from craton.observability.diagnosis.snapshot import RunFacts, SnapshotMount

OF_THE_SYSTEM = re.compile(r"/$|/(boot|dev|etc|proc|run|snap|sys|usr|var)(/|$)")
SMALL_KINDS = re.compile(r"vfat|msdos|iso9660|squashfs|autofs|efivarfs|fuse\.(portal|gvfsd-fuse|snapfuse|sshfs)")


def is_used(mount: SnapshotMount, run: RunFacts) -> bool:
    """Return whether the run uses this file system."""
    if mount.holds or not mount.path.startswith("/"):  # a Lustre client whose mount point is not known
        return True
    if {"data", "checkpoints"} <= run.paths.keys():
        return False
    return not OF_THE_SYSTEM.match(mount.path) and not SMALL_KINDS.fullmatch(mount.kind)


def is_under(path: str, mount: str) -> bool:
    return path == mount or path.startswith(mount.rstrip("/") + "/")
