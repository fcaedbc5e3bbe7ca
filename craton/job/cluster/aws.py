"""The `aws:` section of a cluster file: what `craton cluster provision` needs in addition to the rest of the file.

Every key is optional; provisioning checks which keys a kind of cluster requires, all at once. The size of the shared
file system is set under `storage:`, queues and partitions under `scheduler:`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator

from craton.job.document import KeyConflictError, Section

_ROLE = r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+"


def _matching(pattern: str, description: str, example: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"{value!r} is not {description}; write e.g. {example}")
        return value

    return check


Region = Annotated[str, AfterValidator(_matching(r"[a-z]{2}(-[a-z]+)+-[0-9]", "a region", "us-east-2"))]
Zone = Annotated[str, AfterValidator(_matching(r"[a-z]{2}(-[a-z]+)+-[0-9](-[a-z0-9-]+)?[a-z]", "a zone", "us-east-2a"))]
Vpc = Annotated[str, AfterValidator(_matching(r"vpc-[0-9a-f]{8,17}", "a VPC", "vpc-0123456789abcdef0"))]
Subnet = Annotated[str, AfterValidator(_matching(r"subnet-[0-9a-f]{8,17}", "a subnet", "subnet-0123456789abcdef0"))]
SecurityGroup = Annotated[
    str, AfterValidator(_matching(r"sg-[0-9a-f]{8,17}", "a security group", "sg-0123456789abcdef0"))
]
Reservation = Annotated[
    str, AfterValidator(_matching(r"cr-[0-9a-z]+", "a capacity reservation or block", "cr-0123456789abcdef0"))
]
TrainingPlan = Annotated[
    str,
    AfterValidator(
        _matching(
            r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-plan/\S+",
            "a training plan",
            "arn:aws:sagemaker:us-east-2:111122223333:training-plan/p5-november",
        )
    ),
]
Bucket = Annotated[
    str,
    AfterValidator(
        _matching(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=/-]*)?", "an S3 URL", "s3://my-data")
    ),
]
Image = Annotated[str, AfterValidator(_matching(r"ami-[0-9a-f]{8,17}", "a machine image", "ami-0123456789abcdef0"))]
Role = Annotated[str, AfterValidator(_matching(_ROLE, "a role", "arn:aws:iam::111122223333:role/HyperPod"))]
RoleName = Annotated[
    str,
    AfterValidator(
        _matching(r"[A-Za-z0-9_+=,.@-]{1,64}", "the name of a role (not its ARN or path)", "KarpenterNodeRole-train")
    ),
]
EksCluster = Annotated[
    str,
    AfterValidator(
        _matching(
            r"arn:aws[a-z-]*:eks:[a-z0-9-]+:[0-9]{12}:cluster/[0-9A-Za-z][A-Za-z0-9_-]{0,99}",
            "an EKS cluster",
            "arn:aws:eks:us-east-2:111122223333:cluster/train",
        )
    ),
]
FileSystem = Annotated[str, AfterValidator(_matching(r"fs-[0-9a-f]{17}", "a file system", "fs-0123456789abcdef0"))]
MountName = Annotated[str, AfterValidator(_matching(r"[A-Za-z0-9_-]{1,8}", "a mount name", "fsx or abcdefgh"))]
KeyName = Annotated[str, AfterValidator(_matching(r"[\x21-\x7e]{1,255}", "the name of a key pair", "my-key"))]
MachineType = Annotated[
    str, AfterValidator(_matching(r"[a-z][a-z0-9-]*\.[a-z0-9]+", "an instance type", "m7i.4xlarge"))
]
Version = Annotated[str, AfterValidator(_matching(r"[0-9]+\.[0-9]+", "a version", '"1.34"'))]


class Aws(Section):
    """Network, capacity and roles of an AWS account."""

    region: Region | None = None
    zone: Zone | None = None  # zone of the nodes; a capacity block is in one zone
    vpc: Vpc | None = None
    subnet: Subnet | None = None  # of the nodes: private, in `zone`
    head_subnet: Subnet | None = None  # of head and login nodes; default: the nodes' subnet
    control_subnets: tuple[Subnet, ...] = ()  # EKS: of the control plane, in at least two zones
    security_groups: tuple[SecurityGroup, ...] = ()  # HyperPod: must allow all traffic among themselves, for EFA
    key_name: KeyName | None = None
    head_instance: MachineType = "m7i.4xlarge"  # of head, login and system nodes
    capacity_block: Reservation | None = None
    capacity_reservation: Reservation | None = None
    training_plan: TrainingPlan | None = None  # reserved capacity of HyperPod
    placement_group: str | None = None  # an existing one; default: create one, except for reserved capacity
    scripts: Bucket | None = None  # where setup scripts are uploaded for the nodes
    data: Bucket | None = None  # linked to the shared file system; default: the object tier of `storage:`
    file_system: FileSystem | None = None  # an existing FSx for Lustre; default: create one
    file_system_mount: MountName | None = None  # its MountName; required with file_system, except for ParallelCluster
    image: Image | None = None  # AMI of the nodes; ParallelCluster, HyperPod and EKS have defaults
    os: Literal["alinux2023", "ubuntu2204", "ubuntu2404"] = "ubuntu2404"  # ParallelCluster
    slurm_version: Version = "25.05"  # PCS
    kubernetes_version: Version = "1.34"
    execution_role: Role | None = None  # HyperPod
    karpenter_role: RoleName | None = None  # role name of Karpenter's nodes; default: KarpenterNodeRole-CLUSTER
    eks_cluster: EksCluster | None = None  # hyperpod-eks: the orchestrating EKS cluster
    package: str | None = None  # what pip installs on nodes: a wheel or a Git URL; default: the wheel under `scripts`
    network_cards: int | None = None  # of an instance type whose network cards Craton does not know

    @model_validator(mode="after")
    def _one_kind_of_capacity(self) -> Self:
        kinds = [key for key in ("capacity_block", "capacity_reservation", "training_plan") if getattr(self, key)]
        if len(kinds) > 1:
            raise KeyConflictError(
                f"aws: {' and '.join(kinds)} are alternative kinds of capacity; keep one", *((key,) for key in kinds)
            )
        if self.capacity_block and self.placement_group:
            raise KeyConflictError(
                "aws: EC2 places a capacity block itself, without a placement group; remove placement_group",
                ("placement_group",),
                ("capacity_block",),
            )
        if self.zone and self.region and not self.zone.startswith(self.region):
            raise KeyConflictError(f"aws: zone {self.zone} is not in region {self.region}", ("zone",), ("region",))
        return self
