"""The cluster file, and the `cluster:` key of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.cluster.aws import Aws
    from craton.job.cluster.file import (
        ClusterFile,
        ClusterRef,
        ClusterSpec,
        GpuNumbers,
        HardwareNumbers,
        PriceNumbers,
        SchedulerKind,
        SchedulerSettings,
        Storage,
        StorageNumbers,
        load_cluster,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
