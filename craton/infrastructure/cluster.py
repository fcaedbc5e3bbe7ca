"""Resolve the `cluster:` of a job to nodes, network, storage and price.

The user's values take precedence: a price in the job, then in the cluster file, then in the catalog; measured storage,
then the catalog's. Nothing is measured or queried over a network, except that `local` is measured once.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from craton.infrastructure.catalog import entry, gpu, instance
from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import Cluster, Gpu, Instance, Price, PurchaseKind
from craton.infrastructure.local import host_operation_seconds, local_instance
from craton.infrastructure.storage import tiers_of
from craton.job.cluster import ClusterFile, ClusterRef, GpuNumbers, HardwareNumbers, PriceNumbers
from craton.nearest import did_you_mean

GIGA = 1e9
PURCHASE_ORDER: tuple[PurchaseKind, ...] = ("own", "on-demand", "capacity-block", "spot")


def resolve_cluster(
    ref: ClusterRef,
    price: PriceNumbers | Price | None = None,
    purchase: PurchaseKind | None = None,
    *,
    share_gpus: bool = False,
) -> Cluster:
    """Return the cluster a job names; `price` is the job's own, `purchase` selects a kind among the listed prices.
    With `share_gpus`, nodes of this machine may share its GPUs."""
    file = ref.file
    num_nodes = ref.num_nodes
    if file is not None:
        num_nodes = min(num_nodes, file.nodes.num_nodes - file.spares)  # spares are part of the cluster's nodes
    node = node_of(ref, num_nodes, share_gpus)
    listed = tuple(own_price(stated) for stated in file.prices) if file else ()
    cluster = Cluster(
        name=cluster_name(node.name, num_nodes, file),
        instance=node,
        num_nodes=num_nodes,
        min_nodes=min(ref.min_nodes, num_nodes),
        tiers=tiers_of(node, num_nodes, file),
        price=own_price(price) if price else choose_price(listed or node.prices, purchase, node.name),
        scheduler="local" if node.name == "local" else "",
    )
    return _with_file(cluster, file) if file else cluster


def cluster_of(instance_name: str, num_nodes: int, purchase: PurchaseKind | None = None, **overrides: Any) -> Cluster:
    """Return `num_nodes` of a catalog instance; any field of Instance or Cluster may be overridden by name.

    `gpu` may be a catalog name. Changing the number of GPUs also changes an NVLink domain that was the whole node.
    """
    node = local_instance(num_nodes) if instance_name == "local" else instance(instance_name)
    node_fields, cluster_fields = ({field.name for field in fields(kind)} for kind in (Instance, Cluster))
    unknown = [name for name in overrides if name not in node_fields | cluster_fields]
    if unknown:
        allowed = sorted(node_fields | cluster_fields)
        raise TypeError(f"cluster_of() cannot override {unknown[0]!r}{did_you_mean(unknown[0], allowed)}")
    of_node = {name: value for name, value in overrides.items() if name in node_fields and name != "name"}
    if isinstance(of_node.get("gpu"), str):
        of_node["gpu"] = gpu(of_node["gpu"])
    if "num_gpus" in of_node and node.nvlink_domain_gpus == node.num_gpus:
        of_node.setdefault("nvlink_domain_gpus", of_node["num_gpus"])
    node = replace(node, **of_node)
    cluster = Cluster(
        name=cluster_name(node.name, num_nodes),
        instance=node,
        num_nodes=num_nodes,
        tiers=tiers_of(node, num_nodes),
        price=choose_price(node.prices, purchase, node.name),
        scheduler="local" if node.name == "local" else "",
    )
    return replace(cluster, **{name: value for name, value in overrides.items() if name in cluster_fields})


def resized_cluster(cluster: Cluster, num_nodes: int, file: ClusterFile | None = None) -> Cluster:
    """Return a fixed number of the same nodes; `file` is the cluster file that `cluster` was resolved from."""
    node = cluster.instance
    name, tiers = cluster_name(node.name, num_nodes, file), tiers_of(node, num_nodes, file)
    return replace(cluster, name=name, num_nodes=num_nodes, min_nodes=0, tiers=tiers)


def with_measured_host(cluster: Cluster) -> Cluster:
    """Return the cluster with the cost of an operation on its host, if its GPUs are those of this machine."""
    node = cluster.instance
    if node.name != "local" or node.gpu.generation == "cpu":
        return cluster
    return replace(cluster, instance=replace(node, gpu=replace(node.gpu, operation_seconds=host_operation_seconds())))


def choose_price(prices: tuple[Price, ...], purchase: PurchaseKind | None, machine: str) -> Price | None:
    """Return the user's own price, else on-demand, else capacity block, else spot; or the requested kind."""
    by_kind = {price.kind: price for price in prices}
    if purchase is not None:
        if purchase not in by_kind:
            kinds = ", ".join(by_kind) or "none"
            raise CatalogError(
                f"no {purchase} price is known for {machine}; listed: {kinds}; set it under `price:` in the job file"
            )
        return by_kind[purchase]
    return next((by_kind[kind] for kind in PURCHASE_ORDER if kind in by_kind), None)


def cluster_name(machine: str, num_nodes: int, file: ClusterFile | None = None) -> str:
    """`p5en.48xlarge x 16`, or with a cluster file `lab (p5en.48xlarge) x 14 + 2 spares`."""
    name = f"{file.name} ({machine})" if file else machine
    spares = f" + {file.spares} spare{'s' if file.spares > 1 else ''}" if file and file.spares else ""
    return f"{name} x {num_nodes}{spares}"


def node_of(ref: ClusterRef, num_nodes: int, share_gpus: bool = False) -> Instance:
    """Return one node: from the catalog, from this machine, or from the cluster file's own numbers."""
    file = ref.file
    if file is not None and file.hardware is not None:
        node = own_instance(file.hardware)
    elif ref.is_local:
        node = local_instance(num_nodes, share_gpus)
    else:
        node = instance(ref.instance)
    nvme = file.storage.nvme if file else None
    if nvme is None:
        return node
    drive = entry("storage", "nvme")  # own hardware with only a path is assumed to have one ordinary drive
    return replace(
        node,
        nvme_bytes=nvme.capacity_bytes or node.nvme_bytes,
        nvme_read_bytes_per_second=nvme.read_bytes_per_second
        or node.nvme_read_bytes_per_second
        or drive.number("drive_read_gigabytes_per_second") * GIGA,
        nvme_write_bytes_per_second=nvme.write_bytes_per_second
        or node.nvme_write_bytes_per_second
        or drive.number("drive_write_gigabytes_per_second") * GIGA,
    )


def own_instance(stated: HardwareNumbers) -> Instance:
    """Return an instance that is not in the catalog, from the user's numbers."""
    link = stated.host_link
    card = gpu(stated.gpu) if isinstance(stated.gpu, str) else own_gpu(stated.gpu)
    return Instance(
        name=stated.name,
        gpu=card,
        num_gpus=stated.num_gpus,
        nvlink_domain_gpus=stated.nvlink_domain_gpus or (stated.num_gpus if card.nvlink_bytes_per_second else 1),
        host_link=link,
        host_link_bytes_per_second=stated.host_link_bytes_per_second
        or entry("host_links", link).number("gigabytes_per_second") * GIGA,
        network_bytes_per_second=stated.network_bytes_per_second,
        network_interfaces=stated.network_interfaces or stated.num_gpus,
        efa_version=stated.efa_version,
        vcpus=stated.vcpus or 0,
        host_memory_bytes=stated.host_memory_bytes or 0.0,
        nvme_bytes=0.0,
        nvme_read_bytes_per_second=0.0,
        nvme_write_bytes_per_second=0.0,
    )


def own_gpu(stated: GpuNumbers) -> Gpu:
    return Gpu(
        name=stated.name,
        generation=stated.generation,
        flops={str(name): value for name, value in stated.flops.items()},
        achievable_flops={str(name): value for name, value in stated.achievable_flops.items()},
        memory_bytes=stated.memory_bytes,
        memory_bytes_per_second=stated.memory_bytes_per_second,
        nvlink_bytes_per_second=stated.nvlink_bytes_per_second or 0.0,
        power_watts=stated.power_watts or 0.0,
    )


def _with_file(cluster: Cluster, file: ClusterFile) -> Cluster:
    """Return the cluster with the levels, spares, scheduler and health that only a cluster file has."""
    leaf, spine = file.levels.leaf, file.levels.spine
    return replace(
        cluster,
        leaf_nodes=(leaf.nodes if leaf else None) or 0,
        spine_nodes=(spine.nodes if spine else None) or 0,
        spine_oversubscription=leaf.oversubscription if leaf else 1.0,
        spare_nodes=file.spares,
        failures_per_node_day=file.health.failures_per_node_day or cluster.failures_per_node_day,
        scheduler=file.scheduler.kind if file.scheduler else cluster.scheduler,
    )


def own_price(stated: PriceNumbers | Price) -> Price:
    """A price as the user states it."""
    if isinstance(stated, Price):
        return stated
    return Price(stated.dollars_per_hour, stated.kind, stated.date, source=stated.source or "your own")
