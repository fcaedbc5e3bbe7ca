"""The self-tests as processes: `python -m craton.ml.selftest`, here or on the nodes of a Slurm cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from craton.agent import free_port
from craton.orchestration.errors import StartError

SELFTEST = "craton.ml.selftest"
COMPUTE_SECONDS, BANDWIDTH_SECONDS = 180.0, 180.0  # with the start of torch on a slow file system
CPU_RANKS = 4  # of a node without GPUs: two pairs


def run_compute(seconds: float | None = None) -> list[dict[str, Any]]:
    """Tests every device of this machine."""
    asked = [] if seconds is None else ["--seconds", str(seconds)]
    (found,) = _outputs([[sys.executable, "-m", SELFTEST, "compute", *asked]], [{}], COMPUTE_SECONDS)
    devices = found["devices"]
    assert isinstance(devices, list)
    return devices


def run_bandwidth(num_gpus: int, expected: float = 0.0) -> dict[str, Any]:
    """Pairs of this machine's GPUs, or of processes where it has none."""
    ranks, port = num_gpus or CPU_RANKS, free_port()
    command = [sys.executable, "-m", SELFTEST, "bandwidth", "--expected", str(expected)]
    places = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]
    return _outputs([command] * ranks, places, BANDWIDTH_SECONDS)[0]


def bandwidth_command(first_node: str, port: int, gpus_per_node: int, expected: float) -> list[str]:
    """One rank of every node, as srun starts it; the environment must name where they meet."""
    words = [sys.executable, "-m", SELFTEST, "bandwidth", "--unit-ranks", str(max(gpus_per_node, 1))]
    meeting = ["env", f"MASTER_ADDR={first_node}", f"MASTER_PORT={port}"]
    return [*meeting, *words, "--expected", str(expected)]


def _outputs(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], limit_seconds: float
) -> list[dict[str, Any]]:
    """What each process printed, as JSON; {} for one that prints nothing. None of them outlives this call."""
    end = time.monotonic() + limit_seconds
    with tempfile.TemporaryFile() as errors:
        started = []
        try:
            for command, environment in zip(commands, environments, strict=True):
                # A thread a rank is what a node with many ranks can take, and it makes results repeatable.
                surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
                started.append(
                    subprocess.Popen(
                        command, env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
                    )
                )
            texts = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in started]
        except subprocess.TimeoutExpired:
            raise StartError(
                f"the self-test did not end within {limit_seconds:.0f} s; look for a GPU that hangs"
            ) from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(process.returncode for process in started):
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            last = said[-1] if said else "it said nothing"
            raise StartError(f"the self-test failed: {last}; it needs torch (pip install craton[train])")
    return [json.loads(text) if text.strip() else {} for text in texts]
