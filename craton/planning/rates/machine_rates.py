"""Rates of a machine: of one GPU and of the links between GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from craton.infrastructure import Cluster, Gpu, Instance
from craton.infrastructure.catalog import gpu as catalog_gpu
from craton.planning.rates.collectives import (
    PCIE_BYTES_PER_SECOND,
    Group,
    Network,
    all_reduce_seconds,
    gloo_network,
    network,
)
from craton.planning.rates.kernels import GpuRates, gpu_rates

# Not measured: hosts of an H200 (Xeon, 16 cores, torch 2.11.0, Python 3.12) had 4.9 and 7.0 µs, 2026-11-18.
HOST_OPERATION_SECONDS = 6.0e-6
MAX_RATES = 256  # GPUs whose rates are kept: every plan of this machine's GPUs makes a new one


@dataclass(frozen=True, eq=False)
class MachineRates:
    gpu: Gpu
    rates: GpuRates
    network: Network
    node_gpus: int
    host_link: str = "pcie5"
    host_link_bytes_per_second: float = 50e9  # per GPU

    @property
    def near_link(self) -> str:
        """Between GPUs of one domain, which is the node where they have no NVLink."""
        return "NVLink" if self.gpu.nvlink_bytes_per_second else "PCIe"

    @property
    def far_link(self) -> str:
        """Between domains."""
        return "EFA" if self.network.efa_version else "the network"

    @property
    def domain_name(self) -> str:
        return "NVLink domain" if self.gpu.nvlink_bytes_per_second else "node"


@lru_cache(maxsize=256)
def machine(
    gpu_name: str,
    node_gpus: int,
    nvlink_domain: int,
    nic_bytes_per_second: float,
    efa_version: int,
) -> MachineRates:
    """Return a machine of catalog GPUs with a given network, as published runs describe it."""
    card = catalog_gpu(gpu_name)
    links = network(
        card.generation, card.nvlink_bytes_per_second, nvlink_domain, node_gpus, nic_bytes_per_second, efa_version
    )
    return MachineRates(card, rates_of(card), links, node_gpus)


def machine_of_ranks(card: Gpu, ranks: int) -> MachineRates:
    """Return a machine of these GPUs that are all of one NVLink domain."""
    links = network(card.generation, card.nvlink_bytes_per_second, ranks, ranks, PCIE_BYTES_PER_SECOND, 0)
    return MachineRates(card, rates_of(card), links, ranks)


def machine_of(cluster: Cluster) -> MachineRates:
    """Return the machine of a resolved cluster."""
    instance = cluster.instance
    links = network(
        instance.gpu.generation,
        instance.gpu.nvlink_bytes_per_second,
        instance.nvlink_domain_gpus,
        instance.num_gpus,
        instance.network_bytes_per_second / instance.num_gpus,
        instance.efa_version,
        cluster.leaf_nodes * instance.num_gpus,
        cluster.spine_oversubscription,
    )
    if instance.gpu.cpu is not None:
        links = gloo_network(links, instance.gpu.cpu)
    return MachineRates(
        instance.gpu,
        rates_of(instance.gpu),
        links,
        instance.num_gpus,
        instance.host_link,
        instance.host_link_bytes_per_second,
    )


_rates: dict[int, tuple[Gpu, GpuRates]] = {}


def rates_of(card: Gpu) -> GpuRates:
    """Return the rates of a GPU, cached: rates are compared by identity."""
    if id(card) not in _rates:
        operation = 0.0 if card.generation == "cpu" else card.operation_seconds or HOST_OPERATION_SECONDS
        rates = gpu_rates(
            card.generation, card.flops, card.achievable_flops, card.memory_bytes_per_second, card.cpu, operation
        )
        if len(_rates) >= MAX_RATES:
            _rates.pop(next(iter(_rates)))
        _rates[id(card)] = (card, rates)
    return _rates[id(card)][1]


def pair_bytes_per_second(instance: Instance, size_bytes: float, between_nodes: bool = True) -> float:
    """Return buffer bytes per second of an all-reduce among all GPUs of two nodes, or between two GPUs of one node. A
    pre-flight check compares its measurement with it; it comes from curves fitted to published runs, not the line
    rate."""
    links = machine_of(Cluster(name="pair", instance=instance, num_nodes=2)).network
    count = instance.num_gpus
    group = Group(2 * count, count, count) if between_nodes else Group(2, 2, 2)
    seconds = all_reduce_seconds(size_bytes, group, links)
    return size_bytes / seconds if seconds else 0.0
