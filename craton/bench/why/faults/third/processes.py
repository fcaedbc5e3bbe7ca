"""Faults of processes, third set: a limiter that stops and continues, instructions, locks, threads, torchrun."""

from __future__ import annotations

import os
import signal
import sys

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.running import RunningJob, environments

MISLEADING = (r"network|fabric|learning rate",)
PROGRAM = "third_processes"
PATTERN = "step {step} loss {loss}"


def _script(fault: str, victim: int, nodes: int) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", f"{PROGRAM}.py"], "progress": {"pattern": PATTERN, "hang": "15m"}},
        program=PROGRAM,
        fault=fault,
        victim=victim,
    )


def _limit(job: RunningJob, rank: int) -> None:
    job.spawn([sys.executable, str(program_path(PROGRAM)), "limit", str(job.pid(rank))])


def _kill_worker(job: RunningJob) -> None:
    """Kill the second worker that torchrun has started."""
    marker = job.marker.encode()
    workers = [pid for pid, words in environments() if marker in words and b"LOCAL_RANK=1" in words]
    if not workers:
        raise LookupError(f"{job.name} has no worker with local rank 1")
    os.kill(min(workers), signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="rank-under-cpulimit",
        family="processes",
        summary="A tool of the site stops and continues rank 1 ten times a second, to keep its CPU use below 10%.",
        source="https://github.com/opsengine/cpulimit/issues/40",
        job=JobRecipe(keys={"layout": {"fsdp": 2}, "checkpoint": {"peer": "off"}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"stopped|SIGSTOP|SIGCONT|cpulimit|throttl|limit|paused|\bCPU\b|does not run",),
            misleading=MISLEADING,
        ),
        inject=lambda job: _limit(job, 1),
        judge_seconds=35,
    ),
    LiveFault(
        name="rank-illegal-instruction",
        family="processes",
        summary="A kernel in the objective was compiled for newer CPUs than that of rank 1, which dies of SIGILL.",
        source="https://github.com/torch/torch7/issues/666",
        job=JobRecipe(
            kind="sft",
            keys={"objective": f"{PROGRAM}:objective", "layout": {"replicate": 2}},
            program=PROGRAM,
            fault="instruction",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"SIGILL|illegal instruction|signal 4\b|instruction set|\bAVX|native|core dump",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="build-lock-left-behind",
        family="processes",
        summary="The process that built an extension on the node of rank 2 was killed; rank 2 waits for its lock file.",
        source="https://github.com/pytorch/pytorch/issues/189245",
        job=_script("lock", victim=2, nodes=3),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({2}),
            remedy=(r"\block|file_?baton|extension|build|stack|py-spy|third_processes",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="raised-but-does-not-exit",
        family="processes",
        summary="Rank 1 raises, but an upload thread keeps its process alive; rank 0 waits for it in an all-reduce.",
        source="https://github.com/googleapis/python-aiplatform/issues/3130",
        job=_script("thread", victim=1, nodes=2),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"RuntimeError|stack expects each tensor|equal size|traceback|raised|exception|thread",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="torchrun-worker-killed",
        family="processes",
        summary="One of two workers of torchrun is killed with SIGKILL; torchrun ends the other and exits with 1.",
        source="https://github.com/hpcaitech/ColossalAI/issues/3514",
        job=JobRecipe(
            kind="command",
            nodes=1,
            keys={
                "command": [
                    *("{python}", "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"),
                    *("--master-port={master_port}", f"{PROGRAM}.py"),
                ],
                "progress": {"pattern": PATTERN, "hang": "10x"},
            },
            program=PROGRAM,
            fault="none",
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"SIGKILL|signal 9|exitcode:? *:? ?-9|killed|ChildFailedError",),
            misleading=MISLEADING,
        ),
        inject=_kill_worker,
        judge_seconds=30,
    ),
)
