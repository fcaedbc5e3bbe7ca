"""The hardware of a job: a catalog of GPUs, instances, prices and storage, and the clusters they form."""

from craton.infrastructure.accelerators import Accelerator, visible_accelerators
from craton.infrastructure.catalog import (
    KEYS,
    Catalog,
    Entry,
    Fact,
    Key,
    entry,
    gpu,
    gpus,
    instance,
    instances,
    load_catalog,
    user_catalog_path,
)
from craton.infrastructure.cluster import choose_price, cluster_of, own_price, resolve_cluster
from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import (
    STALE_PRICE_DAYS,
    Cluster,
    Gpu,
    Instance,
    Price,
    PurchaseKind,
    StorageTier,
    price_age_days,
)
from craton.infrastructure.local import (
    LocalMachine,
    cache_path,
    instance_of_machine,
    local_instance,
    local_machine,
)
from craton.infrastructure.microbenchmark import Measurement

__all__ = [
    "KEYS",
    "STALE_PRICE_DAYS",
    "Accelerator",
    "Catalog",
    "CatalogError",
    "Cluster",
    "Entry",
    "Fact",
    "Gpu",
    "Instance",
    "Key",
    "LocalMachine",
    "Measurement",
    "Price",
    "PurchaseKind",
    "StorageTier",
    "cache_path",
    "choose_price",
    "cluster_of",
    "entry",
    "gpu",
    "gpus",
    "instance",
    "instance_of_machine",
    "instances",
    "load_catalog",
    "local_instance",
    "local_machine",
    "own_price",
    "price_age_days",
    "resolve_cluster",
    "user_catalog_path",
    "visible_accelerators",
]
