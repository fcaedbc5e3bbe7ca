"""Clusters on AWS, rendered from a cluster file: ParallelCluster, HyperPod, EKS and PCS; it creates nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.infrastructure.aws.provisioning import provision
    from craton.infrastructure.aws.scripts import EXPORTERS, SLURM_PAGES
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
