"""Backends by their names. Those of schedulers are imported when they are first needed."""

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
    """`local`, `slurm` or `kubernetes`."""
    if name == "local":
        from craton.orchestration.local import LocalBackend

        return LocalBackend()
    if name == "slurm":
        from craton.orchestration.slurm import SlurmBackend

        return SlurmBackend()
    if name == "kubernetes":
        from importlib import import_module

        return cast(Backend, import_module("craton.orchestration.kubernetes").KubernetesBackend())
    from craton.orchestration.draft import BACKENDS  # with a job behind it, which a quick verb need not import

    raise StartError(f"{name!r} is not a backend; allowed: {', '.join(BACKENDS)}")


def backend_of_run(run: RunDirectory) -> Backend:
    """The backend that a run was handed to."""
    return backend_of(read_submission(run).on)


def pod_lines(run: RunDirectory, follow: bool = False, tail: int | None = None) -> Iterator[tuple[str, str]] | None:
    """(pod, line) of a run whose logs are not in the directory that is seen here; None for any other."""
    if not is_elsewhere(run):
        return None
    from craton.orchestration.kubernetes import KubernetesBackend

    return KubernetesBackend().logs(run, follow=follow, tail=tail)


def service_of(scheduler: SchedulerSettings) -> NodeService:
    """StartError for a cluster whose nodes nobody schedules."""
    if scheduler.kind == "slurm":
        from craton.orchestration.slurm import SlurmService

        return SlurmService(scheduler)
    if scheduler.kind == "kubernetes":
        from craton.orchestration.kubernetes import KubernetesService

        return KubernetesService(scheduler)
    raise StartError(
        f"nodes of `scheduler: {{kind: {scheduler.kind}}}` cannot be taken out of service, only those of slurm and "
        "kubernetes; give a run instead of the cluster, and it is moved off its bad node"
    )
