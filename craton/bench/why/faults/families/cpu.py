"""Faults of CPUs: other processes, bindings, limits of containers, priorities, the job's own helpers."""

from __future__ import annotations

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import hog, limit_cpu, pin, renice
from craton.bench.why.faults.running import RunningJob

MISLEADING = (r"network|fabric|file system",)
CONTENTION = (r"\bCPU|contention|other processes|load|cores?\b",)


def _crowd_rank(job: RunningJob) -> None:
    for rank, pid in job.rank_pids().items():
        pin([pid], rank % 2)
    hog(job, 5, "taskset", "-c", "1")


def _outrank(job: RunningJob) -> None:
    renice(job.pid(1), 19)
    hog(job, 6)


FAULTS = (
    LiveFault(
        name="cpu-hogs",
        family="cpu",
        summary="Eight busy processes of another user start on the machine; all ranks get a fraction of the cores.",
        source="https://github.com/tusen-ai/simpledet/issues/312",
        job=JobRecipe(keys={"layout": {"fsdp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",), conditions=("slow",), ranks=frozenset(), remedy=CONTENTION, misleading=MISLEADING
        ),
        inject=lambda job: hog(job, 8),
        judge_seconds=40,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-hogs-beside-one-rank",
        family="cpu",
        summary="The ranks are bound to a core each, and five busy processes are bound to the core of rank 1.",
        source="https://github.com/ray-project/ray/issues/42135",
        job=JobRecipe(keys={"layout": {"replicate": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=CONTENTION,
            misleading=MISLEADING,
        ),
        inject=_crowd_rank,
        judge_seconds=40,
        needs=("taskset",),
        is_alone=True,
    ),
    LiveFault(
        name="cpu-affinity-one-core",
        family="cpu",
        summary="A wrong affinity binds all three ranks to core 0 while the other core idles.",
        source="https://github.com/huggingface/accelerate/issues/3911",
        job=JobRecipe(
            nodes=3,
            keys={"train": {"global_batch_sequences": 24}, "layout": {"fsdp": 3}, "checkpoint": {"peer": "off"}},
        ),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(*CONTENTION, r"affinity|taskset|bound|pinned"),
            misleading=MISLEADING,
        ),
        inject=lambda job: pin(job.rank_pids().values(), 0),
        judge_seconds=40,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-limit-of-one-rank",
        family="cpu",
        summary="The container of rank 1 has a CPU limit of 12% of a core; the kernel throttles it.",
        source="https://github.com/kubernetes/kubernetes/issues/97445",
        job=JobRecipe(keys={"layout": {"tp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"throttl|cgroup|quota|CPU limit|cfs|\bCPU",),
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_cpu(job, [job.pid(1)], 0.12),
        judge_seconds=40,
        needs=("root", "cgroup:cpu"),
    ),
    LiveFault(
        name="cpu-limit-of-the-container",
        family="cpu",
        summary="All ranks of a fine-tuning share a CPU limit of 20% of a core; the kernel throttles them.",
        source="https://github.com/kubernetes/kubernetes/issues/67577",
        job=JobRecipe(kind="sft", keys={"layout": {"fsdp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"throttl|cgroup|quota|CPU limit|cfs|\bCPU",),
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_cpu(job, job.rank_pids().values(), 0.2),
        judge_seconds=40,
        needs=("root", "cgroup:cpu"),
    ),
    LiveFault(
        name="cpu-low-priority-rank",
        family="cpu",
        summary="Rank 1 has niceness 19, and six busy processes of normal priority take its share of the cores.",
        source="https://github.com/kubeflow/trainer/issues/1454",
        job=JobRecipe(keys={"layout": {"pp": 2, "micro_batch": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CONTENTION, r"nice|priority"),
            misleading=MISLEADING,
        ),
        inject=_outrank,
        judge_seconds=40,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-own-workers-spin",
        family="cpu",
        summary="Worker processes that an objective started on every rank spin after their work, and take the cores.",
        source="https://github.com/ruotianluo/ImageCaptioning.pytorch/issues/45",
        job=JobRecipe(keys={"objective": "cpu:objective", "layout": {"replicate": 2}}, program="cpu"),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(*CONTENTION, r"child|worker|process"),
            misleading=MISLEADING,
        ),
        judge_seconds=40,
        is_alone=True,
    ),
)
