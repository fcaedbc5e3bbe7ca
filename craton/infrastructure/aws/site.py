"""Common input of every kind of AWS cluster: the cluster file, the instance, and the shared file system.

`site_of` rejects a file that lacks something for the requested kind and lists everything missing at once. Changes it
makes (a capacity rounded up to a size that FSx sells) are in `notes`.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, get_args

from craton.infrastructure.catalog import instance as catalog_instance
from craton.infrastructure.errors import CatalogError, ProvisionError
from craton.infrastructure.hardware import Instance
from craton.job.cluster import Aws, ClusterFile
from craton.nearest import did_you_mean

Target = Literal["parallelcluster", "hyperpod-slurm", "hyperpod-eks", "eks", "pcs"]
TARGETS: tuple[str, ...] = get_args(Target)
SLURM_TARGETS = ("parallelcluster", "hyperpod-slurm", "pcs")
NEEDED: dict[str, tuple[str, ...]] = {
    "parallelcluster": ("region", "subnet", "key_name", "scripts"),
    "hyperpod-slurm": ("region", "subnet", "security_groups", "execution_role", "scripts"),
    "hyperpod-eks": ("region", "subnet", "security_groups", "execution_role", "eks_cluster", "scripts"),
    "eks": ("region", "zone", "vpc", "subnet", "control_subnets"),
    "pcs": ("region", "vpc", "subnet", "image", "scripts"),
}
GIB, TIB = 2.0**30, 2.0**40
MOUNT = re.compile(r"/[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{2,39}")
_WORD = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class FsxLustre:
    """The shared file system: a new one, or an existing one."""

    path: str
    capacity_gib: int
    megabytes_per_second_per_tib: int
    efa: bool
    data: str  # the S3 prefix linked to it; "": none
    file_system: str = ""  # "": create a new one
    mount_name: str = ""


@dataclass(frozen=True)
class AwsSite:
    """Validated input of the emitters."""

    file: ClusterFile
    aws: Aws
    instance: Instance
    lustre: FsxLustre
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def num_nodes(self) -> int:
        return self.file.nodes.num_nodes

    @property
    def region(self) -> str:
        return self.aws.region or ""

    @property
    def scripts(self) -> str:
        """S3 prefix of the scripts that nodes fetch, without a trailing slash."""
        return (self.aws.scripts or "").rstrip("/")

    @property
    def queue(self) -> str:
        """Partition or queue of the cluster file, else the name of the instance family."""
        scheduler = self.file.scheduler
        return (scheduler and (scheduler.partition or scheduler.queue)) or self.instance.name.split(".")[0]

    @property
    def namespace(self) -> str:
        return (self.file.scheduler and self.file.scheduler.namespace) or "train"

    @property
    def node_pool(self) -> str:
        """Karpenter's node pool; "": nodes are created with the cluster."""
        return (self.file.scheduler and self.file.scheduler.node_pool) or ""

    @property
    def own_placement_group(self) -> bool:
        """Whether to create a placement group. EC2 places capacity blocks itself, HyperPod all its nodes, and a
        reservation accepts only instances of its own placement group, or of none."""
        return not (self.aws.capacity_block or self.aws.capacity_reservation or self.aws.placement_group)


def site_of(file: ClusterFile, target: str) -> AwsSite:
    """Return the site, or raise ProvisionError with everything that is missing or wrong for `target`."""
    if target not in TARGETS:
        raise ProvisionError([f"--for {target}: unknown; allowed: {', '.join(TARGETS)}{did_you_mean(target, TARGETS)}"])
    aws = file.aws or Aws()
    problems = [f"aws.{key} is missing: {target} needs {_WHAT[key]}" for key in NEEDED[target] if not getattr(aws, key)]
    if target == "eks" and len(aws.control_subnets) == 1:
        problems.append("aws.control_subnets has one subnet: EKS needs two, in different zones")
    if target in ("parallelcluster", "pcs", "eks") and aws.training_plan:
        problems.append(
            f"aws.training_plan is only for HyperPod; for {target} use capacity_block or capacity_reservation"
        )
    if target.startswith("hyperpod") and (aws.capacity_block or aws.capacity_reservation):
        problems.append(
            "aws: HyperPod takes reserved capacity as training_plan, not as a capacity block or reservation"
        )
    most = facts()["pcs_sizes"]["LARGE"] - 1
    if target == "pcs" and file.nodes.num_nodes > most:
        problems.append(f"nodes is {file.nodes}: PCS manages at most {most} plus a login node")
    problems += [*_names(file, target), *_not_made(file, target)]
    instance: Instance | None = None
    lustre: FsxLustre | None = None
    notes: list[str] = []
    if file.hardware is not None:
        problems.append(f"hardware: own machines cannot be provisioned on AWS; {target} needs `instance:`")
    else:
        try:
            instance = catalog_instance(file.instance or "")
        except CatalogError as error:
            problems.append(f"instance: {error}")
        if instance and instance.name.startswith("u-"):
            problems.append(
                f"instance: {instance.name} is an UltraServer of several instances; it cannot be provisioned yet"
            )
    kind = file.scheduler.kind if file.scheduler else None
    wanted = "slurm" if target in SLURM_TARGETS else "kubernetes"
    if kind not in (None, wanted):
        problems.append(f"scheduler.kind is {kind}: {target} is a {wanted} cluster")
    outcome = _lustre(file, aws, instance, target)
    if isinstance(outcome, list):
        problems += outcome
    else:
        lustre, notes = outcome
    if problems:
        raise ProvisionError([f"{file.name}: {problem}" for problem in problems])
    assert instance is not None
    assert lustre is not None
    if aws.capacity_block and file.scheduler and file.nodes.min_nodes:
        notes.append("a capacity block is billed as a whole: all its nodes are kept, whatever the minimum is")
    return AwsSite(file, aws, instance, lustre, tuple(notes))


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """Return the values of facts.toml, without sources and dates."""
    loaded = tomllib.loads(resources.files("craton.infrastructure.aws").joinpath("facts.toml").read_text())

    def values(table: Any) -> Any:
        if isinstance(table, dict):
            return table["value"] if "value" in table else {key: values(entry) for key, entry in table.items()}
        return table

    return {key: values(table) for key, table in loaded.items() if key != "sources"}


_WHAT = {
    "region": "the region, e.g. us-east-2",
    "zone": "the zone of the nodes, e.g. us-east-2a",
    "vpc": "the VPC, vpc-…",
    "subnet": "the nodes' private subnet, subnet-…",
    "control_subnets": "two subnets in different zones for the control plane",
    "security_groups": "a security group that allows all traffic within itself, sg-… (EFA requires it)",
    "key_name": "an EC2 key pair, to reach the head node",
    "scripts": "an S3 prefix for set-up scripts, s3://…",
    "execution_role": "the role of the nodes, arn:aws:iam::…:role/…",
    "eks_cluster": "the EKS cluster that orchestrates, arn:aws:eks:…",
    "image": "a machine image with Slurm's agent, ami-… (AWS publishes PCS sample images)",
}


def _names(file: ClusterFile, target: str) -> list[str]:
    """Check names and paths, which scripts, stacks and Kubernetes use: letters, digits and dashes only."""
    problems = []
    if not _NAME.fullmatch(file.name):
        problems.append("name: use 3 to 40 letters, digits and '-', a letter first: stacks and clusters get this name")
    scheduler = file.scheduler
    for key in ("partition", "queue", "namespace", "node_pool", "topology", "priority"):
        value = getattr(scheduler, key) if scheduler else None
        if value is not None and not _WORD.fullmatch(value):
            problems.append(f"scheduler.{key}: {value!r} is not a valid name; use lowercase letters, digits and '-'")
    nvme = file.storage.nvme
    if nvme and nvme.path and not MOUNT.fullmatch(nvme.path):
        problems.append(f"storage.nvme.path: {nvme.path!r} is not a plain absolute path")
    if target == "pcs" and scheduler and scheduler.partition and not 3 <= len(scheduler.partition) <= 25:
        problems.append("scheduler.partition: PCS takes names of 3 to 25 letters")
    return problems


def _not_made(file: ClusterFile, target: str) -> list[str]:
    """Return problems with keys that jobs rely on, but that this kind of cluster does not provide."""
    problems = []
    nvme, scheduler = file.storage.nvme, file.scheduler
    drives = facts()["nvme_paths"].get(target)
    if drives and nvme and nvme.path and not nvme.claim and nvme.path.rstrip("/") != drives:
        problems.append(
            f"storage.nvme.path is {nvme.path}: nodes of {target} mount their drives at {drives}; use that path"
        )
    if target == "hyperpod-eks" and scheduler and scheduler.node_pool:
        problems.append(
            "scheduler.node_pool: HyperPod creates the nodes without the Karpenter pool label that pods would require; "
            "remove it"
        )
    if target == "eks" and scheduler and scheduler.node_pool and scheduler.gang == "kueue" and scheduler.topology:
        problems.append(
            "scheduler.topology: with a topology Kueue admits jobs only to existing nodes, and Karpenter creates nodes "
            "only for admitted jobs; remove topology or node_pool"
        )
    return problems


def _lustre(
    file: ClusterFile, aws: Aws, instance: Instance | None, target: str
) -> tuple[FsxLustre, list[str]] | list[str]:
    """Return the shared file system with notes, or a list of problems."""
    shared = file.storage.shared
    limits = facts()["lustre"]
    if shared is None or not shared.path:
        return ["storage.shared.path is missing: runs need a file system shared by all nodes, e.g. /fsx"]
    problems = []
    if not MOUNT.fullmatch(shared.path):
        problems.append(f"storage.shared.path: {shared.path!r} is not a plain absolute path")
    if shared.kind not in (None, "lustre"):
        problems.append(f"storage.shared.kind is {shared.kind}: provisioning creates FSx for Lustre; set kind: lustre")
    object_path = file.storage.object.path if file.storage.object else None
    data = (aws.data or object_path or "").rstrip("/")
    if data and not data.startswith("s3://"):
        problems.append(f"storage.object.path: {data!r} is not an S3 URL, so it cannot be linked to the file system")
    if aws.file_system:
        if not aws.file_system_mount and target != "parallelcluster":
            problems.append(
                "aws.file_system_mount is missing: the MountName of aws.file_system (describe-file-systems)"
            )
        capacity = math.ceil((shared.capacity_bytes or 0) / GIB)
        file_system = FsxLustre(shared.path, capacity, 0, False, data, aws.file_system, aws.file_system_mount or "")
        return problems or (file_system, [])
    classes = limits["throughput_classes"]
    throughput = shared.megabytes_per_second_per_tib
    if throughput not in classes:
        problems.append(f"storage.shared.megabytes_per_second_per_tib: FSx offers {', '.join(map(str, classes))}")
    if not shared.capacity_bytes:
        problems.append("storage.shared.capacity_bytes is missing: the size of the file system, e.g. 48TiB")
    if problems:
        return problems
    assert shared.capacity_bytes
    assert throughput
    step, smallest = limits["step_gib"], limits["smallest_gib"]
    asked = math.ceil(shared.capacity_bytes / GIB)
    if shared.capacity_bytes % TIB == 0:  # whole TiB are taken as FSx counts them, 1,000 GiB each
        asked = round(shared.capacity_bytes / TIB) * 1000
    capacity = smallest if asked <= smallest else -(-asked // step) * step
    notes = []
    if capacity != asked:
        notes.append(
            f"the file system has {capacity:,} GiB: FSx sells {smallest:,} and multiples of {step:,}, not {asked:,}"
        )
    fast_enough = capacity / 1000 * throughput >= limits["efa_megabytes_per_second"]
    efa = bool(instance and instance.efa_version and fast_enough and target != "parallelcluster")
    if not efa and instance and instance.efa_version:
        notes.append(
            "ParallelCluster creates file systems without EFA; for EFA create one first and set aws.file_system"
            if fast_enough
            else f"Lustre without EFA: EFA needs capacity x throughput of {limits['efa_megabytes_per_second']:,} MB/s"
        )
    return FsxLustre(shared.path, capacity, int(throughput), efa, data), notes
