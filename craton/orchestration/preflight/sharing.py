"""Pre-flight of nodes that share a GPU: whether CUDA's Multi-Process Service (MPS) lets their kernels overlap.

MPS is used, never started: its daemon belongs to the machine and outlives a run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from craton.agent import Launch
from craton.orchestration.preflight.finding import PreflightFinding
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

CHECK = "gpu_sharing"
CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE, PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # CUDA's default
QUESTION = "get_default_active_thread_percentage\n"  # any question: only a daemon that runs answers
ANSWER_SECONDS = 5.0


def check_sharing(launch: Launch, environment: Mapping[str, str]) -> list[PreflightFinding]:
    """Report how the nodes of a launch share GPUs; nothing if each has its own."""
    if launch.nodes_per_gpu == 1:
        return []
    place = pipe_directory(environment)
    if mps_runs(environment):
        evidence, remedy = f"MPS: its daemon runs ({place}), kernels of ranks overlap", ""
    else:
        evidence = f"time-sliced: ranks take turns (no MPS daemon at {place})"
        remedy = f"start `{CONTROL} -d` to let kernels overlap, unless you kill ranks on purpose (docs/share-gpus.md)"
    return [PreflightFinding("infrastructure", CHECK, "note", evidence, remedy)]


def mps_runs(environment: Mapping[str, str]) -> bool:
    """Whether the MPS daemon answers that processes with this environment would use."""
    program = shutil.which(CONTROL, path=environment.get("PATH", ""))
    if program is None or not pipe_directory(environment).is_dir():
        return False
    try:
        answer = subprocess.run(
            [program],
            input=QUESTION,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def pipe_directory(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(PIPE_VARIABLE) or PIPE_DIRECTORY)


def sharing_found(run: RunDirectory, node: str) -> str:
    """Return what the newest pre-flight of a node found about shared GPUs, with what to do; "" if nothing."""
    events = [line for line in read_lines(run.events_path(node))[0] if line.get("event") == "preflight"]
    for finding in events[-1].get("findings", ()) if events else ():
        if finding["what"] == CHECK:
            return "; ".join(filter(None, [finding["evidence"], finding["remedy"]]))
    return ""
