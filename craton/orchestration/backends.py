"""Backends by name. Scheduler backends are imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, cast

from craton.orchestration.backend import Backend, is_elsewhere, read_submission
from craton.orchestration.errors import StartError
from craton.orchestration.node_maintenance import NodeService
from craton.telemetry import RunDirectory

if TYPE_CHECKING:
    from craton.job.cluster import SchedulerSettings


@cache
def backend_of(name: str) -> Backend:
    """Return the backend `local`, `slurm` or `kubernetes`."""
    if name == "local":
        from craton.orchestration.local import LocalBackend

        return LocalBackend()
    if name == "slurm":
        from craton.orchestration.slurm import SlurmBackend

        return SlurmBackend()
    if name == "kubernetes":
        from importlib import import_module

        return cast(Backend, import_module("craton.orchestration.kubernetes").KubernetesBackend())
    from craton.orchestration.draft import BACKENDS  # imports the job package, which quick verbs avoid

    raise StartError(f"{name!r} is not a backend; allowed: {', '.join(BACKENDS)}")


def backend_of_run(run: RunDirectory) -> Backend:
    """Return the backend that a run was submitted to."""
    return backend_of(read_submission(run).on)


def pod_lines(run: RunDirectory, follow: bool = False, tail: int | None = None) -> Iterator[tuple[str, str]] | None:
    """Yield (pod, line) for a run whose logs are not on this machine; None for any other run."""
    if not is_elsewhere(run):
        return None
    from craton.orchestration.kubernetes import KubernetesBackend

    return KubernetesBackend().logs(run, follow=follow, tail=tail)


def service_of(scheduler: SchedulerSettings) -> NodeService:
    """Return the node maintenance of a cluster's scheduler; StartError if it has neither Slurm nor Kubernetes."""
    if scheduler.kind == "slurm":
        from craton.orchestration.slurm import SlurmService

        return SlurmService(scheduler)
    if scheduler.kind == "kubernetes":
        from craton.orchestration.kubernetes import KubernetesService

        return KubernetesService(scheduler)
    raise StartError(
        f"cannot take nodes out of service with `scheduler: {{kind: {scheduler.kind}}}`; only slurm and kubernetes "
        "support it. Pass a run instead of the cluster to move that run off its bad node"
    )
