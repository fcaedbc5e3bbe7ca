"""The cluster file, and the `cluster:` key of a job.

A cluster file describes a cluster once: its machines (a catalog name, or the measured numbers of hardware the catalog
does not have), network levels, storage, scheduler, prices, spares and health policy. Jobs refer to it.
craton.infrastructure resolves names in the catalog; this module checks only what is written.
"""

from __future__ import annotations

import datetime
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_serializer, model_validator

from craton.formatting import counted
from craton.job.cluster.aws import Aws
from craton.job.document import (
    Bytes,
    BytesPerSecond,
    Flops,
    KeyConflictError,
    Section,
    Size,
    Whole,
    parse_section,
    parse_share,
    read_document,
)

PurchaseKind = Literal["on-demand", "capacity-block", "spot", "own"]
FlopsKind = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
SchedulerKind = Literal["local", "slurm", "kubernetes"]
LEVELS = ("node", "leaf", "spine", "zone")

_NODES = re.compile(r"(?P<low>[0-9]+)(?:\.\.(?P<high>[0-9]+))?")
_REFERENCE = re.compile(r"(?P<name>\S+)(?:\s+[x×]\s+(?P<nodes>\S+))?")
_WORD = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_RESOURCE = re.compile(rf"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/{_WORD}")
_COUNTED = ("nvidia.com/gpu", "vpc.amazonaws.com/efa")  # resources derived from the instance type


class PriceNumbers(Section):
    """The price of one node; overrides the catalog's."""

    dollars_per_hour: Annotated[float, Field(gt=0)]
    kind: PurchaseKind = "own"
    date: datetime.date = Field(default_factory=lambda: datetime.date.today())
    source: str = ""


class GpuNumbers(Section):
    """A GPU that is not in the catalog; keys as in craton.infrastructure.Gpu."""

    name: str
    generation: Literal["ampere", "ada", "hopper", "blackwell", "blackwell-ultra", "cpu"]
    flops: dict[FlopsKind, Flops]  # dense peak
    achievable_flops: dict[FlopsKind, Flops] = Field(default_factory=dict)  # best measured matmul
    memory_bytes: Bytes
    memory_bytes_per_second: BytesPerSecond
    nvlink_bytes_per_second: BytesPerSecond | None = None
    power_watts: Annotated[float, Field(gt=0)] | None = None


class HardwareNumbers(Section):
    """A node type that is not in the catalog; keys as in craton.infrastructure.Instance."""

    name: str
    gpu: str | GpuNumbers  # a catalog name, or inline numbers
    num_gpus: Size
    nvlink_domain_gpus: Size | None = None  # default: all GPUs of the node
    host_link: Literal["pcie4", "pcie5", "pcie6", "c2c"] = "pcie5"
    host_link_bytes_per_second: BytesPerSecond | None = None  # per GPU
    network_bytes_per_second: BytesPerSecond  # per node, all interfaces together
    network_interfaces: Size | None = None  # default: one per GPU
    efa_version: Whole = 0
    vcpus: Size | None = None
    host_memory_bytes: Bytes | None = None

    @field_validator("gpu", mode="plain")
    @classmethod
    def _gpu_name_or_numbers(cls, value: object, info: ValidationInfo) -> str | GpuNumbers:
        if isinstance(value, dict):
            return GpuNumbers.parse(value, info)
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is not a GPU; give a catalog name or a mapping with its numbers")
        return value


class LevelNumbers(Section):
    """One level of the network: its number of nodes, and its name in the scheduler."""

    nodes: Size | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0  # 2.0: half the bandwidth leaves this level
    label: str | None = None  # Kubernetes node label
    switch: str | None = None  # Slurm switch name or prefix
    tier: Size | None = None  # of Volcano's HyperNodes; 1 is the closest


class Levels(Section):
    """Network levels, node < leaf < spine < zone: the names used by `placement`."""

    node: LevelNumbers | None = None
    leaf: LevelNumbers | None = None
    spine: LevelNumbers | None = None
    zone: LevelNumbers | None = None

    @model_validator(mode="after")
    def _levels_grow(self) -> Self:
        sizes = [(name, level.nodes) for name in LEVELS if (level := getattr(self, name)) and level.nodes]
        for (inner, inner_nodes), (outer, outer_nodes) in pairwise(sizes):
            if outer_nodes < inner_nodes:
                raise KeyConflictError(
                    f"levels: {outer} has {counted(outer_nodes, 'node')}, fewer than the {inner_nodes} of {inner} "
                    "inside it",
                    (outer, "nodes"),
                    (inner, "nodes"),
                )
        return self


class StorageNumbers(Section):
    """One storage tier: its path and measured throughput; omitted numbers come from the catalog."""

    path: str | None = None
    claim: str | None = None  # Kubernetes: the volume claim mounted at the path; None: a host path
    kind: Literal["nvme", "lustre", "nfs", "s3"] | None = None
    megabytes_per_second_per_tib: Annotated[float, Field(gt=0)] | None = None  # Lustre's throughput class
    capacity_bytes: Bytes | None = None
    read_bytes_per_second: BytesPerSecond | None = None  # the whole tier; for nvme one node
    write_bytes_per_second: BytesPerSecond | None = None
    client_read_bytes_per_second: BytesPerSecond | None = None  # one node
    client_write_bytes_per_second: BytesPerSecond | None = None

    @model_validator(mode="after")
    def _class_has_a_capacity(self) -> Self:
        if self.megabytes_per_second_per_tib and not self.capacity_bytes:
            raise KeyConflictError(
                "storage: megabytes_per_second_per_tib requires capacity_bytes; the throughput is their product",
                ("megabytes_per_second_per_tib",),
            )
        return self


class Storage(Section):
    """Storage for checkpoints and data, by the names of the checkpoint tiers."""

    nvme: StorageNumbers | None = None
    shared: StorageNumbers | None = None
    object: StorageNumbers | None = None


class SchedulerSettings(Section):
    """The scheduler, and the defaults of `run:`."""

    kind: SchedulerKind
    partition: str | None = None  # Slurm
    account: str | None = None  # Slurm
    qos: str | None = None  # Slurm
    block_nodes: Size | None = None  # Slurm with topology/block: nodes per block, to use `--segment`
    queue: str | None = None  # Kueue, Volcano or KAI
    namespace: str | None = None  # Kubernetes
    gang: Literal["kueue", "kai", "volcano", "none"] = "none"  # Kubernetes: the gang scheduler
    topology: str | None = None  # Kubernetes: name of the Topology object of Kueue or KAI
    priority: str | None = None  # Kubernetes: a priority class
    service_account: str | None = None  # Kubernetes
    non_root: bool = False  # Kubernetes: run pods as non-root, as required by the Pod Security Standard "restricted"
    node_pool: str | None = None  # Kubernetes: the Karpenter NodePool, if nodes are created on demand
    tolerations: tuple[str, ...] = ()  # Kubernetes: keys of the taints on GPU nodes
    # Kubernetes: further resources requested by each pod of a multi-node job, such as InfiniBand adapters, with counts
    resources: dict[str, Size] = Field(default={})
    image: str | None = None  # default container image of runs

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        of_slurm = ("partition", "account", "qos", "block_nodes")
        of_kubernetes = (
            *("queue", "namespace", "gang", "topology", "priority", "service_account", "node_pool", "tolerations"),
            *("resources", "non_root"),
        )
        foreign = {"slurm": of_kubernetes, "kubernetes": of_slurm}.get(self.kind, (*of_slurm, *of_kubernetes, "image"))
        for key in foreign:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise KeyConflictError(f"scheduler: {key} does not apply to {self.kind}; remove it", (key,), ("kind",))
        for name in self.resources:
            if name in _COUNTED:
                raise KeyConflictError(
                    f"scheduler.resources: {name} is derived from the instance type; remove it", ("resources", name)
                )
            if not _RESOURCE.fullmatch(name):
                raise KeyConflictError(
                    f"scheduler.resources: {name!r} is not a device plugin resource; write its full name, e.g. "
                    "rdma/hca_shared_devices_a: 1 (`kubectl describe node` lists them under Allocatable)",
                    ("resources", name),
                )
        return self


class Health(Section):
    """Failure rate of nodes, and what `craton heal` may do with a bad node."""

    failures_per_node_day: Annotated[float, Field(gt=0, lt=1)] | None = None
    policy: Literal["observe", "drain", "replace"] = "observe"
    heal: Literal["off", "advise", "act"] = "advise"  # mode of `craton heal`
    share: Annotated[float, BeforeValidator(parse_share)] = 0.1  # maximum share of nodes out of service


def parse_nodes(value: object) -> tuple[int, int]:
    """Parse `16` to (0, 16), and the elastic `2..8` to (2, 8)."""
    match = _NODES.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None:
        raise ValueError(f"{value!r} is not a number of nodes; write e.g. 16, or 2..8 for an elastic job")
    low, high = int(match["low"]), int(match["high"] or match["low"])
    if low < 1 or high < low:
        raise ValueError(f"{value!r} is not a number of nodes; write at least 1, the smaller number first")
    return (low if match["high"] and high > low else 0), high


class NodeCount(Section):
    """A number of nodes, or an elastic range."""

    min_nodes: int  # 0: not elastic
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.min_nodes}..{self.num_nodes}" if self.min_nodes else str(self.num_nodes)


def _parse_node_count(value: object) -> NodeCount:
    if isinstance(value, NodeCount):
        return value
    low, high = parse_nodes(value)
    return NodeCount(min_nodes=low, num_nodes=high)


class ClusterFile(Section):
    """A cluster on which jobs run."""

    name: str
    instance: str | None = None  # a catalog name
    hardware: HardwareNumbers | None = None  # or the numbers of your own machines
    nodes: Annotated[NodeCount, BeforeValidator(_parse_node_count)]
    levels: Levels = Levels()
    storage: Storage = Storage()
    scheduler: SchedulerSettings | None = None
    prices: tuple[PriceNumbers, ...] = ()
    spares: Whole = 0
    health: Health = Health()
    runs: str | None = None  # shared path or s3:// prefix of the run directories
    aws: Aws | None = None  # input of `craton cluster provision`

    @model_validator(mode="after")
    def _one_kind_of_machine(self) -> Self:
        if self.instance is None and self.hardware is None:
            raise KeyConflictError(
                "cluster: give `instance:` (a catalog name) or `hardware:` (the numbers of your machines)"
            )
        if self.instance is not None and self.hardware is not None:
            raise KeyConflictError(
                "cluster: instance and hardware are both given; keep one", ("instance",), ("hardware",)
            )
        if self.spares >= self.nodes.num_nodes:
            raise KeyConflictError(
                f"cluster: {counted(self.spares, 'spare')} of {self.nodes} nodes leave no working node; reduce spares",
                ("spares",),
            )
        return self

    @property
    def machine(self) -> str:
        """The catalog name, or the name of the hardware."""
        return self.instance or (self.hardware.name if self.hardware else "")


class ClusterRef(Section):
    """The `cluster:` key of a job, with cluster files resolved."""

    instance: str  # catalog name, "local", or the name of the cluster file's hardware
    num_nodes: int
    min_nodes: int = 0  # 0: not elastic
    file: ClusterFile | None = None

    @property
    def is_local(self) -> bool:
        return self.instance == "local"

    def __str__(self) -> str:
        nodes = f"{self.min_nodes}..{self.num_nodes}" if self.min_nodes else str(self.num_nodes)
        name = f"{self.file.name} ({self.instance})" if self.file else self.instance
        return f"{name} x {nodes}"

    @model_serializer
    def _as_written(self) -> object:
        if self.file is None:
            return str(self)
        written = {**self.file.model_dump(mode="json", exclude_none=True), "nodes": str(self.file.nodes)}
        nodes = NodeCount(min_nodes=self.min_nodes, num_nodes=self.num_nodes)
        return written if nodes == self.file.nodes else {**written, "take": str(nodes)}


def load_cluster(path: Path | str) -> ClusterFile:
    """Read and check a cluster file."""
    return parse_section(ClusterFile, read_document(path))


def parse_cluster(value: object, info: ValidationInfo) -> ClusterRef:
    """Parse `NAME x N`, `NAME x 2..8`, `local x N`, the path of a cluster file (`x N` uses a part of it), or a mapping.

    A mapping is an inline cluster file, where `take: N` corresponds to `x N` after a path.
    """
    if isinstance(value, ClusterRef):
        return value
    if isinstance(value, dict):
        file = ClusterFile.parse({key: item for key, item in value.items() if key != "take"}, info)
        return _part_of_cluster(file, value.get("take"), "the cluster")
    match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"{value!r} is not a cluster; write e.g. `p5en.48xlarge x 16`, `p5.48xlarge x 2..8`, `local x 2`, "
            "the path of a cluster file, or a mapping"
        )
    name = match["name"]
    if not name.endswith((".yaml", ".yml")) and "/" not in name:
        min_nodes, num_nodes = parse_nodes(match["nodes"] or "1")
        return ClusterRef(instance=name, num_nodes=num_nodes, min_nodes=min_nodes)
    file = load_cluster(Path((info.context or {}).get("folder", ".")) / Path(name).expanduser())
    return _part_of_cluster(file, match["nodes"], name)


ClusterSpec = Annotated[ClusterRef, BeforeValidator(parse_cluster)]


def _part_of_cluster(file: ClusterFile, nodes: object, name: str) -> ClusterRef:
    """Return some nodes of a cluster, or all if `nodes` is None."""
    min_nodes, num_nodes = parse_nodes(nodes) if nodes is not None else (file.nodes.min_nodes, file.nodes.num_nodes)
    if num_nodes > file.nodes.num_nodes:
        raise ValueError(f"{counted(num_nodes, 'node')} requested, but {name} has {file.nodes.num_nodes}")
    return ClusterRef(instance=file.machine, num_nodes=num_nodes, min_nodes=min_nodes, file=file)
