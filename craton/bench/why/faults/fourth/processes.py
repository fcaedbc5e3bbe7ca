"""Faults of processes, fourth set: terminated from outside, locked in native code, a forbidden system call, a program
for another machine, a child that asks."""

from __future__ import annotations

import signal

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault

MISLEADING = (r"network|fabric|learning rate",)
PROGRAM = "fourth_processes"
PROGRESS = {"pattern": "step {step} loss {loss}", "hang": "15m"}


def _script(fault: str, victim: int, nodes: int) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", f"{PROGRAM}.py"], "progress": PROGRESS},
        program=PROGRAM,
        fault=fault,
        victim=victim,
    )


FAULTS = (
    LiveFault(
        name="rank-terminated-from-outside",
        family="processes",
        summary="A guard of the site against low memory sends SIGTERM to rank 1 of a fine-tuning.",
        source="https://github.com/yichen928/SparseFusion/issues/25",
        job=JobRecipe(kind="sft", keys={"layout": {"fsdp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("stopped", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"SIGTERM|signal 15|terminated",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(1, signal.SIGTERM),
        judge_seconds=25,
    ),
    LiveFault(
        name="rank-locked-in-native-code",
        family="processes",
        summary="A library of rank 1 waits for its own lock and keeps the interpreter's: no Python thread of it runs.",
        source="https://github.com/iowarp/clio-core/issues/793",
        job=JobRecipe(
            keys={
                "objective": f"{PROGRAM}:objective",
                "model": {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64},
                "layout": {"fsdp": 2, "ep": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"lock_twice|objective|mutex|\block|GIL|native|futex|stack|py-spy|gdb|fourth_processes",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="rank-makes-a-forbidden-call",
        family="processes",
        summary="The security profile of rank 1's container forbids io_uring; the kernel ends the rank with SIGSYS.",
        source="https://github.com/nestybox/sysbox/issues/350",
        job=_script("profile", victim=1, nodes=2),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"SIGSYS|bad system call|system call|signal 31|seccomp|security profile",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="program-for-another-machine",
        family="processes",
        summary="A tool that the data source of rank 0 calls was built for another architecture: exec format error.",
        source="https://github.com/pachterlab/kb_python/issues/139",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:from_tool"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"exec format|Errno 8\b|ENOEXEC|architecture|shard-size|binary",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="child-asks-for-a-name",
        family="processes",
        summary="A tool that rank 2 calls to push a checkpoint asks for a user name, and waits for the answer.",
        source="https://github.com/ansible/ansible/issues/7720",
        job=_script("prompt", victim=2, nodes=3),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({2}),
            remedy=(r"Username|prompt|stdin|input|child|subprocess|push|stack|py-spy|fourth_processes|credential",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
)
