"""Machines as the planner sees them: GPUs, instances with prices, storage tiers, and clusters.

All rates are bytes or FLOPs per second in one direction, all sizes bytes: data-sheet units stay in the catalog.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Literal

PurchaseKind = Literal["on-demand", "capacity-block", "spot", "own"]
STALE_PRICE_DAYS = 90  # capacity blocks moved by up to 20% from one quarter to the next in 2026


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
