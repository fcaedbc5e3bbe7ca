"""Faults of file systems, second set: one node's disk, a shared disk, cut files, permissions, sizes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import throttle_disk, with_disk
from craton.bench.why.faults.running import RunningJob

PROGRESS = {"pattern": "step {step} loss {loss}", "hang": "10x"}
MISLEADING = (r"add memory|learning rate|network|fabric",)
READERS = 2
NOBODY_UID = 65534
# Root without the right to pass over permissions, as a user is.
AS_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
READ = """\
import mmap, os, sys
room = mmap.mmap(-1, 1 << 20)
file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
while True:
    for start in range(0, 8 << 20, 1 << 20):
        os.preadv(file, [room], start)
"""


def _source(name: str) -> dict[str, object]:
    return {"data": {"path": None, "tokenizer": None, "sequence": 64, "source": f"second_disk:{name}"}}


def _slow_disk(job: RunningJob) -> None:
    throttle_disk(job, job.mounts["data"] / "disk", "read", 300_000)


def _copy_beside(job: RunningJob) -> None:
    """Give the disk the speed of a small volume, which is enough for the run, and copy from it without end."""
    disk = job.mounts["data"] / "disk"
    throttle_disk(job, disk, "read", 6_000_000)
    for _ in range(READERS):
        job.spawn([sys.executable, "-c", READ, str(disk / "samples.bin")])


def _take_folder(job: RunningJob) -> None:
    os.chown(job.mounts["checkpoint"] / "saved", NOBODY_UID, NOBODY_UID)


def _make_folder(job: RunningJob) -> None:
    Path(job.mounts["checkpoint"] / "saved").mkdir()


def _cut_tokens(job: RunningJob) -> None:
    os.truncate(job.mounts["data"] / "tokens.bin", 0)


FAULTS = (
    LiveFault(
        name="local-disk-of-one-node-slow",
        family="disk",
        summary="The local disk of node-1 reads 300 kB/s; node-0 has its data at once and waits for rank 1.",
        source="https://github.com/trinodb/trino/issues/7380",
        job=JobRecipe(
            keys={**_source("from_blocks"), "layout": {"fsdp": 2}},
            program="second_disk",
            victim=1,
            env={"SAMPLES": "{data}/disk", "CORPUS": "{data}/corpus.txt"},
            mounts={"data": "size=128m"},
            wrap=with_disk("data", 64),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"data|read|disk|storage|input",),
            misleading=MISLEADING,
        ),
        inject=_slow_disk,
        judge_seconds=35,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
    LiveFault(
        name="data-disk-shared-with-copy",
        family="disk",
        summary="Two processes of another user copy from the disk with the training data; every step waits for it.",
        source="https://github.com/cBio/cbio-cluster/issues/300",
        job=JobRecipe(
            keys={**_source("from_blocks"), "layout": {"tp": 2}},
            program="second_disk",
            env={"SAMPLES": "{data}/disk", "CORPUS": "{data}/corpus.txt"},
            mounts={"data": "size=128m"},
            wrap=with_disk("data", 64),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("slow", "hung"),
            ranks=frozenset(),
            remedy=(r"data|read|disk|storage|input",),
            misleading=MISLEADING,
        ),
        inject=_copy_beside,
        judge_seconds=35,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
    LiveFault(
        name="data-file-cut-under-the-run",
        family="disk",
        summary="Somebody writes the dataset again while all ranks have it mapped; reading past its new end is SIGBUS.",
        source="https://github.com/Textualize/toolong/issues/9",
        job=JobRecipe(
            keys={**_source("from_map"), "layout": {"replicate": 2}},
            program="second_disk",
            env={"SAMPLES": "{data}"},
            mounts={"data": "size=32m"},
            wrap=("/bin/sh", "-c", 'head -c 4M /dev/urandom > ../data/tokens.bin && exec "$@"', "sh"),
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"SIGBUS|bus error|signal 7|truncat|mapped|mmap",),
            misleading=MISLEADING,
        ),
        inject=_cut_tokens,
        needs=("root",),
    ),
    LiveFault(
        name="save-folder-taken-away",
        family="disk",
        summary="The folder of a script's checkpoints gets another owner; the next save is refused: permission denied.",
        source="https://github.com/tensorflow/tensorflow/issues/13120",
        job=JobRecipe(
            kind="command",
            keys={"command": [*AS_USER, "{python}", "second_disk.py"], "progress": PROGRESS},
            program="second_disk",
            env={"SAVES": "{checkpoint}/saved"},
            mounts={"checkpoint": "size=32m"},
            prepare=_make_folder,
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"permission|EACCES|Errno 13|owner",),
            misleading=MISLEADING,
        ),
        inject=_take_folder,
        needs=("root", "setpriv"),
    ),
    LiveFault(
        name="save-above-file-size-limit",
        family="disk",
        summary="A script's checkpoint grows above the limit of the batch system for one file: file too large.",
        source="https://github.com/eutelescope/eutelescope/issues/326",
        job=JobRecipe(
            kind="command",
            nodes=1,
            keys={"command": ["prlimit", "--fsize=300000", "{python}", "second_disk.py"], "progress": PROGRESS},
            program="second_disk",
            env={"SAVES": "{checkpoint}"},
            mounts={"checkpoint": "size=32m"},
        ),
        expected=ExpectedVerdict(
            layers=("storage", "host"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"file too large|EFBIG|Errno 27|ulimit|file size|SIGXFSZ",),
            misleading=MISLEADING,
        ),
        needs=("root", "prlimit"),
    ),
    LiveFault(
        name="data-read-never-returns",
        family="disk",
        summary="The file server with the data of rank 0 stops answering; its read waits in the kernel for ever.",
        source="https://github.com/BVLC/caffe/issues/6020",
        job=JobRecipe(
            keys={**_source("from_blocks"), "layout": {"replicate": 2}},
            program="second_disk",
            victim=0,
            env={"SAMPLES": "{data}/disk", "CORPUS": "{data}/corpus.txt"},
            mounts={"data": "size=128m"},
            wrap=with_disk("data", 64),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"file system|storage|disk|uninterruptible|file server|\bD state|read",),
            misleading=MISLEADING,
        ),
        inject=lambda job: throttle_disk(job, job.mounts["data"] / "disk", "read", 1),
        judge_seconds=30,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
)
