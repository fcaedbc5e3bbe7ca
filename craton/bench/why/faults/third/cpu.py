"""Faults of CPUs, third set: real-time processes, sidecars, tracers, short-lived processes, polling ranks."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import pin
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.third.system_injections import (
    hog_in_real_time,
    start_short_processes,
    start_sidecar,
    trace,
)

MISLEADING = (r"network|fabric|file system|learning rate",)
CPU = r"\bCPU|contention|other processes|load|cores?\b"


def _hog_core_of_rank(job: RunningJob) -> None:
    for rank, pid in job.rank_pids().items():
        pin([pid], rank % 2)
    hog_in_real_time(job, 1)


def _make_turn(job: RunningJob) -> None:
    (job.folder.parent / "turn").write_bytes(bytes(8))


FAULTS = (
    LiveFault(
        name="cpu-real-time-process",
        family="cpu",
        summary="Ranks are bound to a core each; a busy process of real-time class takes 95% of the core of rank 1.",
        source="https://github.com/OE4T/linux-tegra-4.9/issues/37",
        job=JobRecipe(keys={"layout": {"fsdp": 2, "micro_batch": 4}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(CPU, r"real-?time|SCHED_FIFO|chrt|priority"),
            misleading=MISLEADING,
        ),
        inject=_hog_core_of_rank,
        judge_seconds=35,
        needs=("root", "chrt", "taskset"),
        is_alone=True,
    ),
    LiveFault(
        name="cpu-sidecar-uses-up-the-limit",
        family="cpu",
        summary="A sidecar in the container of a LoRA fine-tuning uses up the CPU limit that both share.",
        source="https://github.com/kubernetes/kubernetes/issues/97007",
        job=JobRecipe(kind="sft", keys={"train": {"lora": {"rank": 4}}, "layout": {"replicate": 2}}, settled_step=60),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(CPU, r"throttl|cgroup|quota|CPU limit|cfs|sidecar"),
            misleading=MISLEADING,
        ),
        inject=lambda job: start_sidecar(job, job.rank_pids().values(), 4, 1.2),
        judge_seconds=35,
        needs=("root", "cgroup:cpu"),
    ),
    LiveFault(
        name="cpu-strace-left-on",
        family="cpu",
        summary="Somebody left strace on rank 0: every one of its system calls stops it twice.",
        source="https://github.com/rehosting/penguin/issues/355",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": "third_cpu:samples"},
                "layout": {"fsdp": 2, "micro_batch": 4},
            },
            program="third_cpu",
            env={"CORPUS": "{data}/corpus.txt"},
            settled_step=60,
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(CPU, r"strace|ptrace|tracer|traced|debugger|system calls?|py-spy|data[._ ]?source"),
            misleading=MISLEADING,
        ),
        inject=lambda job: trace(job, job.pid(0)),
        judge_seconds=35,
        needs=("root", "strace"),
    ),
    LiveFault(
        name="cpu-short-lived-processes",
        family="cpu",
        summary="Checks of other containers start thousands of short-lived processes; none of them is busy for long.",
        source="https://github.com/moby/moby/issues/39102",
        job=JobRecipe(keys={"layout": {"pp": 2, "micro_batch": 4}}, settled_step=60),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(CPU, r"short-lived|fork"),
            misleading=MISLEADING,
        ),
        inject=lambda job: start_short_processes(job, 8),
        judge_seconds=40,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-ranks-poll",
        family="cpu",
        summary="Five ranks of a script on two cores poll for their turn; the one that computes gets too little CPU.",
        source="https://github.com/open-mpi/ompi/issues/10426",
        job=JobRecipe(
            kind="command",
            nodes=5,
            keys={
                "command": ["{python}", "third_cpu.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "15m"},
            },
            program="third_cpu",
            env={"TURN": "{folder}/turn"},
            prepare=_make_turn,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(CPU, r"poll|spin|busy|oversubscri|py-spy|stack|profil|third_cpu"),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
        is_alone=True,
    ),
)
