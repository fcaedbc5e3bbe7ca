"""Faults of servers, third set: damaged weights, memory under load, slow loading, foreign adapters, no front end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

from craton.bench.why.faults.environment import RANDOM, WIDE_MODEL
from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import child_with, load, program_path, throttle_disk, with_disk
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import client
from craton.telemetry.node import read_heartbeat

MISLEADING = (r"drain the node|learning rate|gradient",)
WEIGHTS = program_path("third_server")
ROOM_BYTES = 48 << 20  # above what the server uses before the load
READ_BYTES_PER_SECOND = 2048
# Copy the model to the disk, and mount it again so that nothing of it is in memory.
WITH_MODEL = (
    *with_disk("checkpoint", 64),
    *("/bin/sh", "-c"),
    "cp -r ../../../model ../checkpoint/disk/model && umount ../checkpoint/disk && "
    'mount -o loop ../checkpoint/image ../checkpoint/disk && exec "$@"',
    "sh",
)


def _damage_weights(job: RunningJob) -> None:
    """Copy the model, with NaN in one of its matrices."""
    folder = job.folder.parent / "damaged"
    shutil.copytree(job.folder.parents[2] / "model", folder)
    subprocess.run([sys.executable, str(WEIGHTS), "damage", str(folder)], check=True)


def _write_adapter(job: RunningJob) -> None:
    """Write a LoRA adapter for a model that is twice as wide."""
    subprocess.run([sys.executable, str(WEIGHTS), "adapter", str(job.folder.parent / "adapter")], check=True)


def _limit_memory_under_load(job: RunningJob) -> None:
    group = job.cgroups["memory"]
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + ROOM_BYTES))
    load(job, "long-answers", "30")


def _slow_the_disk(job: RunningJob) -> None:
    job.wait(lambda: any(read_heartbeat(job.run, node) for node in job.nodes()), "the agent runs")
    throttle_disk(job, job.mounts["checkpoint"] / "disk", "read", READ_BYTES_PER_SECOND)


def _kill_front_end(job: RunningJob) -> None:
    os.kill(child_with(job, ["craton.ml.serving.server"]), signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="server-weights-not-numbers",
        family="server",
        summary="A matrix of the exported weights holds NaN; the server starts, and no request gets a sensible answer.",
        source="https://github.com/vllm-project/vllm/issues/22881",
        job=JobRecipe(kind="serve", nodes=1, keys={"model": "{folder}/damaged"}, prepare=_damage_weights),
        inject=lambda job: client(job, "ask", 4),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("wrong", "dead"),
            ranks=None,
            remedy=(r"\bNaN\b|not a number|not finite|non-finite|isfinite|weights|logits|damaged|corrupt",),
            misleading=MISLEADING,
        ),
        judge_seconds=40,
    ),
    LiveFault(
        name="server-out-of-memory-under-load",
        family="server",
        summary="Long answers fill the KV cache of a server beyond the memory limit of its container; it is killed.",
        source="https://github.com/vllm-project/vllm/issues/1765",
        job=JobRecipe(kind="serve", nodes=1, keys={"model": WIDE_MODEL, "serve": RANDOM}, cgroups={"memory": {}}),
        inject=_limit_memory_under_load,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"out of memory|OOM|memory limit|\bmemory\b",),
            misleading=MISLEADING,
        ),
        judge_seconds=60,
        needs=("root", "cgroup:memory"),
    ),
    LiveFault(
        name="server-weights-load-slowly",
        family="server",
        summary="The disk with the model reads 2 kB/s; the server loads its weights for minutes, without an answer.",
        source="https://github.com/vllm-project/vllm/pull/24469",
        job=JobRecipe(
            kind="serve",
            nodes=1,
            keys={"model": "{checkpoint}/disk/model"},
            mounts={"checkpoint": "size=96m"},
            wrap=WITH_MODEL,
        ),
        inject=_slow_the_disk,
        expected=ExpectedVerdict(
            layers=("storage",),
            conditions=("starting", "slow", "hung"),
            ranks=None,
            remedy=(r"\bdisk|storage|file system|\bread(s|ing)?\b|I/O|weights|load(s|ing)",),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=60,
        needs=("root", "cgroup:blkio", "mkfs.ext4"),
    ),
    LiveFault(
        name="server-adapter-of-another-model",
        family="server",
        summary="A LoRA adapter of the server was trained for a model twice as wide; the server cannot start.",
        source="https://github.com/johnsmith0031/alpaca_lora_4bit/issues/40",
        job=JobRecipe(
            kind="serve",
            nodes=1,
            keys={"serve": {"adapters": {"support": "{folder}/adapter"}}},
            prepare=_write_adapter,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"adapter|LoRA|another model|shape",),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=60,
    ),
    LiveFault(
        name="server-front-end-killed",
        family="server",
        summary="The HTTP front end is killed; the engine holds the model, and no client can connect. No restart.",
        source="https://github.com/vllm-project/vllm/issues/55510",
        job=JobRecipe(kind="serve", nodes=1),
        inject=_kill_front_end,
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead", "hung"),
            ranks=None,
            remedy=(r"SIGKILL|killed|signal 9|front end|HTTP|API server|/health|resume",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
)
