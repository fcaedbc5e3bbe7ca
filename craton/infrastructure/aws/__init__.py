"""The cluster itself on AWS, rendered from a cluster file: ParallelCluster, HyperPod, EKS and PCS."""

from craton.infrastructure.aws.provisioning import Provisioning, provision
from craton.infrastructure.aws.scripts import EXPORTERS, SLURM_PAGES
from craton.infrastructure.aws.site import TARGETS

__all__ = ["EXPORTERS", "SLURM_PAGES", "TARGETS", "Provisioning", "provision"]
