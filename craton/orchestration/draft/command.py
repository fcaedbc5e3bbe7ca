"""How a job of kind `command` starts: processes per node, working directory, and environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from craton.frameworks import jax_environment
from craton.job import Job
from craton.job.sections import named_launcher, processes_per_node
from craton.orchestration.draft.code_archive import code_folder
from craton.orchestration.errors import StartError


def processes_of(job: Job, gpus_per_node: int) -> int:
    """Return the processes per node: one per GPU, unless the job's command sets another number or starts its ranks
    itself."""
    if job.kind != "command":
        return gpus_per_node
    return processes_per_node(job.command, job.processes, gpus_per_node)


def command_environment(job: Job, gpus_per_node: int) -> dict[str, str]:
    """Return a command's environment besides torchrun's variables and CRATON_*; the agents fill in placeholders."""
    if job.kind != "command":
        return {}
    return jax_environment(one_gpu_each=1 < gpus_per_node == processes_of(job, gpus_per_node))


def command_fields(job: Job, run: Path, num_nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Return the launch fields of a job's own command; empty for other jobs."""
    if job.kind != "command":
        return {}
    per_node = processes_of(job, gpus_per_node)
    fewest = (job.cluster.min_nodes or num_nodes) * per_node
    if job.progress and (problem := job.progress.rank_problem(fewest)):
        raise StartError(f"{job.where('progress', 'rank')}{problem}")
    return {
        "gpus_per_node": gpus_per_node,
        "workdir": str(code_folder(run)),
        "exits_together": num_nodes * per_node > 1 or named_launcher(job.command) is not None,
        "progress": job.progress.to_launch() if job.progress else {},
    }
