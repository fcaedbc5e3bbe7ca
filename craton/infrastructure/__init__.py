"""The hardware of a job: GPUs, instances, prices, clusters, storage; every number has a source and a date."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.infrastructure.accelerators import Accelerator, visible_accelerators
    from craton.infrastructure.cluster import (
        cluster_of,
        own_price,
        resized_cluster,
        resolve_cluster,
        with_measured_host,
    )
    from craton.infrastructure.errors import CatalogError, ProvisionError, StorageError, TopologyError
    from craton.infrastructure.hardware import (
        STALE_PRICE_DAYS,
        Cluster,
        CpuRank,
        Gpu,
        HostCosts,
        Instance,
        Price,
        StorageTier,
        price_age_days,
    )
    from craton.infrastructure.load import MachineLoad, load_text, usable_cores
    from craton.infrastructure.local import cache_path, free_memory_bytes, local_machine
    from craton.infrastructure.sharing import MEMORY_FRACTION, memory_fraction, nodes_per_gpu
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
