"""Faults of servers: too many requests, long prompts, no blocks, grammars, slow clients, dead and stopped processes."""

from __future__ import annotations

import os
import signal

from craton.bench.why.faults.environment import RANDOM, WIDE_MODEL
from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import child_with, load
from craton.bench.why.faults.running import RunningJob

LOAD = (r"queue|waiting|overload|replica|\bload\b|max_running|requests",)
MISLEADING = (r"drain the node|network|file system",)


def _stop_front_end(job: RunningJob) -> None:
    os.kill(child_with(job, ["craton.ml.serving.server"]), signal.SIGSTOP)


FAULTS = (
    LiveFault(
        name="server-overloaded",
        family="server",
        summary="Sixty clients send requests without pause to a server that runs four at a time.",
        source="https://github.com/vllm-project/vllm/issues/2901",
        job=JobRecipe(kind="serve", nodes=1, keys={"serve": {"max_running": 4}}),
        expected=ExpectedVerdict(
            layers=("framework",), conditions=("slow",), ranks=frozenset(), remedy=LOAD, misleading=MISLEADING
        ),
        inject=lambda job: load(job, "overload", "60"),
        judge_seconds=80,
    ),
    LiveFault(
        name="server-long-prompts",
        family="server",
        summary="Forty clients send prompts of 1,900 tokens for answers of 8; prefill takes every step.",
        source="https://github.com/vllm-project/vllm/pull/10235",
        job=JobRecipe(
            kind="serve",
            nodes=1,
            keys={
                "model": {**WIDE_MODEL, "heads": 8, "head_dim": 64},
                "serve": {**RANDOM, "max_running": 8, "chunk_tokens": 256},
            },
        ),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(*LOAD, r"prompt|prefill|first token"),
            misleading=MISLEADING,
        ),
        inject=lambda job: load(job, "long-prompts", "40"),
        judge_seconds=80,
    ),
    LiveFault(
        name="server-out-of-blocks",
        family="server",
        summary="Thirty long requests need more KV cache than there is; they wait for blocks or are preempted.",
        source="https://github.com/vllm-project/vllm/issues/18115",
        job=JobRecipe(kind="serve", nodes=1, keys={"model": WIDE_MODEL, "serve": RANDOM}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(*LOAD, r"KV cache|blocks|preempt"),
            misleading=MISLEADING,
        ),
        inject=lambda job: load(job, "long-answers", "30"),
        judge_seconds=120,
    ),
    LiveFault(
        name="server-slow-grammars",
        family="server",
        summary="Every request brings a new JSON schema that takes seconds to compile; answers hardly begin.",
        source="https://github.com/vllm-project/vllm/issues/12122",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(r"grammar|schema|structured|guided|queue|waiting",),
            misleading=MISLEADING,
        ),
        inject=lambda job: load(job, "grammars", "48"),
        judge_seconds=80,
    ),
    LiveFault(
        name="server-slow-clients",
        family="server",
        summary="Slow clients hold all 8,192 connections that a server accepts; others get no answer.",
        source="https://github.com/MAXeaglet/commandcode-proxy/issues/20",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow", "hung"),
            ranks=None,
            remedy=(r"connection|client|open files|file descriptor|respond|answer",),
            misleading=MISLEADING,
        ),
        inject=lambda job: load(job, "slow-heads", "1"),
        judge_seconds=60,
        needs=("root",),
    ),
    LiveFault(
        name="server-engine-killed",
        family="server",
        summary="The engine process of a server is killed; the front end alone cannot answer. No restart is allowed.",
        source="https://github.com/vllm-project/vllm/issues/39863",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("dead",),
            ranks=frozenset({0}),
            remedy=(r"SIGKILL|killed|signal 9|resume",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(0, signal.SIGKILL),
    ),
    LiveFault(
        name="server-engine-stopped",
        family="server",
        summary="The engine process of a busy server is stopped by a signal; requests are accepted and never answered.",
        source="https://github.com/vllm-project/vllm/issues/1492",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            remedy=(r"stopped|SIGSTOP|SIGCONT|kill -CONT",),
            misleading=MISLEADING,
        ),
        inject=lambda job: job.signal_rank(0, signal.SIGSTOP),
    ),
    LiveFault(
        name="server-front-end-stopped",
        family="server",
        summary="The HTTP front end is stopped by a signal; the engine idles, and no client gets an answer.",
        source="https://github.com/vllm-project/vllm/issues/7633",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "dead"),
            ranks=None,
            remedy=(r"stopped|SIGCONT|front end|HTTP|respond|answer|/metrics|/health",),
            misleading=MISLEADING,
        ),
        inject=_stop_front_end,
        judge_seconds=30,
    ),
    LiveFault(
        name="server-truncated-weights",
        family="server",
        summary="The copy of the weights was cut off; the server cannot load them.",
        source="https://github.com/QwenLM/Qwen3-VL/issues/264",
        job=JobRecipe(
            kind="serve",
            nodes=1,
            keys={"model": "{folder}/cut"},
            wrap=(
                "/bin/sh",
                "-c",
                "cp -r ../../../model ../cut && for file in ../cut/*.safetensors; do truncate -s 90000 $file; done && "
                'exec "$@"',
                "sh",
            ),
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"safetensors|weights|truncated|incomplete|corrupt|damaged|cut off",),
            misleading=(r"drain the node|network",),
        ),
        onset="start",
        judge_seconds=90,
    ),
)
