"""Faults of servers, second set: impatient clients, a throttled front end, open files, ports, files of the model."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import child_with, limit_cpu
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import client, limit_open_files

LOAD = (r"queue|waiting|overload|replica|\bload\b|max_running|requests|clients?",)
MISLEADING = (r"drain the node|network|learning rate",)


def _throttle_front_end(job: RunningJob) -> None:
    client(job, "ask", 12)
    limit_cpu(job, [child_with(job, ["craton.ml.serving.server"])], 0.01)


def _use_up_files(job: RunningJob) -> None:
    client(job, "keep-open", 60)
    client(job, "ask", 2)
    limit_open_files(child_with(job, ["craton.ml.serving.server"]), 8)


def _take_port(job: RunningJob) -> None:
    """Listen on the port of the server before it does: it was free when the job was checked."""
    listener = socket.create_server(("", urlsplit(job.url).port or 0))
    job.undo.callback(listener.close)


FAULTS = (
    LiveFault(
        name="server-impatient-clients",
        family="server",
        summary="Forty clients give up after 0.3 s and ask again at once; all its work is in vain.",
        source="https://github.com/ggml-org/llama.cpp/pull/22907",
        job=JobRecipe(kind="serve", nodes=1, keys={"serve": {"max_running": 4}}),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow",),
            ranks=frozenset(),
            remedy=(*LOAD, r"abort|cancel|disconnect|time ?out|retr(y|ies)"),
            misleading=MISLEADING,
        ),
        inject=lambda job: client(job, "hurry", 40),
        judge_seconds=40,
    ),
    LiveFault(
        name="server-front-end-throttled",
        family="server",
        summary="The CPU limit of the HTTP front end is 10m instead of 10: 1% of a core. Requests wait there.",
        source="https://github.com/openvinotoolkit/model_server/issues/2721",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("slow", "hung"),
            ranks=None,
            remedy=(r"throttl|cgroup|quota|CPU limit|cfs|\bCPU|front end|HTTP|respond|answer",),
            misleading=MISLEADING,
        ),
        inject=_throttle_front_end,
        judge_seconds=30,
        needs=("root", "cgroup:cpu"),
    ),
    LiveFault(
        name="server-out-of-open-files",
        family="server",
        summary="Idle connections use up the open files that the front end may have; it cannot accept another one.",
        source="https://github.com/Kludex/uvicorn/issues/1030",
        job=JobRecipe(kind="serve", nodes=1),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("slow", "hung"),
            ranks=None,
            remedy=(r"open files|file descriptor|EMFILE|Errno 24|ulimit|connection|respond|answer",),
            misleading=MISLEADING,
        ),
        inject=_use_up_files,
        judge_seconds=30,
        needs=("root",),
    ),
    LiveFault(
        name="server-port-taken",
        family="server",
        summary="Another process takes the port of the server while its model loads; the server cannot start.",
        source="https://github.com/vllm-project/vllm/issues/7514",
        job=JobRecipe(kind="serve", nodes=1),
        inject=_take_port,
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"address already in use|in use|Errno 98|EADDRINUSE|\bport\b",),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=40,
    ),
    LiveFault(
        name="server-without-tokenizer",
        family="server",
        summary="The folder of the model was copied without its tokenizer; the server cannot start.",
        source="https://github.com/vllm-project/vllm/issues/31444",
        job=JobRecipe(
            kind="serve",
            nodes=1,
            keys={"model": "{folder}/copied"},
            wrap=(
                "/bin/sh",
                "-c",
                'cp -r ../../../model ../copied && rm -f ../copied/tokenizer* && exec "$@"',
                "sh",
            ),
        ),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"tokenizer",),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=40,
    ),
)
