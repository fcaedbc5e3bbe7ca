"""Faults of servers, fourth set: left paused, a crashed worker, pointers instead of weights, a stopped checker of
grammars, a probe that kills too early."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request
from contextlib import suppress

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import child_with, program_path
from craton.bench.why.faults.running import RunningJob

MISLEADING = (r"drain the node|learning rate|gradient",)
CHECKER = ["craton.ml.serving.grammar.worker"]
PROBE_SECONDS = 1.5
POINTER = "version https://git-lfs.github.com/spec/v1\\noid sha256:{digest}\\nsize 4976698672\\n"
# Copy the model as `git clone` without Git LFS does: each file of weights is a text of three lines.
WITH_POINTERS = (
    "/bin/sh",
    "-c",
    "cp -r ../../../model ../cloned && for file in ../cloned/*.safetensors; do "
    f"printf '{POINTER.format(digest='9f' * 32)}' > $file; done && "
    'exec "$@"',
    "sh",
)


def _ask(job: RunningJob, mode: str, count: int) -> None:
    job.spawn([sys.executable, str(program_path("fourth_server")), job.url, mode, str(count)])


def _leave_paused(job: RunningJob) -> None:
    """Pause the engine, as a trainer does before it sends weights; the trainer dies and never resumes it."""
    _ask(job, "ask", 4)
    time.sleep(2)  # requests are under way
    key = job.run.admin_key_path.read_text().strip()
    request = urllib.request.Request(
        f"{job.url}/pause?mode=keep", method="POST", headers={"Authorization": f"Bearer {key}"}
    )
    urllib.request.urlopen(request, timeout=60).close()


def _stop_checker(job: RunningJob) -> None:
    """Stop the process that checks grammars, once requests with a schema have started it."""
    _ask(job, "schema", 4)
    _ask(job, "ask", 1)
    job.wait(lambda: _has_checker(job), "the server checks grammars")
    os.kill(child_with(job, CHECKER), signal.SIGSTOP)


def _has_checker(job: RunningJob) -> bool:
    with suppress(LookupError):
        return child_with(job, CHECKER) > 0
    return False


def _kill_before_ready(job: RunningJob) -> None:
    """Kill the engine PROBE_SECONDS after each of its starts, as a liveness probe without patience does."""
    over = threading.Event()
    job.undo.callback(over.set)

    def act() -> None:
        seen: dict[int, float] = {}
        while not over.wait(0.1):
            with suppress(LookupError, OSError, ValueError):
                pid = job.pid(0)
                if time.monotonic() - seen.setdefault(pid, time.monotonic()) >= PROBE_SECONDS:
                    os.kill(pid, signal.SIGKILL)

    threading.Thread(target=act, daemon=True).start()


FAULTS = (
    LiveFault(
        name="server-left-paused",
        family="server",
        summary="A trainer paused the server to send new weights and died; requests are accepted and wait for ever.",
        source="https://github.com/areal-project/AReaL/issues/1160",
        job=JobRecipe(kind="serve", nodes=1, keys={"serve": {"admin": True}}),
        inject=_leave_paused,
        expected=ExpectedVerdict(
            layers=("framework",),
            conditions=("hung", "slow", "waiting", "stopped"),
            ranks=None,
            remedy=(r"\bpaused?\b|/resume|is_paused",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="server-worker-crashes",
        family="server",
        summary="A kernel of the second worker of a tensor-parallel server divides by 0; SIGFPE ends the worker.",
        source="https://github.com/vllm-project/vllm/issues/4392",
        job=JobRecipe(kind="serve", nodes=1, keys={"layout": {"tp": 2}}),
        inject=lambda job: job.signal_rank(1, signal.SIGFPE),
        expected=ExpectedVerdict(
            layers=("framework", "host"),
            conditions=("dead",),
            ranks=frozenset({1}),
            remedy=(r"SIGFPE|floating[- ]point exception|signal 8\b|division|core dump|native",),
            misleading=MISLEADING,
        ),
        judge_seconds=25,
    ),
    LiveFault(
        name="server-pointers-instead-of-weights",
        family="server",
        summary="The model was cloned without Git LFS: its weight files are pointers of three lines.",
        source="https://github.com/microsoft/OmniParser/issues/34",
        job=JobRecipe(kind="serve", nodes=1, keys={"model": "{folder}/cloned"}, wrap=WITH_POINTERS),
        expected=ExpectedVerdict(
            layers=("framework", "storage"),
            conditions=("dead",),
            ranks=None,
            remedy=(r"safetensors|\bLFS\b|pointer|header|weights|corrupt|damaged|incomplete",),
            misleading=(*MISLEADING, r"network"),
        ),
        onset="start",
        judge_seconds=40,
    ),
    LiveFault(
        name="server-checker-of-grammars-stopped",
        family="server",
        summary="The process that checks JSON schemas is stopped; requests with a schema wait, others are answered.",
        source="https://github.com/vllm-project/vllm/issues/21148",
        job=JobRecipe(kind="serve", nodes=1),
        inject=_stop_checker,
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "slow", "healthy"),
            ranks=None,
            remedy=(r"stopped|SIGSTOP|SIGCONT|kill -CONT|grammar|checker|child",),
            misleading=MISLEADING,
        ),
        judge_seconds=30,
    ),
    LiveFault(
        name="server-killed-before-it-is-ready",
        family="server",
        summary="A liveness probe kills the engine 1.5 s after each start, before the model is loaded.",
        source="https://github.com/vllm-project/aibrix/issues/772",
        job=JobRecipe(kind="serve", nodes=1, keys={"recover": {"tries": 100}}),
        inject=_kill_before_ready,
        expected=ExpectedVerdict(
            layers=("host",),
            conditions=("starting", "slow", "dead"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(r"SIGKILL|killed|signal 9|restart|probe",),
            misleading=MISLEADING,
        ),
        onset="start",
        judge_seconds=40,
    ),
)
