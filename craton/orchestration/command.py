"""How a job's own command is started: how many processes a node gets, where they run, and what they find there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from craton.frameworks import jax_environment
from craton.job import Job, starts_own_ranks
from craton.orchestration.snapshot import code_folder


def processes_of(job: Job, gpus_per_node: int) -> int:
    """Processes of a node: one for each of its GPUs, unless the job has a command of its own and says otherwise or
    that command starts its ranks itself."""
    if job.kind != "command":
        return gpus_per_node
    wanted = job.processes or ("node" if starts_own_ranks(job.command) else "gpu")
    if isinstance(wanted, int):
        return wanted
    return 1 if wanted == "node" else gpus_per_node


def command_environment(job: Job) -> dict[str, str]:
    """What a command finds beside torchrun's words and CRATON_*; placeholders in it are filled in by the agents."""
    return jax_environment() if job.kind == "command" else {}


def command_fields(job: Job, run: Path, num_nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """What a launch says of a job's own command; nothing for other jobs."""
    if job.kind != "command":
        return {}
    return {
        "gpus_per_node": gpus_per_node,
        "workdir": str(code_folder(run)),
        "exits_together": num_nodes * processes_of(job, gpus_per_node) > 1 or starts_own_ranks(job.command),
        "progress": job.progress.to_launch() if job.progress else {},
    }
