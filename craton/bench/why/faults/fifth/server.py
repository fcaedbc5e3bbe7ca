"""Faults of servers, fifth set: an update without a sender, no weights after a sleep, a foreign configuration, scrapes
without a pause, a short queue."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.running import RunningJob

MISLEADING = (r"drain the node|learning rate|gradient",)
CLIENT = str(program_path("fifth_server"))
ADMIN_SECONDS = 60.0


def _client(job: RunningJob, mode: str, count: int, *more: str) -> None:
    job.spawn([sys.executable, CLIENT, job.url, mode, str(count), *more])


def _wait_for_weights(job: RunningJob) -> None:
    """Begin an update of the weights; the trainer that should send them has died."""
    _client(job, "ask", 4)
    time.sleep(2)  # requests are under way
    _client(job, "update", 1, str(job.run.admin_key_path))


def _wake_without_weights(job: RunningJob) -> None:
    """Free all memory of the server and allocate it again, without sending weights."""
    key = job.run.admin_key_path.read_text().strip()
    for path in ("sleep?level=2", "wake_up"):
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{job.url}/{path}", method="POST", headers=headers)
        urllib.request.urlopen(request, timeout=ADMIN_SECONDS).close()
    _client(job, "ask", 4)


def _change_configuration(job: RunningJob) -> None:
    """Copy the model, with the configuration of one that has more tokens."""
    folder = job.folder.parent / "extended"
    shutil.copytree(job.folder.parents[2] / "model", folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 640}))


def _scrape(job: RunningJob) -> None:
    """Read the metrics without a pause, as many monitoring agents with an interval of 0 do."""
    _client(job, "ask", 4)
    _client(job, "scrape", 32)


FAULTS = (
    LiveFault(
        name="server-waits-for-a-sender",
        family="server",
        summary="A server was asked to receive new weights, and the trainer that sends them died; no request goes on.",
        source="https://github.com/sgl-project/sglang/pull/5914",
        job=JobRecipe(kind="serve", nodes=1, keys={"serve": {"admin": True}}),
        inject=_wait_for_weights,
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "slow", "waiting", "stopped"),
            ranks=None,
            remedy=(r"update_weights|weights?\b|sender|trainer|no step",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="server-awake-without-weights",
        family="server",
        summary="A server was put to sleep at level 2 and woken up, but got no weights; it refuses every request.",
        source="https://github.com/vllm-project/vllm/issues/29341",
        job=JobRecipe(kind="serve", nodes=1, keys={"serve": {"admin": True}}),
        inject=_wake_without_weights,
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "wrong", "waiting", "stopped", "dead"),
            ranks=None,
            remedy=(r"without weights|update_weights|weights|wake_up|sleep",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="server-configuration-of-another-size",
        family="server",
        summary="The config.json of the model has 640 tokens, its weights have 512; the server cannot load them.",
        source="https://github.com/vllm-project/vllm/issues/15124",
        job=JobRecipe(kind="serve", nodes=1, keys={"model": "{folder}/extended"}, prepare=_change_configuration),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("dead",),
            ranks=None,
            remedy=(r"shape|size|vocab|config|weights|640|512",),
            misleading=(*MISLEADING, r"network"),
        ),
        onset="start",
        judge_seconds=40,
    ),
    LiveFault(
        name="server-scraped-without-pause",
        family="server",
        summary="Monitoring agents read /metrics without a pause; the front end is busy with them, and requests wait.",
        source="https://github.com/sgl-project/sglang/issues/28157",
        job=JobRecipe(kind="serve", nodes=1),
        inject=_scrape,
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("slow", "hung"),
            ranks=None,
            remedy=(r"metrics|scrap|front end|HTTP|event loop|\bCPUs?\b|cores?\b|monitor",),
            misleading=MISLEADING,
        ),
        judge_seconds=40,
        is_alone=True,
    ),
    LiveFault(
        name="server-queue-too-short",
        family="server",
        summary="The server runs one request and lets two wait; of 24 clients most get 429 again and again.",
        source="https://github.com/huggingface/text-generation-inference/issues/439",
        job=JobRecipe(kind="serve", nodes=1, keys={"serve": {"max_running": 1, "max_waiting": 2}}),
        inject=lambda job: _client(job, "ask", 24),
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("slow", "wrong", "waiting"),
            ranks=None,
            remedy=(r"\b429\b|max_waiting|max_running|queue|refus|reject|overload|more requests",),
            misleading=MISLEADING,
        ),
        judge_seconds=35,
    ),
)
