"""Faults of processes, fifth set: a dead log shipper, a warning signal, a helper that dies with a thread, threads that
wait for each other, a daemon that keeps a pipe."""

from __future__ import annotations

import os
import signal

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.program_injections import child_of
from craton.bench.why.faults.running import RunningJob

MISLEADING = (r"network|fabric|learning rate",)
PROGRAM = "fifth_processes"
PROGRESS = {"pattern": "step {step} loss {loss}", "hang": "15m"}


def _script(fault: str, nodes: int) -> JobRecipe:
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={"command": ["{python}", f"{PROGRAM}.py"], "progress": PROGRESS},
        program=PROGRAM,
        fault=fault,
    )


def _kill_shipper(job: RunningJob, rank: int) -> None:
    os.kill(child_of(job.pid(rank), "log-shipper"), signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="log-shipper-killed",
        family="processes",
        summary="The process that ships the log of rank 1 is killed; the next write to its pipe fails: broken pipe.",
        source="https://github.com/eosphoros-ai/DB-GPT-Hub/issues/80",
        job=_script("shipper", nodes=3),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"broken ?pipe|Errno 32|EPIPE|shipper|child",),
            misleading=MISLEADING,
        ),
        inject=lambda job: _kill_shipper(job, 1),
        judge_seconds=25,
    ),
    LiveFault(
        name="warning-signal-ends-rank",
        family="processes",
        summary="The site warns of a preemption with SIGUSR1; rank 0 of a script has no handler, so it ends.",
        source="https://github.com/hydra-ecosystem/hydra/issues/108",
        job=_script("none", nodes=2),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead", "stopped"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"SIGUSR1|signal 10|user[- ]defined signal|handler|preempt",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(0, signal.SIGUSR1),
        judge_seconds=25,
    ),
    LiveFault(
        name="helper-dies-with-its-thread",
        family="processes",
        summary="The tokenizer of rank 0 asked to die with its parent, a thread that has ended: the kernel kills it.",
        source="https://github.com/Tencent-Hunyuan/UniRL/pull/276",
        job=JobRecipe(
            keys={
                "data": {"path": None, "tokenizer": None, "source": f"{PROGRAM}:from_helper"},
                "layout": {"replicate": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            fault="helper",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"tokenizer process|code -9|SIGKILL|helper|child|from_helper|data[._ ]source",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="threads-wait-for-each-other",
        family="processes",
        summary="Two threads of rank 1 take the same two locks in opposite order, and each waits for the other.",
        source="https://github.com/LadybugDB/ladybug/pull/605",
        job=JobRecipe(
            kind="sft",
            keys={
                "objective": f"{PROGRAM}:objective",
                "train": {"lora": {"rank": 4}},
                "layout": {"replicate": 2},
            },
            program=PROGRAM,
            fault="locks",
            victim=1,
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"\block|deadlock|thread|note_statistics|objective|stack|py-spy|fifth_processes",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="daemon-keeps-the-pipe-open",
        family="processes",
        summary="A tool that the objective of rank 0 calls leaves a daemon with its output; rank 0 waits for its end.",
        source="https://github.com/python/cpython/issues/75893",
        job=JobRecipe(
            keys={
                "objective": f"{PROGRAM}:objective",
                "model": {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64},
                "layout": {"fsdp": 2, "ep": 2, "micro_batch": 4},
            },
            program=PROGRAM,
            fault="daemon",
            victim=0,
        ),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(
                r"subprocess|communicate|pipe|daemon|\bsleep\b|check_node|child|objective|stack|py-spy|fifth_proc",
            ),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
)
