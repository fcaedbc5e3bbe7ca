"""The cluster itself on AWS, rendered from a cluster file: ParallelCluster, HyperPod, EKS and PCS."""

from craton.infrastructure.aws.prometheus import CONTROLLERS, SLURM_PAGES
from craton.infrastructure.aws.provisioning import Provisioning, provision
from craton.infrastructure.aws.scripts import EXPORTERS
from craton.infrastructure.aws.site import TARGETS

__all__ = ["CONTROLLERS", "EXPORTERS", "SLURM_PAGES", "TARGETS", "Provisioning", "provision"]
