"""Step 2 of a start: where the job runs. The command line wins over the job, the job over its cluster file."""

from __future__ import annotations

from craton.job import Job
from craton.nearest import did_you_mean
from craton.orchestration.errors import StartError

BACKENDS = ("local", "slurm", "kubernetes")
KINDS = ("pretrain", "sft", "serve", "command")


def backend_name(job: Job, on: str | None) -> str:
    """Where the job runs: as asked on the command line, else by the job, else by its cluster file, else here."""
    scheduler = job.cluster.file.scheduler if job.cluster.file else None
    backend = on or job.run.on or (scheduler.kind if scheduler else "local")
    if backend not in BACKENDS:
        near = did_you_mean(backend, BACKENDS)
        raise StartError(f"--on {backend!r} is not a backend; allowed: {', '.join(BACKENDS)}{near}")
    return backend


def check_backend(job: Job, backend: str) -> None:
    """Refuse what no backend runs yet, and what is more than the one that was chosen."""
    if job.kind not in KINDS:
        raise StartError(f"{job.where('kind')}kind {job.kind} cannot be run yet; {', '.join(KINDS)} can")
    if backend == "local" and not job.cluster.is_local and job.cluster.num_nodes > 1:
        raise StartError(
            f"{job.where('cluster')}{job.cluster} is more than this machine; `--on slurm` or `--on kubernetes` runs it "
            "there, e.g. `cluster: local x 2` runs it here in small, `craton plan` plans it"
        )
