"""The tables of GPUs, instances and storage services, and the way to a name in them."""

from craton.infrastructure.catalog.facts import KEYS, Catalog, CatalogEntry, Fact, Key, load_catalog, user_catalog_path
from craton.infrastructure.catalog.lookup import (
    entry,
    gpu,
    gpu_of_entry,
    gpus,
    instance,
    instance_of_entry,
    instances,
)

__all__ = [
    "KEYS",
    "Catalog",
    "CatalogEntry",
    "Fact",
    "Key",
    "entry",
    "gpu",
    "gpu_of_entry",
    "gpus",
    "instance",
    "instance_of_entry",
    "instances",
    "load_catalog",
    "user_catalog_path",
]
