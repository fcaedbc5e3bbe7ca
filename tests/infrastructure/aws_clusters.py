"""Cluster files of every kind that can be provisioned, as text that a user would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from craton.job.cluster import ClusterFile, load_cluster

AWS: dict[str, Any] = {
    "region": "us-east-2",
    "zone": "us-east-2a",
    "vpc": "vpc-0123456789abcdef0",
    "subnet": "subnet-0123456789abcdef0",
    "scripts": "s3://my-scripts/train",
}
OF_TARGET: dict[str, dict[str, Any]] = {
    "parallelcluster": {"key_name": "my-key"},
    "hyperpod-slurm": {
        "security_groups": ["sg-0123456789abcdef0"],
        "execution_role": "arn:aws:iam::111122223333:role/HyperPodNodes",
    },
    "hyperpod-eks": {
        "security_groups": ["sg-0123456789abcdef0"],
        "execution_role": "arn:aws:iam::111122223333:role/HyperPodNodes",
        "eks_cluster": "arn:aws:eks:us-east-2:111122223333:cluster/train",
    },
    "eks": {"control_subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]},
    "pcs": {"image": "ami-0123456789abcdef0"},
}
DRIVES = {"eks": "/mnt/k8s-disks/0", "hyperpod-eks": "/opt/dlami/nvme", "hyperpod-slurm": "/opt/dlami/nvme"}
BLOCK = {"capacity_block": "cr-0123456789abcdef0"}
RESERVATION = {"capacity_reservation": "cr-0123456789abcdef0", "placement_group": "near"}
PLAN = {"training_plan": "arn:aws:sagemaker:us-east-2:111122223333:training-plan/november"}
EXISTING = {"file_system": "fs-0123456789abcdef0", "file_system_mount": "abcdefgh"}


def document(target: str, aws: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A cluster file for `target`; `aws` and `keys` are added to it, None removes a key."""
    kubernetes = target in ("eks", "hyperpod-eks")
    scheduler: dict[str, Any] = {"kind": "slurm", "partition": "train"}
    if kubernetes:
        scheduler = {"kind": "kubernetes", "queue": "research", "namespace": "train", "gang": "kueue"}
        scheduler["image"] = "example.com/train:1"
    found: dict[str, Any] = {
        "name": "llm-train",
        "instance": "p5.48xlarge",
        "nodes": 16,
        "storage": {
            "nvme": {"path": DRIVES.get(target, "/scratch")},
            "shared": {
                "path": "/fsx",
                "kind": "lustre",
                "megabytes_per_second_per_tib": 500,
                "capacity_bytes": "48TiB",
                "claim": "fsx",
            },
            "object": {"path": "s3://my-data/tokens"},
        },
        "scheduler": scheduler,
        "health": {"policy": "replace"},
        "aws": {**AWS, **OF_TARGET[target], **(aws or {})},
        **keys,
    }
    found["aws"] = {key: value for key, value in found["aws"].items() if value is not None}
    return {key: value for key, value in found.items() if value is not None}


def cluster(folder: Path, target: str, aws: dict[str, Any] | None = None, **keys: Any) -> ClusterFile:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document(target, aws, **keys)))
    return load_cluster(path)
