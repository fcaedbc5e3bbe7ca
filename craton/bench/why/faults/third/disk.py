"""Faults of file systems, third set: a dead FUSE daemon, a cut checkpoint, synchronous writes, a held lock, zeros."""

from __future__ import annotations

import os
import signal
import subprocess

import numpy as np

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import with_disk
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.third.system_injections import hold_lock, kill_bucket_daemon, limit_writes, mount_bucket

MISLEADING = (r"add memory|learning rate|network|fabric",)
WRITES_PER_SECOND = 10
TOKENS = 1 << 20


def _source(name: str) -> dict[str, object]:
    return {"data": {"path": None, "tokenizer": None, "sequence": 64, "source": f"third_disk:{name}"}}


def _make_cache(job: RunningJob) -> None:
    (job.folder.parent / "cache").mkdir()


def _make_saves(job: RunningJob) -> None:
    (job.folder.parent / "saves").mkdir()


def _write_tokens(job: RunningJob) -> None:
    tokens = np.random.default_rng(1).zipf(1.5, TOKENS) % 512
    tokens.astype(np.uint16).tofile(job.folder.parent / "tokens.bin")


def _lose_tokens(job: RunningJob) -> None:
    """Take all blocks of the file away; its size stays, and every byte reads as 0."""
    path = job.folder.parent / "tokens.bin"
    size = str(path.stat().st_size)
    subprocess.run(["fallocate", "--punch-hole", "-o", "0", "-l", size, str(path)], check=True, capture_output=True)


def _cut_checkpoint(job: RunningJob) -> None:
    """Kill rank 0 so that only half of its last checkpoint is on the disk."""
    path = job.folder.parent / "saves" / "last.pt"
    job.wait(path.exists, "the first checkpoint")
    pid = job.pid(0)
    os.kill(pid, signal.SIGSTOP)  # it cannot write another one
    os.truncate(path, path.stat().st_size // 2)
    os.kill(pid, signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="fuse-daemon-dies",
        family="disk",
        summary="The FUSE daemon of the bucket with the data is killed: transport endpoint is not connected.",
        source="https://github.com/s3fs-fuse/s3fs-fuse/issues/2176",
        job=JobRecipe(
            keys={**_source("from_bucket"), "layout": {"tp": 2}},
            program="third_disk",
            env={"SAMPLES": "{folder}/bucket"},
            prepare=mount_bucket,
            settled_step=40,
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"transport endpoint|ENOTCONN|Errno 107|\bfuse\b|mount",),
            misleading=(r"add memory|learning rate",),
        ),
        inject=kill_bucket_daemon,
        needs=("root", "umount"),
    ),
    LiveFault(
        name="checkpoint-cut-off",
        family="disk",
        summary="A crash cuts a script's checkpoint in half; the restarted run cannot load it and ends.",
        source="https://github.com/open-mmlab/mmdetection/issues/4835",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "third_disk.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
                "recover": {"tries": 1},
            },
            program="third_disk",
            env={"SAVES": "{folder}/saves"},
            prepare=_make_saves,
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"central directory|zip archive|PytorchStreamReader|corrupt|truncat|cut off|torch\.load|last\.pt",),
            misleading=MISLEADING,
        ),
        inject=_cut_checkpoint,
        judge_seconds=45,
        needs=("root",),
    ),
    LiveFault(
        name="log-synced-to-slow-disk",
        family="disk",
        summary="Rank 0 syncs its log after every step to a volume that is out of burst credits: ten writes a second.",
        source="https://github.com/wandb/wandb/issues/950",
        job=JobRecipe(
            kind="sft",
            keys={"objective": "third_disk:objective", "layout": {"replicate": 2, "micro_batch": 4}},
            program="third_disk",
            env={"LOGS": "{checkpoint}/disk"},
            mounts={"checkpoint": "size=128m"},
            wrap=with_disk("checkpoint", 64),
            settled_step=60,
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("slow", "hung"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"fsync|write|disk|storage|file system|volume|objective",),
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_writes(job, job.mounts["checkpoint"] / "disk", WRITES_PER_SECOND),
        judge_seconds=35,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
    LiveFault(
        name="cache-lock-held",
        family="disk",
        summary="Another job locks the file that guards the shared sample cache and keeps it; all ranks wait in flock.",
        source="https://github.com/huggingface/datasets/issues/1672",
        job=JobRecipe(
            keys={**_source("from_cache"), "layout": {"fsdp": 2}},
            program="third_disk",
            env={"CACHE": "{folder}/cache"},
            prepare=_make_cache,
            settled_step=40,
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("hung", "dead"),
            ranks=frozenset(),
            remedy=(
                r"flock|\block(s|ed)?\b|cache\.lock",
                r"data[._ ]?source|third_disk|wait(s|ing)? for (its )?data|stack|py-spy",
            ),
            misleading=MISLEADING,
        ),
        inject=lambda job: hold_lock(job, job.folder.parent / "cache" / "cache.lock"),
        judge_seconds=35,
    ),
    LiveFault(
        name="dataset-turns-to-zeros",
        family="disk",
        summary="Storage loses the blocks of the token file: it reads as zeros without an error; the loss collapses.",
        source="https://github.com/EverestAPI/Everest/pull/301",
        job=JobRecipe(
            keys={**_source("from_tokens"), "layout": {"replicate": 2}},
            program="third_disk",
            env={"TOKENS": "{folder}/tokens.bin"},
            prepare=_write_tokens,
            settled_step=120,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("wrong",),
            ranks=frozenset(),
            remedy=(
                r"zero|repeat|same (sample|batch|data)|check the data|data[._ ]?source|corrupt|tokens\.bin",
                r"loss (fell|falls|dropped|collapsed)",
            ),
            misleading=(r"add memory|network|fabric|drain|replace the node",),
        ),
        inject=_lose_tokens,
        judge_seconds=60,
        needs=("fallocate",),
    ),
)
