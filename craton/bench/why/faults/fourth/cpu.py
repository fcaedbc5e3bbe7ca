"""Faults of CPUs, fourth set: a starved agent, an idle class, page faults, bursts, a debugging mode."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import confine, hog, program_path
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import client

PROGRAM = "fourth_cpu"
MISLEADING = (r"network|fabric|file system|learning rate",)
CPU = r"\bCPU|contention|other processes|load|cores?\b"
THROTTLED = r"throttl|cgroup|quota|CPU limit|cfs|\bCPU"
PERIOD_MICROSECONDS, QUOTA_MICROSECONDS = 1_000_000, 1_000


def _starve_agent(job: RunningJob, node: str) -> None:
    """Limit the agent of a node, without its rank, to a thousandth of a core."""
    limits = {"cpu__cfs_period_us": PERIOD_MICROSECONDS, "cpu__cfs_quota_us": QUOTA_MICROSECONDS}
    confine(job, "cpu", [job.agent_pid(node)], **limits)


def _make_idle(job: RunningJob) -> None:
    """Let a server run only when no other process wants a core, and start processes that do."""
    client(job, "ask", 4)
    for thread in Path(f"/proc/{job.pid(0)}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    hog(job, 4)


def _start_bursts(job: RunningJob) -> None:
    job.spawn([sys.executable, str(program_path(PROGRAM)), "bursts", "8"])


FAULTS = (
    LiveFault(
        name="cpu-limit-of-an-agent",
        family="cpu",
        summary="A limit for system services leaves the agent of node-1 0.1% of a core; its rank has all it needs.",
        source="https://github.com/ray-project/ray/issues/18449",
        job=JobRecipe(keys={"layout": {"fsdp": 2}, "checkpoint": {"peer": "off"}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead", "hung", "waiting", "slow", "healthy"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(THROTTLED, r"\bagent\b|silent|lost|heartbeat"),
            misleading=MISLEADING,
        ),
        inject=lambda job: _starve_agent(job, "node-1"),
        judge_seconds=40,
        needs=("root", "cgroup:cpu"),
    ),
    LiveFault(
        name="cpu-idle-class-of-a-server",
        family="cpu",
        summary="A daemon for priorities puts a server into the idle class; four busy processes leave it no core.",
        source="https://github.com/CachyOS/ananicy-rules/issues/586",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow", "hung"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(CPU, r"idle class|SCHED_IDLE|nice|priorit|chrt|scheduling"),
            misleading=MISLEADING,
        ),
        inject=_make_idle,
        judge_seconds=35,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-page-faults",
        family="cpu",
        summary="The objective of rank 0 asks the kernel for 320 MiB of new memory in every step: 80,000 page faults.",
        source="https://github.com/pingcap/tiflash/issues/1400",
        job=JobRecipe(
            keys={"objective": f"{PROGRAM}:objective", "layout": {"tp": 2, "micro_batch": 8}},
            program=PROGRAM,
            fault="scratch",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"page fault|alloc|mmap|scratch|kernel|objective|fourth_cpu|py-spy|stack|profil|compute|\bCPU",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="cpu-bursts",
        family="cpu",
        summary="All checks of the site run at once: eight processes are busy for 3 of every 5 s, then none of them.",
        source="https://github.com/kubernetes/node-problem-detector/issues/412",
        job=JobRecipe(keys={"layout": {"replicate": 2, "micro_batch": 4}}, settled_step=60),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(CPU, r"burst|cron|periodic"),
            misleading=MISLEADING,
        ),
        inject=_start_bursts,
        judge_seconds=35,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-debugging-mode-left-on",
        family="cpu",
        summary="The objective of a LoRA fine-tuning turns autograd's anomaly detection on and leaves it on.",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/17359",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": f"{PROGRAM}:objective",
                "train": {"lora": {"rank": 4}},
                "layout": {"replicate": 2, "micro_batch": 1},
            },
            program=PROGRAM,
            fault="anomalies",
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"anomal|autograd|objective|fourth_cpu|program|py-spy|stack|profil|compute|forward|backward",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
)
