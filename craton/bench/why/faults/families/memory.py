"""Host memory that runs out: a container's limit, `ulimit`, /dev/shm, threads."""

from __future__ import annotations

import sys
from pathlib import Path

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.running import RunningJob

KEYS = {
    "data": {"path": None, "tokenizer": None, "source": "memory:samples"},
    "layout": {"fsdp": 2, "micro_batch": 4},
}
LIMIT = {"memory": {"memory.limit_in_bytes": "3G"}}
# /dev/shm of 16 MB in a mount namespace of its own, as in a container without `--shm-size`.
SMALL_SHARED_MEMORY = (
    *("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c"),
    'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"',
    "sh",
)
MEMORY = (r"\bmemory\b", r"\boom\b")
SHARED_MEMORY = (r"/dev/shm", r"shared memory", r"\bSIGBUS\b", r"no space left")


def _recipe(fault: str, victim: int | None = 1, **more: object) -> JobRecipe:
    return JobRecipe(keys=KEYS, program="memory", fault=fault, victim=victim, **more)  # type: ignore[arg-type]


def take_the_containers_memory(job: RunningJob) -> None:
    """Start a process in the run's cgroup that takes all memory; return once the kernel has killed rank 1 for it."""
    victim = Path(f"/proc/{job.pid(1)}")
    (victim / "oom_score_adj").write_text("1000")  # the kernel spares the neighbour, as a service that is protected
    procs = job.cgroups["memory"] / "cgroup.procs"
    neighbour = job.spawn(
        [
            sys.executable,
            "-c",
            f"import os, pathlib, time\npathlib.Path({str(procs)!r}).write_text(str(os.getpid()))\ntaken = []\n"
            "while True:\n    taken.append(b'x' * (16 << 20))\n    time.sleep(0.01)",
        ]
    )
    job.wait(lambda: not (victim / "exe").exists(), "the kernel killed rank 1")
    neighbour.kill()


FAULTS = (
    LiveFault(
        name="memory-leak-oom-kill",
        family="memory",
        summary="Rank 1 leaks host memory until the kernel kills it at the limit of its container.",
        source="https://github.com/moby/moby/issues/24887",
        job=_recipe("leak", cgroups=LIMIT),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=MEMORY,
        ),
        judge_seconds=30,
        needs=("root", "cgroup:memory"),
    ),
    LiveFault(
        name="memory-nearly-full",
        family="memory",
        summary="Rank 1 holds so much memory that its container is at 93% of the limit; the run still works.",
        source="https://github.com/Kyubyong/tacotron/issues/59",
        job=_recipe("fill", cgroups=LIMIT),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("healthy", "slow"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=MEMORY,
        ),
        judge_seconds=30,
        needs=("root", "cgroup:memory"),
    ),
    LiveFault(
        name="memory-taken-by-neighbour",
        family="memory",
        summary="Another process in the same container takes all memory, and the kernel kills rank 1.",
        source="https://github.com/odoo/runbot/pull/493",
        job=_recipe("none", cgroups=LIMIT),
        inject=take_the_containers_memory,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=MEMORY,
        ),
        judge_seconds=30,
        needs=("root", "cgroup:memory"),
    ),
    LiveFault(
        name="memory-address-space-limit",
        family="memory",
        summary="An allocation of rank 1 exceeds `ulimit -v`: MemoryError.",
        source="https://github.com/pytorch/pytorch/issues/4387",
        job=_recipe("address-space"),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(*MEMORY, r"MemoryError", r"ulimit", r"allocate"),
        ),
    ),
    LiveFault(
        name="shared-memory-bus-error",
        family="memory",
        summary="Rank 1 writes a batch into a shared memory segment that /dev/shm cannot hold: SIGBUS.",
        source="https://github.com/hiyouga/LlamaFactory/issues/7315",
        job=_recipe("map-shared-memory", wrap=SMALL_SHARED_MEMORY),
        expected=ExpectedVerdict(
            layers=("host", "storage"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=SHARED_MEMORY,
        ),
        needs=("root", "unshare"),
    ),
    LiveFault(
        name="shared-memory-full",
        family="memory",
        summary="Rank 1 writes a file to a full /dev/shm: no space left on device.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/878",
        job=_recipe("write-shared-memory", wrap=SMALL_SHARED_MEMORY),
        expected=ExpectedVerdict(
            layers=("host", "storage"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=SHARED_MEMORY,
        ),
        needs=("root", "unshare"),
    ),
    LiveFault(
        name="container-thread-limit",
        family="memory",
        summary="Rank 1 reaches the container's limit of processes and threads: can't start new thread.",
        source="https://github.com/mozilla/translations/issues/630",
        job=_recipe("threads", cgroups={"pids": {"pids.max": "400"}}),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"can't start new thread", r"thread", r"\bpids\b", r"process(es)? limit", r"ulimit -u"),
        ),
        needs=("root", "cgroup:pids"),
    ),
)
