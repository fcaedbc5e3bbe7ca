"""Faults of file systems, fourth set: stale handles, a silent bucket, many files, half a file, a mount without exec."""

from __future__ import annotations

import json
import subprocess
import sys

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.running import RunningJob

PROGRAM = "fourth_disk"
SCRIPT = {"command": ["{python}", f"{PROGRAM}.py"]}
PROGRESS = {"progress": {"pattern": "step {step} loss {loss}", "hang": "15m"}}
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


def _make_cache(job: RunningJob) -> None:
    cache = job.mounts["checkpoint"] / "cache"
    cache.mkdir()
    for number in range(16):
        (cache / f"first-{number}.json").write_text("{}")


def _fill_cache(job: RunningJob) -> None:
    job.spawn([sys.executable, str(program_path(PROGRAM)), "fill", str(job.mounts["checkpoint"] / "cache")])


def _write_words(job: RunningJob) -> None:
    folder = job.folder.parent / "cache"
    folder.mkdir()
    (folder / "words.json").write_text(json.dumps({"word0": 0}))


FAULTS = (
    LiveFault(
        name="file-handles-stale",
        family="disk",
        summary="The file server is exchanged and knows no handle of its clients any more: stale file handle.",
        source="https://github.com/hiyouga/LlamaFactory/issues/3243",
        job=JobRecipe(
            keys={**_source("from_bucket"), "layout": {"replicate": 2}},
            program=PROGRAM,
            env=BUCKET,
            prepare=mount_bucket,
            settled_step=40,
        ),
        inject=lambda job: (job.folder.parent / "stale").touch(),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"stale|ESTALE|Errno 116|mount|\bNFS\b",),
            misleading=(r"add memory|learning rate",),
        ),
        needs=("root", "umount"),
    ),
    LiveFault(
        name="bucket-stops-answering",
        family="disk",
        summary="The FUSE daemon of the bucket that rank 1 reads lives but answers no read; its read never returns.",
        source="https://github.com/kahing/goofys/issues/153",
        job=JobRecipe(
            keys={**_source("from_bucket"), "layout": {"fsdp": 2}},
            program=PROGRAM,
            victim=1,
            env=BUCKET,
            prepare=mount_bucket,
            settled_step=40,
        ),
        inject=lambda job: (job.folder.parent / "silent").touch(),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"file system|storage|\bfuse\b|mount|file server|bucket|uninterruptible|\bD state|\bread\b",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
        needs=("root", "umount"),
    ),
    LiveFault(
        name="folder-of-many-files",
        family="disk",
        summary="The folder of the samples grows to 40,000 files; the source lists it for each sample on every rank.",
        source="https://github.com/milesial/Pytorch-UNet/issues/449",
        job=JobRecipe(
            keys={**_source("from_folder"), "layout": {"tp": 2}},
            program=PROGRAM,
            env={"CACHE": "{checkpoint}/cache"},
            mounts={"checkpoint": "size=64m"},
            prepare=_make_cache,
            settled_step=60,
        ),
        inject=_fill_cache,
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(
                r"data[._ ]?source|data ?load|wait(s|ing)? for (its |the )?data|input pipeline|fourth_disk",
                r"listdir|list(s|ing)\b|many files|folder|director|file system|storage",
            ),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
        needs=("root",),
    ),
    LiveFault(
        name="file-read-while-written",
        family="disk",
        summary="Rank 0 writes a shared JSON file in place, and rank 1 reads it when only half of it is there.",
        source="https://github.com/huggingface/transformers/issues/17412",
        job=JobRecipe(
            kind="command",
            keys={**SCRIPT, **PROGRESS},
            program=PROGRAM,
            fault="words",
            env={"CACHE": "{folder}/cache"},
            prepare=_write_words,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"JSONDecodeError|Unterminated|Expecting|words\.json|half|atomic|corrupt|truncat",),
            misleading=MISLEADING,
        ),
    ),
    LiveFault(
        name="kernel-cache-without-exec",
        family="disk",
        summary="The cache of compiled kernels is on a mount with noexec; no rank can load its kernel.",
        source="https://github.com/pytorch/pytorch/issues/91005",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program=PROGRAM,
            fault="kernel",
            env={"KERNELS": "{checkpoint}"},
            mounts={"checkpoint": "size=32m,noexec"},
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"failed to map segment|noexec|shared object|fused_norm",),
            misleading=(*MISLEADING, r"\bdrain\b|\breboot\b|replace the node"),
        ),
        needs=("root",),
    ),
)
