"""Machines as the planner sees them: GPUs, instances with prices, storage tiers, and clusters.

All rates are bytes or FLOPs per second in one direction, all sizes bytes: data-sheet units stay in the catalog.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from craton.infrastructure.load import IDLE, MachineLoad

PurchaseKind = Literal["on-demand", "capacity-block", "spot", "own"]
STALE_PRICE_DAYS = 90  # capacity blocks moved by up to 20% from one quarter to the next in 2026


@dataclass(frozen=True)
class HostCosts:
    """What an eager step costs on one thread of this machine's CPU besides its large matmuls, as measured."""

    operation_seconds: float  # one operation of a forward pass on a tiny tensor, views included
    backward_operation_seconds: float  # the same of a backward pass
    exponential_seconds: float  # one element of exp: softmax, silu
    matmul_element_seconds: float  # a matmul, on top of its FLOPs, per element of its operands and its result
    tensor_seconds: float  # the optimizer, per tensor
    loop_seconds: float  # rows of tokens, a few numbers, one record
    collective_seconds: float  # a small collective between two processes, gloo over loopback
    collective_bytes_per_second: float  # of a large one, sent by one rank


@dataclass(frozen=True)
class CpuRank:
    """The part of this machine's CPU that one rank gets, and what runs beside it now. Slowdowns are wall time over CPU
    time, also of more ranks than cores."""

    costs: HostCosts
    cores: int  # of the machine
    threads: int  # of this rank
    ranks: int = 1  # on this machine
    load: MachineLoad = IDLE

    @property
    def serial_slowdown(self) -> float:
        """Slowdown while every rank runs one thread."""
        return self.load.slowdown(self.ranks, 1, self.cores)

    @property
    def parallel_slowdown(self) -> float:
        """Slowdown while every rank runs all of its threads."""
        return self.load.slowdown(self.ranks, self.threads, self.cores)


@dataclass(frozen=True)
class Gpu:
    name: str
    generation: (
        str  # "volta", "ampere", "ada", "hopper", "blackwell", "blackwell-ultra", "cpu": the key of software priors
    )
    flops: dict[str, float]  # dense peak FLOP/s by "fp32", "fp16", "bf16", "fp8", "fp4"; absent: not supported
    achievable_flops: dict[str, float]  # best measured matmul, where one was published
    memory_bytes: float  # as the driver reports it
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float  # per GPU; 0: none
    power_watts: float
    # Host time to issue one operation of an eager step, in seconds, measured on a CPU tensor; 0: not measured.
    operation_seconds: float = 0.0
    cpu: CpuRank | None = None  # None: a GPU, or a CPU whose operations were not measured

    def peak_flops(self, precision: str) -> float:
        """Dense peak of the matrix unit for a precision, or of the nearest wider one the GPU has."""
        chain = {
            "nvfp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
            "mxfp8": ("fp8", "bf16", "fp16", "fp32"),
            "fp8": ("fp8", "bf16", "fp16", "fp32"),
            "bf16": ("bf16", "fp16", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
            "fp32": ("fp32", "bf16", "fp16"),
        }[precision]
        for name in chain:
            if self.flops.get(name):
                return self.flops[name]
        raise ValueError(f"{self.name} has no peak for {precision}: the catalog lists {', '.join(self.flops)}")


@dataclass(frozen=True)
class Price:
    dollars_per_hour: float  # one instance
    kind: PurchaseKind
    date: date
    region: str = ""
    source: str = ""
    note: str = ""


def price_age_days(price: Price, today: date) -> int:
    return max((today - price.date).days, 0)


@dataclass(frozen=True)
class Instance:
    name: str
    gpu: Gpu
    num_gpus: int
    nvlink_domain_gpus: int  # may span instances (UltraServer: 72) or be 1 (no NVLink)
    host_link: str  # "pcie3" to "pcie6", "c2c", "memory" (a CPU)
    host_link_bytes_per_second: float  # per GPU
    network_bytes_per_second: float  # per instance, all interfaces together
    network_interfaces: int
    efa_version: int  # 0: not EFA
    vcpus: int
    host_memory_bytes: float
    nvme_bytes: float
    nvme_read_bytes_per_second: float
    nvme_write_bytes_per_second: float
    prices: tuple[Price, ...] = ()
    notes: tuple[str, ...] = ()
    nodes_per_gpu: int = 1  # above 1: nodes share a GPU, and `gpu` is the part of one


@dataclass(frozen=True)
class StorageTier:
    name: str  # "nvme", "shared", "object", "peer"
    kind: str  # "nvme", "lustre", "s3", "peer"
    read_bytes_per_second: float  # the whole tier
    write_bytes_per_second: float
    client_read_bytes_per_second: float  # one node
    client_write_bytes_per_second: float
    capacity_bytes: float = 0.0  # 0: not stated
    path: str = ""
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """Nodes, network, storage and price of the cluster where a job would run."""

    name: str
    instance: Instance
    num_nodes: int
    min_nodes: int = 0  # 0: not elastic
    leaf_nodes: int = 0  # nodes under one leaf switch; 0: not known
    spine_nodes: int = 0
    spine_oversubscription: float = 1.0  # leaf uplink: 2.0 halves the bandwidth between leaves
    tiers: dict[str, StorageTier] = field(default_factory=dict)
    price: Price | None = None
    spare_nodes: int = 0
    failures_per_node_day: float = 3.8e-3
    scheduler: str = "local"

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.instance.num_gpus
