"""Faults of file systems, fifth set: a rename across disks, a bucket unmapped or far away, two deleters, full pools."""

from __future__ import annotations

import subprocess
import sys

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import fill, program_path, with_disk
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fifth_disk"
SCRIPT = {
    "command": ["{python}", f"{PROGRAM}.py"],
    "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
}
MISLEADING = (r"add memory|learning rate|network|fabric",)
BUCKET = {"BUCKET": "{folder}/bucket"}


def _source(name: str) -> dict[str, object]:
    return {"data": {"path": None, "tokenizer": None, "sequence": 64, "source": f"{PROGRAM}:{name}"}}


def mount_bucket(job: RunningJob) -> None:
    """Mount a bucket with one object, `samples.bin`, at FOLDER/bucket."""
    place = job.folder.parent / "bucket"
    place.mkdir()
    job.undo.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
    job.spawn([sys.executable, str(program_path(PROGRAM)), "serve", str(place)], place.with_suffix(".log"))
    job.wait(lambda: (place / "samples.bin").exists(), "the bucket is mounted")


def make_scratch(job: RunningJob) -> None:
    (job.folder.parent / "scratch").mkdir()


def make_saves(job: RunningJob) -> None:
    (job.folder.parent / "saves").mkdir()


FAULTS = (
    LiveFault(
        name="checkpoint-renamed-across-disks",
        family="disk",
        summary="Rank 0 writes its checkpoint to local scratch and renames it into another file system: error 18.",
        source="https://github.com/kevinzakka/torchkit/issues/9",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program=PROGRAM,
            fault="moves",
            env={"SCRATCH": "{folder}/scratch", "SAVES": "{checkpoint}"},
            mounts={"checkpoint": "size=32m"},
            prepare=make_scratch,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"cross-device|Errno 18|EXDEV|rename|shutil\.move|fifth_disk",),
            misleading=MISLEADING,
        ),
        needs=("root",),
    ),
    LiveFault(
        name="bucket-cannot-be-mapped",
        family="disk",
        summary="Samples beyond those on the node's disk are mapped from a FUSE bucket, which allows no mmap.",
        source="https://github.com/onedata/oneclient/issues/9",
        job=JobRecipe(
            keys={**_source("mapped_from_bucket"), "layout": {"fsdp": 2, "micro_batch": 4}},
            program=PROGRAM,
            env=BUCKET,
            prepare=mount_bucket,
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"Errno 19|No such device|ENODEV|mmap|memmap|\bfuse\b|bucket|mount|fifth_disk",),
            misleading=MISLEADING,
        ),
        needs=("root", "umount"),
    ),
    LiveFault(
        name="bucket-far-away",
        family="disk",
        summary="The bucket moves to another region: each look-up, open and read takes 40 ms, on every rank.",
        source="https://github.com/GoogleCloudPlatform/gcsfuse/issues/278",
        job=JobRecipe(
            keys={**_source("from_bucket"), "layout": {"replicate": 2, "micro_batch": 4}},
            program=PROGRAM,
            env=BUCKET,
            prepare=mount_bucket,
            settled_step=60,
        ),
        inject=lambda job: (job.folder.parent / "far").touch(),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(
                r"file system|storage|\bfuse\b|mount|file server|bucket|\bdisk\b|\bread\b",
                r"data[._ ]?source|data ?load|wait(s|ing)? for (its |the )?data|input pipeline|fifth_disk",
            ),
            misleading=(r"add memory|learning rate",),
        ),
        judge_seconds=35,
        needs=("root", "umount"),
    ),
    LiveFault(
        name="two-ranks-delete-one-checkpoint",
        family="disk",
        summary="Both nodes rotate checkpoints in one shared folder; rank 1 deletes what rank 0 has deleted, raises.",
        source="https://github.com/huggingface/transformers/issues/20988",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program=PROGRAM,
            fault="rotates",
            env={"SAVES": "{folder}/saves"},
            prepare=make_saves,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"FileNotFoundError|No such file|Errno 2\b|rmtree|race|already (deleted|removed)|fifth_disk",),
            misleading=MISLEADING,
        ),
    ),
    LiveFault(
        name="pool-below-the-volume-full",
        family="disk",
        summary="The pool below a thin volume is full; `df` shows room, yet the synced save of rank 0 fails.",
        source="https://github.com/moby/moby/issues/26015",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program=PROGRAM,
            fault="syncs",
            env={"SAVES": "{checkpoint}/disk"},
            mounts={"checkpoint": "size=64m"},
            wrap=with_disk("checkpoint", 256),
            settled_step=20,
        ),
        inject=lambda job: fill(job.mounts["checkpoint"]),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("dead",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(
                r"Input/output|Errno 5\b|\bEIO\b|I/O error|No space|Errno 28|space|full|read-only|disk|storage|thin",
            ),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=("root", "mkfs.ext4"),
    ),
)
