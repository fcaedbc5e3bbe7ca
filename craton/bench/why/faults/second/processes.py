"""Faults of processes, second set: a session that ends, debuggers, limits of time, pools, pipes, terminals."""

from __future__ import annotations

import os
import signal

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.system_injections import (
    hold_in_debugger,
    kill_everything_on_node,
    limit_cpu_time,
    named,
)

MISLEADING = (r"network|fabric|learning rate",)
POOL = {"data": {"path": None, "tokenizer": None, "source": "second_processes:from_pool"}}

FAULTS = (
    LiveFault(
        name="session-of-a-node-ends",
        family="processes",
        summary="A logout kills everything of the user on node-1 at once: agent, rank, and their helpers.",
        source="https://github.com/systemd/systemd/issues/8486",
        job=JobRecipe(keys={"layout": {"fsdp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead", "hung"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"agent|lost|killed|heartbeat|resume|node-1",),
            misleading=MISLEADING,
        ),
        inject=lambda job: kill_everything_on_node(job, "node-1"),
        judge_seconds=30,
    ),
    LiveFault(
        name="rank-held-by-debugger",
        family="processes",
        summary="Somebody attached a debugger to rank 0 of a fine-tuning and left it open; all its threads are held.",
        source="https://github.com/benfred/py-spy/issues/565",
        job=JobRecipe(kind="sft", keys={"layout": {"replicate": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"trac(ed|ing|er)|debugger|ptrace|gdb|stopped|detach|held",),
            misleading=MISLEADING,
        ),
        inject=lambda job: hold_in_debugger(job, job.pid(0)),
        needs=("root",),
    ),
    LiveFault(
        name="rank-over-its-cpu-time",
        family="processes",
        summary="Rank 2 of three uses up its `ulimit -t`, as on a login node; the kernel ends it with SIGXCPU.",
        source="https://github.com/olcf/olcf-user-docs/issues/253",
        job=JobRecipe(
            nodes=3,
            keys={
                "train": {"global_batch_sequences": 6},
                "layout": {"replicate": 3, "micro_batch": 2},
                "checkpoint": {"peer": "off"},
            },
        ),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({2}),
            remedy=(r"SIGXCPU|CPU time|ulimit|signal 24",),
            misleading=MISLEADING,
        ),
        inject=lambda job: limit_cpu_time(job.pid(2), 1),
        judge_seconds=30,
    ),
    LiveFault(
        name="pool-worker-killed",
        family="processes",
        summary="The only worker of rank 1's pool is killed in a task; the pool starts another, and the task is lost.",
        source="https://github.com/python/cpython/issues/96062",
        job=JobRecipe(keys={**POOL, "layout": {"fsdp": 2}}, program="second_processes", victim=1),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"data[._ ]?source|pool|worker|child|second_processes|stack|py-spy|wait(s|ing)? for data",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="reader-of-output-stopped",
        family="processes",
        summary="The `tee` behind a script is stopped; its pipe fills up, and the script waits in its next print.",
        source="https://github.com/humanmade/Cavalcade/issues/37",
        job=JobRecipe(
            kind="command",
            nodes=1,
            keys={
                "command": "{python} second_processes.py | tee console.log",
                "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"},
            },
            program="second_processes",
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"stopped|SIGSTOP|SIGCONT|kill -CONT|pipe|\btee\b|output",),
            misleading=MISLEADING,
        ),
        inject=lambda job: os.kill(named(job, "tee"), signal.SIGSTOP),
        judge_seconds=25,
    ),
    LiveFault(
        name="rank-hung-up",
        family="processes",
        summary="The terminal in which rank 1 of a script was started is closed; the kernel sends it SIGHUP.",
        source="https://github.com/open-mmlab/mmrotate/issues/210",
        job=JobRecipe(
            kind="command",
            keys={
                "command": ["{python}", "second_processes.py"],
                "progress": {"pattern": "step {step} loss {loss}", "hang": "10x"},
            },
            program="second_processes",
        ),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"SIGHUP|hang ?up|hung up|signal 1\b|terminal|nohup",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(1, signal.SIGHUP),
    ),
)
