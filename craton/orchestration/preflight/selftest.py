"""Run the self-tests as processes: `python -m craton.ml.selftest`, here or on the nodes of a Slurm cluster.

A badly broken GPU hangs or kills the process that tests it. That is a finding like any other, and the results of the
other devices are kept.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from craton.agent.processes import free_port
from craton.extras import install_command
from craton.formatting import setting
from craton.orchestration.preflight.finding import PreflightFinding

SELFTEST = "craton.ml.selftest"
COMPUTE_SECONDS, BANDWIDTH_SECONDS = 180.0, 180.0  # includes importing torch from a slow file system
CPU_RANKS = 4  # of a node without GPUs: two pairs
SECRET_VARIABLE = "CRATON_SELFTEST_SECRET"  # authenticates ranks; never on a command line, which others see
NO_TORCH = 3  # exit code if torch cannot be imported


@dataclass(frozen=True)
class EndedSelftest:
    """The output of a self-test's processes, and why one of them failed."""

    printed: list[dict[str, Any]]  # JSON lines of all of them, in the order of the processes
    failure: str = ""
    lacks_torch: bool = False

    def finding(self, check: str, on: str = "") -> PreflightFinding:
        if self.lacks_torch:
            remedy = f"install torch in this environment: {install_command('train')}"
            return PreflightFinding("ML software", check, "fail", self.failure, remedy)
        remedy = "look for XIDs (`dmesg`), and exclude the node until it passes"
        return PreflightFinding("infrastructure", check, "fail", f"{self.failure}{on}", remedy)


def run_compute(
    seconds: float | None = None, limit_seconds: float = COMPUTE_SECONDS
) -> tuple[list[dict[str, Any]], list[PreflightFinding]]:
    """Test every device of this machine; return the results, and a finding for devices without one."""
    asked = [] if seconds is None else ["--seconds", str(seconds)]
    ended = run_processes([[sys.executable, "-m", SELFTEST, "compute", *asked]], [{}], limit_seconds)
    named = [name for line in ended.printed for name in line.get("devices", ())]
    devices = sorted(
        (line["result"] for line in ended.printed if "result" in line), key=lambda item: named.index(item["device"])
    )
    if not ended.failure:
        return devices, []
    left = [name for name in named if name not in {device["device"] for device in devices}]
    return devices, [ended.finding("compute", f"; without a result: {', '.join(left)}" if left else "")]


def run_bandwidth(num_gpus: int, expected: float = 0.0) -> tuple[dict[str, Any] | None, list[PreflightFinding]]:
    """Measure pairs of this machine's GPUs, or of processes without GPUs; None with a finding on failure."""
    ranks, port, secret = num_gpus or CPU_RANKS, free_port(), secrets.token_hex(32)
    command = [sys.executable, "-m", SELFTEST, "bandwidth", "--expected", str(expected)]
    places = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            SECRET_VARIABLE: secret,
        }
        for rank in range(ranks)
    ]
    ended = run_processes([command] * ranks, places, BANDWIDTH_SECONDS)
    if ended.failure or not ended.printed:
        return None, [ended.finding("bandwidth")]
    return ended.printed[0], []


def bandwidth_command(first_node: str, port: int, gpus_per_node: int, expected: float) -> list[str]:
    """Return the command of one rank, which srun starts on every node, with its rendezvous address."""
    words = [sys.executable, "-m", SELFTEST, "bandwidth", "--unit-ranks", str(max(gpus_per_node, 1))]
    meeting = ["env", f"MASTER_ADDR={first_node}", f"MASTER_PORT={port}"]
    return [*meeting, *words, "--expected", str(expected)]


def run_processes(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], limit_seconds: float
) -> EndedSelftest:
    """Run commands in parallel and collect their output until they end or the limit; kill the rest."""
    end = time.monotonic() + limit_seconds
    failure = ""
    with ExitStack() as files:
        errors = files.enter_context(tempfile.TemporaryFile())
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in commands]
        started = []
        try:
            for command, environment, output in zip(commands, environments, outputs, strict=True):
                # One thread per rank suits nodes with many ranks, and makes results repeatable.
                surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
                started.append(
                    subprocess.Popen(command, env=surroundings, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
                )
            for process in started:
                process.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            failure = f"the self-test did not end within {setting(limit_seconds)}"
        finally:
            for process in started:
                process.kill()
                process.wait()
        codes = [process.returncode for process in started]
        if not failure and any(codes):
            failure = f"the self-test {_ending(next(code for code in codes if code))}: {_last_line(errors)}"
        return EndedSelftest([line for output in outputs for line in _lines(output)], failure, NO_TORCH in codes)


def _ending(code: int) -> str:
    if code == NO_TORCH:
        return "could not start"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"


def _last_line(file: Any) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def _lines(file: Any) -> list[dict[str, Any]]:
    """Return complete lines only: the last line of a killed process may be truncated."""
    file.seek(0)
    whole = file.read().decode(errors="replace").rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole if line.startswith("{")]
