"""Faults of file systems: full, without inodes, read-only, slow, frozen, broken, vanished, over quota."""

from __future__ import annotations

import subprocess

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import (
    fill,
    freeze_disk,
    link_again,
    lose_sectors,
    remount_read_only,
    throttle_disk,
    unmount,
    use_up_inodes,
    with_disk,
)
from craton.bench.why.faults.running import RunningJob

SCRIPT = {"command": ["{python}", "disk.py"], "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"}}
BLOCKS = {"data": {"path": None, "tokenizer": None, "sequence": 64, "source": "disk:from_blocks"}}
FILES = {"data": {"path": None, "tokenizer": None, "sequence": 64, "source": "disk:from_files"}}
NODE_OR_CODE = (r"drain|replace the node|add memory|network",)
QUOTA_USER = "65534"


def saves_to(place: str) -> dict[str, object]:
    return {"checkpoint": {"peer": "off", "tiers": [{"to": place, "every_steps": 8, "keep": 2}]}}


def _limit_user(job: RunningJob) -> None:
    place = str(job.mounts["checkpoint"] / "disk")
    subprocess.run(["setquota", "-u", QUOTA_USER, "0", "1", "0", "0", place], check=True, capture_output=True)


def _fill_checkpoints(job: RunningJob) -> None:
    link_again(job.mounts["checkpoint"])
    fill(job.mounts["checkpoint"])


FAULTS = (
    LiveFault(
        name="checkpoint-disk-full",
        family="disk",
        summary="Somebody fills the file system of the checkpoints; every later checkpoint fails.",
        source="https://github.com/mlfoundations/open_lm/issues/154",
        job=JobRecipe(
            keys={**saves_to("{checkpoint}/saved"), "layout": {"fsdp": 2}}, mounts={"checkpoint": "size=48m"}
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("healthy", "slow", "dead"),
            ranks=frozenset(),
            remedy=(r"\bfull\b|no space|ENOSPC|0 B (are )?free",),
            misleading=NODE_OR_CODE,
        ),
        inject=_fill_checkpoints,
        judge_seconds=30,
        needs=("root",),
    ),
    LiveFault(
        name="run-directory-full",
        family="disk",
        summary="The file system with the run directory of a fine-tuning fills up; no record can be written.",
        source="https://github.com/mozilla/DeepSpeech/issues/374",
        job=JobRecipe(kind="sft", keys={"layout": {"replicate": 2}}, mounts={"run": "size=48m"}),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("healthy", "slow", "dead"),
            ranks=frozenset(),
            remedy=(r"\bfull\b|no space|ENOSPC|0 B (are )?free",),
            misleading=NODE_OR_CODE,
        ),
        inject=lambda job: fill(job.mounts["run"]),
        judge_seconds=30,
        needs=("root",),
    ),
    LiveFault(
        name="checkpoint-disk-without-inodes",
        family="disk",
        summary="Millions of small files use up the inodes where checkpoints go; there are bytes left, and saves fail.",
        source="https://github.com/hpcugent/vsc_user_docs/pull/660",
        job=JobRecipe(nodes=1, keys=saves_to("{checkpoint}/saved"), mounts={"checkpoint": "size=128m,nr_inodes=2000"}),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("healthy", "slow", "dead"),
            ranks=frozenset(),
            remedy=(r"inode|\bfull\b|no space|ENOSPC",),
            misleading=NODE_OR_CODE,
        ),
        inject=lambda job: use_up_inodes(job, job.mounts["checkpoint"]),
        judge_seconds=30,
        needs=("root",),
    ),
    LiveFault(
        name="checkpoint-disk-read-only",
        family="disk",
        summary="The volume of the checkpoints turns read-only, as ext4 does after an error of its device.",
        source="https://github.com/AlexsLemonade/refinebio/issues/2237",
        job=JobRecipe(keys={**saves_to("{checkpoint}/saved"), "layout": {"tp": 2}}, mounts={"checkpoint": "size=48m"}),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("healthy", "slow", "dead"),
            ranks=frozenset(),
            remedy=(r"read-only|EROFS|remount",),
            misleading=NODE_OR_CODE,
        ),
        inject=lambda job: remount_read_only(job.mounts["checkpoint"]),
        judge_seconds=30,
        needs=("root",),
    ),
    LiveFault(
        name="checkpoint-disk-slow",
        family="disk",
        summary="The device of the checkpoints writes 30 kB/s; a checkpoint takes minutes instead of milliseconds.",
        source="https://github.com/pytorch/torchtitan/issues/1301",
        job=JobRecipe(
            keys={**saves_to("{checkpoint}/disk/saved"), "layout": {"fsdp": 2}},
            mounts={"checkpoint": "size=256m"},
            wrap=with_disk("checkpoint", 128),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("healthy", "slow", "hung"),
            ranks=frozenset(),
            remedy=(r"checkpoint|write|disk|storage|file system",),
            misleading=NODE_OR_CODE,
        ),
        inject=lambda job: throttle_disk(job, job.mounts["checkpoint"] / "disk", "write", 30_000),
        judge_seconds=60,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
    LiveFault(
        name="data-disk-slow",
        family="disk",
        summary="The device with the training data reads 400 kB/s for all ranks; every step waits for its samples.",
        source="https://github.com/NVIDIA/DALI/issues/1671",
        job=JobRecipe(
            keys={**BLOCKS, "layout": {"replicate": 2}},
            program="disk",
            env={"SAMPLES": "{data}/disk"},
            mounts={"data": "size=128m"},
            wrap=with_disk("data", 64),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("slow", "hung"),
            ranks=frozenset(),
            remedy=(r"data|read|disk|storage|input",),
            misleading=NODE_OR_CODE,
        ),
        inject=lambda job: throttle_disk(job, job.mounts["data"] / "disk", "read", 400_000),
        judge_seconds=45,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
    LiveFault(
        name="save-waits-for-frozen-disk",
        family="disk",
        summary="The file server of a script's checkpoints stops answering; rank 0 waits in its save, uninterruptibly.",
        source="https://github.com/nfs-ganesha/nfs-ganesha/issues/1327",
        job=JobRecipe(
            kind="command",
            keys=SCRIPT,
            program="disk",
            env={"SAVES": "{checkpoint}/disk"},
            mounts={"checkpoint": "size=128m"},
            wrap=with_disk("checkpoint", 64),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"file system|storage|disk|uninterruptible|frozen|file server|\bD state",),
            misleading=(r"network|add memory",),
        ),
        inject=lambda job: freeze_disk(job, job.mounts["checkpoint"] / "disk"),
        judge_seconds=40,
        needs=("root", "fsfreeze", "mkfs.ext4"),
    ),
    LiveFault(
        name="data-disk-io-error",
        family="disk",
        summary="The device with the data loses sectors; reading a sample fails with an input/output error.",
        source="https://github.com/Mikubill/naifu/issues/35",
        job=JobRecipe(
            keys={**BLOCKS, "layout": {"fsdp": 2}},
            program="disk",
            env={"SAMPLES": "{data}/disk"},
            mounts={"data": "size=128m"},
            wrap=with_disk("data", 64),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"input/output error|EIO|Errno 5|I/O error",),
            misleading=(r"network|add memory",),
        ),
        inject=lambda job: lose_sectors(job.mounts["data"] / "disk"),
        needs=("root", "mkfs.ext4"),
    ),
    LiveFault(
        name="data-mount-vanishes",
        family="disk",
        summary="The mount with the data is taken away; the next sample's file does not exist.",
        source="https://github.com/hiyouga/LlamaFactory/issues/3388",
        job=JobRecipe(
            keys={**FILES, "layout": {"replicate": 2}},
            program="disk",
            env={"SAMPLES": "{data}/files"},
            mounts={"data": "size=16m"},
            wrap=(
                "/bin/sh",
                "-c",
                "mkdir ../data/files && for n in 0 1 2 3; do head -c 4096 ../data/corpus.txt > ../data/files/$n.txt; "
                'done && exec "$@"',
                "sh",
            ),
        ),
        expected=ExpectedVerdict(
            layers=("storage", "framework"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"no such file|FileNotFound|mount|missing|does not exist|gone",),
            misleading=(r"network|add memory",),
        ),
        inject=lambda job: unmount(job.mounts["data"]),
        needs=("root",),
    ),
    LiveFault(
        name="save-over-quota",
        family="disk",
        summary="The user's disk quota is used up; the script's save fails although the file system has room.",
        source="https://github.com/open-mmlab/mmdetection/issues/12069",
        job=JobRecipe(
            kind="command",
            nodes=1,
            keys={**SCRIPT, "command": ["setpriv", f"--reuid={QUOTA_USER}", "{python}", "disk.py"]},
            program="disk",
            env={"SAVES": "{checkpoint}/disk"},
            mounts={"checkpoint": "size=128m"},
            wrap=with_disk("checkpoint", 64, quota=True),
        ),
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"quota|EDQUOT",),
            misleading=(r"network|add memory",),
        ),
        inject=_limit_user,
        needs=("root", "setpriv", "setquota"),
    ),
)
