"""Faults of CPUs, second set: shares, threads, the interpreter's lock, profilers, helpers, a throttled server."""

from __future__ import annotations

from typing import Any

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import child_with, confine, hog, limit_cpu
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import client

MISLEADING = (r"network|fabric|file system|learning rate",)
CPU = (r"\bCPU|contention|other processes|load|cores?\b",)
OWN_CODE = (r"py-spy|stack|profil|program|objective|thread|second_cpu|compute",)
SHARES = 256  # of 1,024 that a process has otherwise
MOE_MODEL = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64}


def _recipe(fault: str, victim: int | None = None, **keys: Any) -> JobRecipe:
    keys = {"objective": "second_cpu:objective", **keys}
    return JobRecipe(keys=keys, program="second_cpu", fault=fault, victim=victim)


def _outweigh(job: RunningJob) -> None:
    confine(job, "cpu", [job.pid(0)], cpu__shares=SHARES)
    hog(job, 4)


def _throttle_server(job: RunningJob) -> None:
    client(job, "ask", 4)
    limit_cpu(job, [job.pid(0)], 0.1)


FAULTS = (
    LiveFault(
        name="cpu-shares-too-low",
        family="cpu",
        summary="The container of rank 0 has a quarter of the usual CPU shares; four busy processes outweigh it.",
        source="https://github.com/weaveworks/weave/pull/3740",
        job=JobRecipe(keys={"model": MOE_MODEL, "layout": {"fsdp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(*CPU, r"shares|cgroup|weight"),
            misleading=MISLEADING,
        ),
        inject=_outweigh,
        judge_seconds=35,
        needs=("root", "cgroup:cpu"),
        is_alone=True,
    ),
    LiveFault(
        name="cpu-too-many-threads",
        family="cpu",
        summary="An objective starts twelve threads on every rank that compress samples; training gets no core.",
        source="https://github.com/dingo-gw/dingo/issues/54",
        job=_recipe("threads", layout={"replicate": 2}),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(*CPU, *OWN_CODE, r"oversubscri"),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
        is_alone=True,
    ),
    LiveFault(
        name="cpu-monitor-thread-spins",
        family="cpu",
        summary="A monitor thread of rank 1 polls without a pause and holds the interpreter's lock most of the time.",
        source="https://github.com/pytorch/pytorch/issues/101962",
        job=_recipe("monitor", victim=1, layout={"fsdp": 2}),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow",),
            ranks=frozenset({1}),
            remedy=(*OWN_CODE, r"GIL|\block\b|spin|busy|\bCPU"),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="cpu-profiler-left-on",
        family="cpu",
        summary="A profiler that records every call stays on in rank 0; each step takes several times as long.",
        source="https://github.com/tensorflow/tensorflow/issues/5981",
        job=_recipe("profiler", victim=0, layout={"tp": 2}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset({0}),
            remedy=OWN_CODE,
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="cpu-limit-of-helper",
        family="cpu",
        summary="The helper that prepares a script's samples has a CPU limit of 3% of a core; the script waits for it.",
        source="https://github.com/k3s-io/k3s/issues/5085",
        job=JobRecipe(
            kind="command",
            nodes=1,
            keys={"command": ["{python}", "second_cpu.py"], "progress": {"pattern": "step {step} loss {loss}"}},
            program="second_cpu",
        ),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"throttl|cgroup|quota|CPU limit|cfs|\bCPU",),
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_cpu(job, [child_with(job, ["second_cpu.py", "prepare"])], 0.03),
        judge_seconds=30,
        needs=("root", "cgroup:cpu"),
    ),
    LiveFault(
        name="cpu-limit-of-server",
        family="cpu",
        summary="The engine of a server has a CPU limit of 10% of a core; four clients wait for every token.",
        source="https://github.com/ollama/ollama/issues/17916",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"throttl|cgroup|quota|CPU limit|cfs|\bCPU",),
            misleading=MISLEADING,
        ),
        inject=_throttle_server,
        judge_seconds=35,
        needs=("root", "cgroup:cpu"),
    ),
)
