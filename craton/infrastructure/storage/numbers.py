"""Storage tiers of a cluster: peer memory, NVMe, a shared file system, an object store.

Numbers of the cluster file take precedence; the others come from the catalog, and `source` names the origin.
"""

from __future__ import annotations

from craton.formatting import percent
from craton.infrastructure.catalog import CatalogEntry, entry
from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import Instance, StorageTier
from craton.job.cluster import ClusterFile, StorageNumbers

MEGA, GIGA, TIB = 1e6, 1e9, 2.0**40
DEFAULT_SHARED = "fsx-persistent-2-1000"
DEFAULT_OBJECT = "s3"
PEER_MEMORY_SHARE = 0.5  # of host memory; the rest is for the job: loader, pinned buffers, page cache


def tiers_of(instance: Instance, num_nodes: int, file: ClusterFile | None = None) -> dict[str, StorageTier]:
    """Return every tier of this many nodes, fastest first; `instance` already has the cluster file's NVMe numbers."""
    stated = file.storage if file else None
    shared, object_store = (stated.shared, stated.object) if stated else (None, None)
    local = instance.name == "local"
    tiers = [peer_tier(instance, num_nodes)]
    if instance.nvme_read_bytes_per_second > 0:
        tiers.append(nvme_tier(instance, num_nodes, stated.nvme if stated else None))
    tiers.append(local_shared_tier(instance, num_nodes) if local and shared is None else shared_tier(instance, shared))
    tiers.append(object_tier(instance, num_nodes, object_store, "s3-from-outside" if local else DEFAULT_OBJECT))
    return {tier.name: tier for tier in tiers}


def peer_tier(instance: Instance, num_nodes: int) -> StorageTier:
    """Return the tier of another node's memory, over the share of the network that training leaves."""
    about = entry("storage", "peer")
    share = about.number("network_share")
    rate = instance.network_bytes_per_second * share
    return StorageTier(
        name="peer",
        kind="peer",
        read_bytes_per_second=rate * num_nodes,
        write_bytes_per_second=rate * num_nodes,
        client_read_bytes_per_second=rate,
        client_write_bytes_per_second=rate,
        capacity_bytes=instance.host_memory_bytes * PEER_MEMORY_SHARE * num_nodes,
        source=f"{percent(share)} of the network, {percent(PEER_MEMORY_SHARE)} of host memory (catalog, {about.name})",
    )


def nvme_tier(instance: Instance, num_nodes: int, stated: StorageNumbers | None) -> StorageTier:
    read, write = instance.nvme_read_bytes_per_second, instance.nvme_write_bytes_per_second
    measured = stated is not None and stated.read_bytes_per_second is not None
    return StorageTier(
        name="nvme",
        kind="nvme",
        read_bytes_per_second=read * num_nodes,
        write_bytes_per_second=write * num_nodes,
        client_read_bytes_per_second=read,
        client_write_bytes_per_second=write,
        capacity_bytes=instance.nvme_bytes * num_nodes,
        path=(stated.path if stated else None) or "",
        source="cluster file" if measured else f"catalog, {instance.name}",
    )


def shared_tier(instance: Instance, stated: StorageNumbers | None) -> StorageTier:
    """Return the cluster file's file system, or the default: FSx for Lustre, 1000 MB/s per TiB, at an assumed size."""
    stated = stated or StorageNumbers()
    about = entry("storage", DEFAULT_SHARED)
    capacity = stated.capacity_bytes or about.number("default_capacity_tib") * TIB
    if stated.read_bytes_per_second or stated.write_bytes_per_second:
        read = stated.read_bytes_per_second or stated.write_bytes_per_second or 0.0
        write = stated.write_bytes_per_second or stated.read_bytes_per_second or 0.0
        capacity, source = stated.capacity_bytes or 0.0, "cluster file"
    elif stated.kind not in (None, "lustre"):
        raise CatalogError(
            f"cluster file: storage.shared is {stated.kind}, for which the catalog has no rate; "
            "give read_bytes_per_second and write_bytes_per_second"
        )
    elif stated.megabytes_per_second_per_tib:
        read = write = stated.megabytes_per_second_per_tib * MEGA * capacity / TIB
        source = f"{stated.megabytes_per_second_per_tib:g} MB/s per TiB x {capacity / TIB:g} TiB (cluster file)"
    else:
        read = about.number("read_megabytes_per_second_per_tib") * MEGA * capacity / TIB
        write = about.number("write_megabytes_per_second_per_tib") * MEGA * capacity / TIB
        size = f"{capacity / TIB:g} TiB ({'cluster file' if stated.capacity_bytes else 'assumed'})"
        source = f"default {about.name} x {size}: set yours in the cluster file"
    return StorageTier(
        name="shared",
        kind=stated.kind or "lustre",
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        client_read_bytes_per_second=_client(instance, stated.client_read_bytes_per_second, about, "read"),
        client_write_bytes_per_second=_client(instance, stated.client_write_bytes_per_second, about, "write"),
        capacity_bytes=capacity,
        path=stated.path or "",
        source=source,
    )


def local_shared_tier(instance: Instance, num_nodes: int) -> StorageTier:
    """Return the shared tier of `local`: all nodes use the machine's disk."""
    read, write = instance.nvme_read_bytes_per_second * num_nodes, instance.nvme_write_bytes_per_second * num_nodes
    return StorageTier(
        name="shared",
        kind="nvme",
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        client_read_bytes_per_second=read,
        client_write_bytes_per_second=write,
        capacity_bytes=instance.nvme_bytes * num_nodes,
        source="this machine's disk, assumed rate",
    )


def object_tier(instance: Instance, num_nodes: int, stated: StorageNumbers | None, default: str) -> StorageTier:
    """Return the object tier. S3 scales with its clients: nodes x one node's rate, unless the cluster file says
    otherwise."""
    stated = stated or StorageNumbers()
    about = entry("storage", default)
    client_read = _client(instance, stated.client_read_bytes_per_second, about, "read")
    client_write = _client(instance, stated.client_write_bytes_per_second, about, "write")
    return StorageTier(
        name="object",
        kind=stated.kind or "s3",
        read_bytes_per_second=stated.read_bytes_per_second or client_read * num_nodes,
        write_bytes_per_second=stated.write_bytes_per_second or client_write * num_nodes,
        client_read_bytes_per_second=client_read,
        client_write_bytes_per_second=client_write,
        capacity_bytes=stated.capacity_bytes or 0.0,
        path=stated.path or "",
        source="cluster file"
        if stated.read_bytes_per_second
        else f"default {about.name}, per-node rate of the catalog",
    )


def _client(instance: Instance, stated: float | None, about: CatalogEntry, direction: str) -> float:
    """Return the rate of one node: as stated, else the catalog's limit; at most its network bandwidth."""
    rate = stated or about.number(f"client_{direction}_gigabytes_per_second") * GIGA
    return min(rate, instance.network_bytes_per_second) if instance.network_bytes_per_second else rate
