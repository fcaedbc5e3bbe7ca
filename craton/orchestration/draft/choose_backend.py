"""Step 2 of a start: choose the backend, from the command line, else the job, else its cluster file."""

from __future__ import annotations

from craton.job import Job, sharing_problem
from craton.nearest import did_you_mean
from craton.orchestration.errors import StartError

BACKENDS = ("local", "slurm", "kubernetes")


def backend_name(job: Job, on: str | None) -> str:
    """Return the job's backend: from the command line, else the job, else its cluster file, else `local`."""
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    backend = on or job.run.on or (scheduler.kind if scheduler else "local")
    if backend not in BACKENDS:
        near = did_you_mean(backend, BACKENDS)
        raise StartError(f"--on {backend!r} is not a backend; allowed: {', '.join(BACKENDS)}{near}")
    return backend


def check_backend(job: Job, backend: str) -> None:
    """Refuse clusters larger than the machine on `local`, and GPUs shared elsewhere."""
    if backend == "local" and not job.cluster.is_local and job.cluster.num_nodes > 1:
        raise StartError(
            f"{job.where('cluster')}{job.cluster} is more than this machine has; run it on a cluster with `--on slurm` "
            "or `--on kubernetes`, run it here in small with e.g. `cluster: local x 2`, or plan it with `craton plan`"
        )
    if job.run.share_gpus and (problem := sharing_problem(job.kind, job.cluster, backend)):
        raise StartError(f"{job.where('run', 'share_gpus')}{problem}")
