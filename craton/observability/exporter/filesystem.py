"""File system metrics: size, and whether each answers. A network file system whose server is gone blocks its callers,
so each has its own thread; one that does not return is reported as `node_filesystem_device_error`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from craton.infrastructure.probes import NodeRoot, read_mounts
from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample

ANSWER_SECONDS = 1.0
# Disks, tmpfs and shared file systems; other entries of the mount table have no size.
LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "vfat"))
SHARED_KINDS = frozenset(
    ("lustre", "nfs", "nfs4", "efs", "fuse.s3fs", "fuse.mountpoint-s3", "beegfs", "gpfs", "ceph", "wekafs")
)
_LEFT_OUT = ("/proc", "/sys", "/run/user", "/run/credentials", "/var/lib/docker/", "/var/lib/kubelet/pods/", "/etc/")


class FilesystemCollector(Collector):
    name = "filesystem"

    def __init__(self, root: NodeRoot, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._root, self._answer_seconds = root, answer_seconds
        self._asked: dict[str, _Question] = {}

    def collect(self, now: float) -> Iterator[Sample]:
        if self._root.is_recorded:
            return  # the folders of an image are on this machine's own disk
        mounts = {mount.path: mount for mount in read_mounts(self._root) if mount.kind in LOCAL | SHARED_KINDS}
        for path, mount in mounts.items():
            if path.startswith(_LEFT_OUT):
                continue
            labels = (mount.source, mount.kind, path)
            answer = self._ask(path, mount.kind)
            yield "node_filesystem_device_error", labels, int(answer is None)
            if answer is not None:
                yield "node_filesystem_size_bytes", labels, answer.f_blocks * answer.f_frsize
                yield "node_filesystem_free_bytes", labels, answer.f_bfree * answer.f_frsize
                yield "node_filesystem_avail_bytes", labels, answer.f_bavail * answer.f_frsize
                yield "node_filesystem_files", labels, answer.f_files
                yield "node_filesystem_files_free", labels, answer.f_ffree
                yield "node_filesystem_readonly", labels, int("ro" in mount.options)

    def _ask(self, path: str, kind: str) -> os.statvfs_result | None:
        place = str(self._root.at(path))
        if kind not in SHARED_KINDS:
            return _statvfs(place)
        question = self._asked.get(path)
        if question is None or question.is_answered:
            question = self._asked[path] = _Question(place)
            question.thread.join(self._answer_seconds)  # an earlier call that still runs was already waited for
        return question.answer if question.is_answered else None


class _Question:
    def __init__(self, place: str) -> None:
        self.answer: os.statvfs_result | None = None
        self.is_answered = False
        self._place = place
        self.thread = threading.Thread(target=self._ask, name=f"statvfs {place}", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        self.answer = _statvfs(self._place)
        self.is_answered = True


def _statvfs(place: str) -> os.statvfs_result | None:
    try:
        return os.statvfs(place)
    except OSError:
        return None
