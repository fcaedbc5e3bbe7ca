"""Checkpoint and data traffic: checkpoint size, write time, blocked time, restore time, and data throughput.

Guarantees: times are at the limits of the cluster (the goodput interval covers how far below them jobs stay); a larger
checkpoint is never faster, a faster link never slower; `warnings` names what does not fit.

A save is coordinated and copies each GPU's share to host memory over the host link; asynchronous saves block training
only for these two. The nodes then write their shares in parallel. Replicated state is written once, spread over all
ranks. A restart also reads it once: each rank of one replica reads its own shard and sends it to the other replicas
over the network.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from craton.errors import CratonError
from craton.formatting import bandwidth, stored
from craton.infrastructure import Cluster, StorageTier
from craton.planning.result import StoragePlan, TierPlan

TIERS = ("peer", "nvme", "shared", "object")  # fastest first
_OF_THE_NODES = ("peer", "nvme")  # every node has its own: the tier as a whole is not a limit
# Copies of the state that a tier must hold: the last complete one and the one being written; in peer memory also the
# two of the buddy node.
_SLOTS = {"peer": 4, "nvme": 2, "shared": 2, "object": 2}

WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0, "mxfp8": 2.0, "nvfp4": 2.0}
MASTER_BYTES = 4.0  # the fp32 copy the optimizer updates, kept beside narrower weights
OPTIMIZER_BYTES = {
    "adamw": 8.0,  # two fp32 moments
    "adam": 8.0,
    "adamw8bit": 2.0,
    "lion": 4.0,
    "muon": 4.0,
    "sgd": 4.0,  # momentum
    "adafactor": 0.0,  # rows and columns instead of a matrix: negligible
}


def checkpoint_bytes(
    parameters: float,
    precision: str = "bf16",
    optimizer: str = "adamw",
    lora_parameters: float = 0.0,
    *,
    weights: str = "fp32",
    both_widths: bool = True,
) -> float:
    """Return the bytes of one checkpoint: the weights as trained, their fp32 master copy and the optimizer states.

    14 bytes per parameter for bf16 with AdamW, 12 where a stack saves no 16-bit weights beside the fp32 ones
    (`both_widths`), 6 with `weights` bf16, which has no fp32 copy and states in bf16. With LoRA only the adapters are
    saved; frozen weights are loaded from their source (`frozen_bytes` of `storage_plan` adds them to the restart).
    """
    if precision not in WEIGHT_BYTES:
        raise CratonError(f"unknown precision {precision!r}; a checkpoint is sized for {', '.join(WEIGHT_BYTES)}")
    if optimizer not in OPTIMIZER_BYTES:
        raise CratonError(f"unknown optimizer {optimizer!r}; a checkpoint is sized for {', '.join(OPTIMIZER_BYTES)}")
    trained = lora_parameters or parameters
    narrow = WEIGHT_BYTES[precision]
    if weights == "bf16":
        return trained * (narrow + OPTIMIZER_BYTES[optimizer] / 2.0)
    if narrow < MASTER_BYTES:
        return trained * ((narrow if both_widths else 0.0) + MASTER_BYTES + OPTIMIZER_BYTES[optimizer])
    return trained * (narrow + OPTIMIZER_BYTES[optimizer])


def data_bytes_per_token(vocab: int) -> float:
    """Return bytes per token id: two if the vocabulary fits, else four."""
    return 2.0 if vocab <= 2**16 else 4.0


@cache
def recovery_facts() -> dict[str, Any]:
    """Return the table of failure, recovery and checkpoint constants, each with its source."""
    return tomllib.loads(resources.files(__package__).joinpath("recovery.toml").read_text(encoding="utf-8"))


def storage_plan(
    cluster: Cluster,
    num_nodes: int,
    state_bytes: float,
    every_seconds: Mapping[str, float],
    *,
    tokens_per_second: float,
    bytes_per_token: float = 4.0,
    data_tier: str = "",
    peer: bool = True,
    replicate: int = 1,
    asynchronous: bool = True,
    frozen_bytes: float = 0.0,
) -> StoragePlan:
    """Plan every tier of the cluster for a checkpoint of `state_bytes`, and compare the data stream with its limit.

    `every_seconds` has the job's checkpoint intervals by tier; other tiers are planned without one, for comparison.
    Warnings cover the tiers that the job uses, and peer memory unless `peer` is False. `data_tier` "" means the shared
    file system, else the object store, else NVMe.
    """
    unknown = [name for name in (*every_seconds, *([data_tier] if data_tier else [])) if name not in cluster.tiers]
    if unknown:
        raise CratonError(
            f"{cluster.name} has no storage tier {unknown[0]!r}; it has {', '.join(cluster.tiers) or 'none'}: "
            "add it to the cluster file or remove it from the job"
        )
    warnings: list[str] = []
    plans = []
    for name in TIERS:
        tier = cluster.tiers.get(name)
        if tier is None or (name == "peer" and num_nodes < 2):
            continue
        shortage = _shortage(cluster, tier, num_nodes, state_bytes)
        if shortage and (name in every_seconds or (name == "peer" and peer)):
            warnings.append(shortage)
        if shortage and name == "peer":
            continue
        plans.append(
            tier_plan(
                cluster, tier, num_nodes, state_bytes, every_seconds.get(name), replicate, asynchronous, frozen_bytes
            )
        )
    needed = tokens_per_second * bytes_per_token * (1.0 + recovery_facts()["storage"]["data_overhead_share"])
    source = data_tier or next((name for name in ("shared", "object", "nvme") if name in cluster.tiers), "")
    limit = _read_limit(cluster.tiers[source], num_nodes) if source else math.inf
    if needed > limit:
        warnings.append(
            f"the data needs {bandwidth(needed)} but {source} delivers {bandwidth(limit)}, so training waits: "
            "copy the data to a faster tier or buy throughput"
        )
    return StoragePlan(needed, source, limit, state_bytes, plans, warnings)


def tier_plan(
    cluster: Cluster,
    tier: StorageTier,
    num_nodes: int,
    state_bytes: float,
    every_seconds: float | None = None,
    replicate: int = 1,
    asynchronous: bool = True,
    frozen_bytes: float = 0.0,
) -> TierPlan:
    """Plan one checkpoint to one tier and back."""
    instance = cluster.instance
    num_gpus = num_nodes * instance.num_gpus
    facts = recovery_facts()["storage"]
    node_link = instance.host_link_bytes_per_second * instance.num_gpus * facts["host_link_efficiency"]

    overhead = facts["save_overhead_peer_seconds" if tier.name == "peer" else "save_overhead_seconds"]
    blocked = overhead + _seconds(state_bytes / num_nodes, node_link)
    write = blocked + _transfer_seconds(
        state_bytes, num_nodes, num_gpus, tier, tier.write_bytes_per_second, tier.client_write_bytes_per_second, "write"
    )

    # On NVMe or in a buddy's memory every node holds a share; from other tiers one replica reads for all.
    read_bytes = state_bytes + frozen_bytes
    readers = num_nodes if tier.name in _OF_THE_NODES else max(1, num_nodes // replicate)
    read = _transfer_seconds(
        read_bytes, readers, num_gpus, tier, tier.read_bytes_per_second, tier.client_read_bytes_per_second, "read"
    )
    holders = max(1, num_nodes // replicate)  # nodes that together hold one whole copy
    if replicate > 1 and num_nodes > 1:
        read += _seconds(read_bytes / holders, instance.network_bytes_per_second)
    read += _seconds(read_bytes / holders, node_link)
    return TierPlan(tier.name, every_seconds, write, blocked if asynchronous else write, read)


def _transfer_seconds(
    total_bytes: float, nodes: int, objects: int, tier: StorageTier, tier_rate: float, node_rate: float, way: str
) -> float:
    """Return the slowest of: the tier as a whole, one node's connection, and (S3) the request rate of one prefix."""
    seconds = _seconds(total_bytes / nodes, node_rate)
    if tier.name not in _OF_THE_NODES:
        seconds = max(seconds, _seconds(total_bytes, tier_rate))
    if tier.kind == "s3":
        service = recovery_facts()["object"]
        parts = objects * math.ceil(total_bytes / objects / service["part_bytes"])
        # a multipart upload also has a create and a complete request
        requests = parts + 2 * objects if way == "write" else parts
        seconds = max(seconds, requests / service[f"{way}_requests_per_second"])
    return seconds


def _read_limit(tier: StorageTier, num_nodes: int) -> float:
    """Return the read throughput of all nodes together from a tier."""
    nodes = num_nodes * tier.client_read_bytes_per_second or math.inf
    return nodes if tier.name in _OF_THE_NODES else min(nodes, tier.read_bytes_per_second or math.inf)


def _shortage(cluster: Cluster, tier: StorageTier, num_nodes: int, state_bytes: float) -> str:
    """Return a sentence if the checkpoints do not fit; empty if they do or if no capacity is stated."""
    if tier.name in _OF_THE_NODES:
        needed = _SLOTS[tier.name] * state_bytes / num_nodes
        capacity = tier.capacity_bytes / cluster.num_nodes
        where = "of a node's memory" if tier.name == "peer" else "on a node's NVMe"
    else:
        needed = _SLOTS[tier.name] * state_bytes
        capacity = tier.capacity_bytes
        where = f"on {tier.name}"
    if not needed > capacity > 0:
        return ""
    sizes = f"{stored(needed)} {where}, {stored(capacity)} are available"
    if tier.name == "peer":
        return f"planned without peer recovery: snapshots need {sizes}; use more nodes"
    return f"two checkpoints need {sizes}; {'use more nodes' if tier.name == 'nvme' else 'buy capacity'}"


def _seconds(size_bytes: float, bytes_per_second: float) -> float:
    return size_bytes / bytes_per_second if bytes_per_second > 0 else 0.0  # 0: the cluster states no limit
