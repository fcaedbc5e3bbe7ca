"""Time of collectives on a hierarchy of NVLink domain, node and leaf, from sizes and rates alone.

Sizes follow nccl-tests: `size_bytes` is the whole buffer (all-gather: the output, reduce-scatter: the input, both of
one rank; all-to-all: the buffer of one rank). Every time is launch + latency of the steps + pipelined transfer, of the
fastest algorithm that NCCL has for the operation; docs/collectives.md has the formulas and their accuracy.

Guarantees: pure functions of plain numbers; a group of one rank or an empty buffer costs nothing; more bytes, more
domains or less bandwidth never make a collective faster.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from math import sqrt

from craton.infrastructure import CpuRank

SWITCH_REDUCE_MIN_GPUS = 5  # NCCL uses NVLS from 5 (H200) or 6 (B200) GPUs on: stas00/ml-engineering network, 2026-08
PCIE_BYTES_PER_SECOND = 20e9  # PCIe 4 x16 as NCCL achieves it; for GPUs without NVLink


@dataclass(frozen=True, slots=True)
class Network:
    """Links of one kind of machine, in bytes per second and one direction, with the constants of their generation."""

    nvlink_bytes_per_second: float  # per GPU
    nvlink_domain: int  # GPUs
    node_gpus: int
    nic_bytes_per_second: float  # per GPU: the node's network divided by its GPUs
    leaf_gpus: int  # under one leaf switch; 0: not known
    oversubscription: float  # of the leaf's uplinks: 2.0 halves the bandwidth between leaves
    efa_version: int  # 0: not EFA
    nvls: bool  # the NVLink switch can reduce (NVLink 4 and later)
    nvlink_efficiency: float  # rings, of the line rate
    nvlink_pair_efficiency: float  # sends between pairs
    nvlink_switch_efficiency: float  # all-reduce in the switch: buffer bytes per second, of the line rate
    nvlink_latency_seconds: float  # per step of a ring
    nvlink_ramp_seconds: float  # of rings and pairs: messages below rate × this do not reach the full rate
    nvlink_switch_latency_seconds: float  # all-reduce in the switch, times the root of its ranks
    nvlink_launch_seconds: float  # every collective
    network_efficiency: float
    network_pair_efficiency: float
    network_tree_efficiency: float
    network_latency_seconds: float  # per step of a ring that leaves the domain
    network_ramp_seconds: float  # of pairs
    network_tree_latency_seconds: float  # per level of a tree
    network_peer_latency_seconds: float  # all-to-all, per rank in another domain


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective and their placement."""

    size: int
    per_domain: int  # ranks of this group inside one NVLink domain
    per_node: int
    spans_leaves: bool = False
    concurrent: int = 1  # groups that share a node's interfaces at the same time, this one included


def network(
    generation: str,
    nvlink_bytes_per_second: float,
    nvlink_domain: int,
    node_gpus: int,
    nic_bytes_per_second: float,
    efa_version: int,
    leaf_gpus: int = 0,
    oversubscription: float = 1.0,
) -> Network:
    """Return the rates of a machine with the constants of its GPU generation and its fabric.

    Without NVLink (rate 0 or a domain of one) PCIe is used. An unknown generation or a newer EFA gets the constants of
    the nearest one. CPUs use gloo, at the rate measured on their own network.
    """
    if generation == "cpu":
        nvlink_bytes_per_second, nvlink_domain = nvlink_bytes_per_second or nic_bytes_per_second, node_gpus
    elif nvlink_bytes_per_second <= 0 or nvlink_domain <= 1:
        generation, nvlink_bytes_per_second, nvlink_domain = "pcie", PCIE_BYTES_PER_SECOND, node_gpus
    inside = link_constants(generation)
    across = fabric_constants(efa_version) if generation != "cpu" else _table()["fabric"]["gloo"]
    return Network(
        nvlink_bytes_per_second=nvlink_bytes_per_second,
        nvlink_domain=nvlink_domain,
        node_gpus=node_gpus,
        nic_bytes_per_second=nic_bytes_per_second,
        leaf_gpus=leaf_gpus,
        oversubscription=oversubscription,
        efa_version=efa_version,
        nvls=inside["switch_efficiency"] > 0,
        **{f"nvlink_{name}": value for name, value in inside.items()},
        **{f"network_{name}": value for name, value in across.items()},
    )


def gloo_network(links: Network, cpu: CpuRank) -> Network:
    """Return the links between ranks of one machine as they were measured: a time per collective and a rate. A busy
    machine delays both."""
    slowdown = cpu.serial_slowdown
    rate = cpu.costs.collective_bytes_per_second / slowdown
    return replace(
        links,
        nvlink_bytes_per_second=rate,
        nic_bytes_per_second=rate,
        nvlink_efficiency=1.0,
        nvlink_pair_efficiency=1.0,
        nvlink_latency_seconds=0.0,
        nvlink_ramp_seconds=0.0,
        nvlink_launch_seconds=cpu.costs.collective_seconds * slowdown,
        network_efficiency=1.0,
        network_pair_efficiency=1.0,
        network_tree_efficiency=1.0,
        network_latency_seconds=0.0,
        network_ramp_seconds=0.0,
        network_tree_latency_seconds=0.0,
        network_peer_latency_seconds=0.0,
    )


def all_gather_seconds(size_bytes: float, group: Group, network: Network) -> float:
    """`size_bytes`: the gathered output of a rank; each rank contributes size_bytes / group.size."""
    return _ring_seconds(size_bytes, 1, group, network)


def reduce_scatter_seconds(size_bytes: float, group: Group, network: Network) -> float:
    """`size_bytes`: the input of a rank; each rank keeps size_bytes / group.size."""
    return _ring_seconds(size_bytes, 1, group, network)


def all_reduce_seconds(size_bytes: float, group: Group, network: Network) -> float:
    """`size_bytes`: the buffer of a rank, reduced in place."""
    size, local = group.size, min(group.per_domain, group.size)
    if size <= 1 or size_bytes <= 0:
        return 0.0
    ring = _ring_seconds(size_bytes, 2, group, network)
    switched = network.nvls and local >= SWITCH_REDUCE_MIN_GPUS
    if switched:
        inside = size_bytes / (network.nvlink_bytes_per_second * network.nvlink_switch_efficiency)
        latency = network.nvlink_switch_latency_seconds * sqrt(local)
    else:
        inside = 2.0 * (local - 1) / local * size_bytes
        inside /= network.nvlink_bytes_per_second * network.nvlink_efficiency
        latency = 2.0 * (local - 1) * network.nvlink_latency_seconds
    if size <= local:
        return min(ring, network.nvlink_launch_seconds + _pipelined(inside, latency)) if switched else ring
    levels = (-(-size // local) - 1).bit_length()
    # A double binary tree sends the buffer up and down once each; between two domains only once.
    wire = size_bytes * (1.0 if levels == 1 else 2.0)
    across = wire / (_domain_bytes_per_second(group, network) * network.network_tree_efficiency)
    latency += network.network_tree_latency_seconds * levels
    return min(ring, network.nvlink_launch_seconds + _pipelined(max(inside, across), latency))


def all_to_all_seconds(size_bytes: float, group: Group, network: Network) -> float:
    """`size_bytes`: the buffer of a rank before and after; it sends size_bytes / group.size to every rank."""
    size, local = group.size, min(group.per_domain, group.size)
    if size <= 1 or size_bytes <= 0:
        return 0.0
    inside = (size - 1) / size * size_bytes / (network.nvlink_bytes_per_second * network.nvlink_pair_efficiency)
    if size <= local:
        return network.nvlink_launch_seconds + _pipelined(inside, network.nvlink_ramp_seconds)
    remote = size - local
    # Every pair has its own connection: a rank's traffic stays on its own interface.
    rate = _domain_bytes_per_second(group, network) / local * network.network_pair_efficiency
    across = remote / size * size_bytes / rate
    latency = network.nvlink_launch_seconds + remote * network.network_peer_latency_seconds
    return latency + _pipelined(max(inside, across), network.network_ramp_seconds)


def broadcast_seconds(size_bytes: float, group: Group, network: Network) -> float:
    """`size_bytes`: the buffer of every rank afterwards; costs the same as an all-gather of that output."""
    return _ring_seconds(size_bytes, 1, group, network)


def point_to_point_seconds(size_bytes: float, same_domain: bool, network: Network) -> float:
    """One rank sends `size_bytes` to another, on its own interface if they are in different domains."""
    if size_bytes <= 0:
        return 0.0
    if same_domain:
        transfer = size_bytes / (network.nvlink_bytes_per_second * network.nvlink_pair_efficiency)
        return network.nvlink_launch_seconds + _pipelined(transfer, network.nvlink_ramp_seconds)
    transfer = size_bytes / (network.nic_bytes_per_second * network.network_pair_efficiency)
    return network.nvlink_launch_seconds + _pipelined(transfer, network.network_ramp_seconds)


def link_constants(generation: str) -> dict[str, float]:
    """Return the constants inside an NVLink domain by GPU generation."""
    table = _table()["nvlink"]
    nearest = "blackwell" if generation.startswith("blackwell") else "hopper"
    return table.get(generation, table[nearest])


def fabric_constants(efa_version: int) -> dict[str, float]:
    """Return the constants of the network between domains by EFA version; 0 is InfiniBand or RoCE."""
    table = _table()["fabric"]
    return table["infiniband"] if efa_version <= 0 else table[f"efa{min(efa_version, 4)}"]


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, dict[str, float]]]:
    loaded = tomllib.loads(resources.files(__package__).joinpath("network.toml").read_text())
    return {
        kind: {
            name: {key: float(value) for key, value in entry.items() if key != "source"}
            for name, entry in loaded[kind].items()
        }
        for kind in ("nvlink", "fabric")
    }


def _ring_seconds(size_bytes: float, passes: int, group: Group, network: Network) -> float:
    """Return the time of a ring: every rank forwards the buffer `passes` times, in size - 1 steps each."""
    size = group.size
    if size <= 1 or size_bytes <= 0:
        return 0.0
    wire = passes * (size - 1) / size * size_bytes
    rate = network.nvlink_bytes_per_second * network.nvlink_efficiency
    latency = (size - 1) * network.nvlink_latency_seconds
    if size > group.per_domain:
        domains = -(-size // group.per_domain)
        outside = _domain_bytes_per_second(group, network) * network.network_efficiency
        rate = outside if group.per_domain == 1 else min(rate, outside)
        inside_steps = size - domains
        latency = inside_steps * network.nvlink_latency_seconds + domains * network.network_latency_seconds
    return network.nvlink_launch_seconds + passes * latency + _pipelined(wire / rate, network.nvlink_ramp_seconds)


def _domain_bytes_per_second(group: Group, network: Network) -> float:
    """Return the bandwidth of this group out of one NVLink domain, over all interfaces it may use there."""
    per_node = min(group.per_node, group.per_domain)
    interfaces = min(float(per_node), network.node_gpus / group.concurrent) * (group.per_domain / per_node)
    shared = network.oversubscription if group.spans_leaves else 1.0
    return interfaces * network.nic_bytes_per_second / shared


def _pipelined(transfer: float, latency: float) -> float:
    """Return the time of a transfer in chunks of the best size on a path with this latency: (√latency + √transfer)²."""
    return latency + transfer + 2.0 * sqrt(latency * transfer)
