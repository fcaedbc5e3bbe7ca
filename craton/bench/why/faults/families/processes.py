"""Faults of processes: stopped, frozen, killed, crashed, defunct, without threads; of ranks, agents and keepers."""

from __future__ import annotations

import json
import os
import signal

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import child_with, freeze, kill_again_and_again
from craton.bench.why.faults.running import RunningJob

MISLEADING = (r"network|fabric|learning rate",)
LAUNCHER = {
    "command": ["{python}", "processes.py"],
    "progress": {"pattern": "step {step} loss {loss}", "hang": "10x", "rank": 0},
}


def _kill_trained_child(job: RunningJob) -> None:
    os.kill(child_with(job, ["processes.py", "train"]), signal.SIGKILL)


def _kill_keeper(job: RunningJob) -> None:
    lines = (job.run.path / "events" / "node-1.jsonl").read_text().splitlines()
    ready = [event for event in map(json.loads, lines) if event["event"] == "keeper_ready"]
    os.kill(ready[-1]["pid"], signal.SIGKILL)


FAULTS = (
    LiveFault(
        name="rank-stopped",
        family="processes",
        summary="Somebody stops rank 1 of a tensor-parallel run with SIGSTOP, as Ctrl-Z or a debugger does.",
        source="https://github.com/BOINC/boinc/issues/5480",
        job=JobRecipe(keys={"layout": {"tp": 2}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"stopped|SIGSTOP|SIGCONT|kill -CONT",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(1, signal.SIGSTOP),
    ),
    LiveFault(
        name="rank-killed",
        family="processes",
        summary="Rank 2 of a pipeline of three is killed with SIGKILL, and the job allows no restart.",
        source="https://github.com/deepspeedai/DeepSpeed/issues/4890",
        job=JobRecipe(
            nodes=3,
            keys={
                "model": {"layers": 3},
                "train": {"global_batch_sequences": 6},
                "layout": {"pp": 3, "micro_batch": 2},
                "checkpoint": {"peer": "off"},
            },
        ),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({2}),
            remedy=(r"SIGKILL|killed|signal 9",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(2, signal.SIGKILL),
    ),
    LiveFault(
        name="rank-killed-repeatedly",
        family="processes",
        summary="A watchdog of the site kills rank 1 two seconds after each of its starts; the run restarts each time.",
        source="https://github.com/OpenBMB/MiniCPM-V/issues/770",
        job=JobRecipe(keys={"layout": {"replicate": 2}, "recover": {"tries": 100}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow", "dead"),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"SIGKILL|killed|restart",),
            misleading=MISLEADING,
        ),
        inject=lambda job: kill_again_and_again(job, 1, 2.0),
        judge_seconds=75,
    ),
    LiveFault(
        name="rank-crashes",
        family="processes",
        summary="Rank 0 of a LoRA fine-tuning dies of a segmentation fault.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1880",
        job=JobRecipe(kind="sft", keys={"train": {"lora": {"rank": 4}}}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"SIGSEGV|segmentation|signal 11|core dump|native",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(0, signal.SIGSEGV),
    ),
    LiveFault(
        name="rank-frozen",
        family="processes",
        summary="The container of rank 1 is paused: its processes are frozen, and no signal reaches them.",
        source="https://github.com/pytorch/pytorch/pull/185414",
        job=JobRecipe(keys={"layout": {"fsdp": 2}, "checkpoint": {"peer": "off"}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("hung", "dead"),
            ranks=frozenset({1}),
            remedy=(r"frozen|freez|paused|stopped|uninterruptible|cgroup|D state|does not run",),
            misleading=MISLEADING,
        ),
        inject=lambda job: freeze(job, job.pid(1)),
        judge_seconds=30,
        needs=("root", "cgroup:freezer"),
    ),
    LiveFault(
        name="child-is-a-zombie",
        family="processes",
        summary="A launcher script does not notice that its training process was killed; it stays as a zombie.",
        source="https://github.com/krallin/tini/issues/164",
        job=JobRecipe(kind="command", nodes=1, keys=LAUNCHER, program="processes"),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"zombie|defunct|child|no progress|launcher|killed|stack|py-spy|hang",),
            misleading=MISLEADING,
        ),
        inject=_kill_trained_child,
        judge_seconds=30,
    ),
    LiveFault(
        name="only-agent-killed",
        family="processes",
        summary="The only agent of a run on one node is killed; its rank ends with it, and none is left to restart it.",
        source="https://github.com/pytorch/pytorch/issues/150916",
        job=JobRecipe(nodes=1),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"agent|lost|resume|killed",),
            misleading=MISLEADING,
        ),
        inject=lambda job: os.kill(job.agent_pid("node-0"), signal.SIGKILL),
        judge_seconds=30,
    ),
    LiveFault(
        name="only-agent-stopped",
        family="processes",
        summary="The only agent of a run is stopped by a signal; nothing is supervised or recorded any more.",
        source="https://github.com/pytorch/pytorch/issues/76287",
        job=JobRecipe(nodes=1, keys={"checkpoint": {"peer": "off"}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("hung", "dead", "healthy"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"stopped|SIGCONT|kill -CONT|agent",),
            misleading=MISLEADING,
        ),
        inject=lambda job: os.kill(job.agent_pid("node-0"), signal.SIGSTOP),
        judge_seconds=30,
    ),
    LiveFault(
        name="keeper-killed",
        family="processes",
        summary="The process of node-1 that keeps copies of the state in memory is killed, and no restart is allowed.",
        source="https://github.com/vllm-project/vllm/issues/11996",
        job=JobRecipe(keys={"layout": {"fsdp": 2}, "checkpoint": {"peer": "5 steps"}}),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(r"keeper|killed|SIGKILL|in memory",),
            misleading=MISLEADING,
        ),
        inject=_kill_keeper,
        judge_seconds=30,
    ),
    LiveFault(
        name="thread-limit",
        family="processes",
        summary="Rank 1 leaks threads until the process limit of its container; the next thread cannot be started.",
        source="https://github.com/vladmandic/sdnext/issues/2642",
        job=JobRecipe(
            keys={"objective": "processes:objective", "layout": {"replicate": 2}},
            program="processes",
            victim=1,
            cgroups={"pids": {"pids.max": "200"}},
        ),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"thread|pids|process limit|ulimit|Resource temporarily unavailable",),
            misleading=MISLEADING,
        ),
        judge_seconds=60,
        needs=("root", "cgroup:pids"),
    ),
)
