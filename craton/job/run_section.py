"""The sections `run:`, where and how the job is started, and `placement:`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from craton.job.cluster import SchedulerKind
from craton.job.document import KeyConflictError, Seconds, Section, Size, Variable, Whole, is_credential


def _text(value: object) -> object:
    """Convert numbers and booleans of an environment to text, as YAML writes them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_text)]


class Placement(Section):
    """How close together the nodes must be."""

    within: Literal["node", "leaf", "spine", "zone"]
    wait: Seconds | None = None  # how long to wait for such a placement before accepting any other; None: forever


# Checks of a node's equipment. Compute results are not among them: a wrong result can never be ignored.
PreflightCheck = Literal[
    "gpu_driver", "gpu_count", "gpu_model", "gpu_recovery", "gpu_memory", "gpu_row_remap", "gpu_throttle", "gpu_pcie",
    "nvlink", "nvlink_fabric", "xid", "efa_count", "efa_foreign_devices", "libfabric", "nccl_plugin", "infiniband",
    "gpudirect_rdma", "locked_memory", "environment", "nvme", "storage_nvme", "storage_shared", "lustre_network",
    "shared_memory", "known_bad", "torch",
]  # fmt: skip


class RunSection(Section):
    """Where and how the job is started; the cluster file supplies defaults."""

    on: SchedulerKind | None = None
    partition: str | None = None  # Slurm
    account: str | None = None  # Slurm
    qos: str | None = None  # Slurm
    gres: str | None = None  # Slurm: per node; default: gpu:N
    exclusive: bool = True  # Slurm: no other job on the nodes
    constraint: str | None = None  # Slurm: features that nodes must have
    reservation: str | None = None  # Slurm
    exclude: tuple[str, ...] = ()  # nodes to avoid
    queue: str | None = None  # Kueue, Volcano or KAI
    namespace: str | None = None  # Kubernetes
    priority: str | None = None  # Kubernetes: a priority class
    time_limit: Seconds | None = None
    save_before: Seconds = 600.0  # time before the time limit at which the job saves a checkpoint and is requeued
    restarts: Whole = 10  # restarts of the whole job that fail or make no progress; 0: never restart
    preflight: Literal["auto", "quick", "compute"] = (
        "auto"  # Slurm: compute adds a self-test of every device; auto: of GPUs
    )
    preflight_ignore: tuple[PreflightCheck, ...] = ()  # checks whose `fail` becomes a `warn`
    share_gpus: bool = False  # local: nodes share the GPUs of this machine if it has fewer GPUs than nodes
    copies: Size = 1  # runs of the same job, each with its own name and its number in CRATON_COPY; a job array on Slurm
    image: str | None = None
    env: dict[Variable, Text] = Field(default_factory=dict)
    secrets: tuple[Variable, ...] = ()  # names only; values come from the caller's environment, or the cluster's secret

    @model_validator(mode="after")
    def _secrets_are_not_written_down(self) -> Self:
        for name in self.secrets:
            if name in self.env:
                raise KeyConflictError(
                    f"run: {name} is both a secret and in env; remove it from env", ("env", name), ("secrets",)
                )
        for name, value in self.env.items():
            if is_credential(name, value):
                raise KeyConflictError(
                    f"run.env: {name} looks like a secret, but the job file is copied into every run, where others may "
                    f"read it; remove it, `export {name}=...` and write run: {{secrets: [{name}]}}",
                    ("env", name),
                )
        return self
