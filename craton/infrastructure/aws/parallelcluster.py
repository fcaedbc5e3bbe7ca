"""AWS ParallelCluster: one cluster configuration, and scripts that its nodes fetch.

ParallelCluster creates the interfaces, the placement group and the file system itself. It reserves Prolog and Epilog
and offers folders instead; our scripts go there.
"""

from __future__ import annotations

from shlex import quote
from typing import Any

from craton.infrastructure.aws.scripts import HOOKS, NO_HOLD, health_settings, setup_script, slurm_hooks
from craton.infrastructure.aws.site import AwsSite
from craton.infrastructure.aws.stack import EVENTS
from craton.yaml_text import to_yaml

SCRIPTS = "/opt/slurm/etc/scripts"  # prolog.d and epilog.d in it are ParallelCluster's


def parallelcluster(site: AwsSite) -> dict[str, str]:
    aws = site.aws
    head: dict[str, Any] = {
        "InstanceType": aws.head_instance,
        "Networking": {"SubnetId": aws.head_subnet or aws.subnet},
        "Ssh": {"KeyName": aws.key_name},
        "LocalStorage": {"RootVolume": {"Size": 200, "Encrypted": True}},
        "Iam": {"S3Access": [_s3(site)]},
        "CustomActions": {"OnNodeConfigured": {"Script": f"{site.scripts}/setup-head.sh"}},
    }
    document = {
        "Region": site.region,
        "Image": {"Os": aws.os, **({"CustomAmi": aws.image} if aws.image else {})},
        "HeadNode": head,
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {
                "EnableMemoryBasedScheduling": False,
                "CustomSlurmSettings": [
                    *(dict([line.split("=", 1)]) for line in health_settings()),
                    {"SchedulerParameters": NO_HOLD},
                ],
            },
            "SlurmQueues": [_queue(site)],
        },
        "SharedStorage": [_shared(site)],
        "Monitoring": {"DetailedMonitoring": True},
        "Tags": [{"Key": "craton:cluster", "Value": site.name}],
    }
    return {
        "cluster.yaml": to_yaml(document),
        "scripts/setup.sh": setup_script(site),
        "scripts/setup-head.sh": _setup_head(site),
        **{f"scripts/{name}": text for name, text in slurm_hooks(site).items()},
    }


def _queue(site: AwsSite) -> dict[str, Any]:
    aws, count = site.aws, site.num_nodes
    resource: dict[str, Any] = {
        "Name": "nodes",
        "InstanceType": site.instance.name,
        "MinCount": site.file.nodes.min_nodes if site.file.nodes.min_nodes and not aws.capacity_block else count,
        "MaxCount": count,
        "Efa": {"Enabled": bool(site.instance.efa_version)},
    }
    networking: dict[str, Any] = {"SubnetIds": [aws.subnet]}
    if aws.placement_group:
        networking["PlacementGroup"] = {"Enabled": True, "Name": aws.placement_group}
    elif site.own_placement_group:
        networking["PlacementGroup"] = {"Enabled": True}
    queue: dict[str, Any] = {
        "Name": site.queue,
        "CapacityType": "CAPACITY_BLOCK" if aws.capacity_block else "ONDEMAND",
        "ComputeResources": [resource],
        "Networking": networking,
        "HealthChecks": {"Gpu": {"Enabled": True}},
        "JobExclusiveAllocation": True,
        "Iam": {"S3Access": [_s3(site)]},
        "CustomActions": {"OnNodeConfigured": {"Script": f"{site.scripts}/setup.sh"}},
    }
    nvme = site.file.storage.nvme
    if nvme and nvme.path:
        queue["ComputeSettings"] = {"LocalStorage": {"EphemeralVolume": {"MountDir": nvme.path}}}
    if reservation := aws.capacity_block or aws.capacity_reservation:
        queue["CapacityReservationTarget"] = {"CapacityReservationId": reservation}
    return queue


def _shared(site: AwsSite) -> dict[str, Any]:
    lustre = site.lustre
    settings: dict[str, Any]
    if lustre.file_system:
        settings = {"FileSystemId": lustre.file_system}
    else:
        settings = {
            "StorageCapacity": lustre.capacity_gib,
            "DeploymentType": "PERSISTENT_2",
            "PerUnitStorageThroughput": lustre.megabytes_per_second_per_tib,
            "DataCompressionType": "LZ4",
            "DeletionPolicy": "Retain",
        }
        if lustre.data:
            settings["DataRepositoryAssociations"] = [
                {
                    "Name": "data",
                    "BatchImportMetaDataOnCreate": True,
                    "DataRepositoryPath": lustre.data,
                    "FileSystemPath": "/data",
                    "AutoImportPolicy": EVENTS,
                    "AutoExportPolicy": EVENTS,
                }
            ]
    return {"Name": "shared", "StorageType": "FsxLustre", "MountDir": lustre.path, "FsxLustreSettings": settings}


def _s3(site: AwsSite) -> dict[str, Any]:
    bucket, _, prefix = site.scripts.removeprefix("s3://").partition("/")
    return {"BucketName": bucket, "KeyName": f"{prefix}/*" if prefix else "*", "EnableWriteAccess": False}


def _setup_head(site: AwsSite) -> str:
    """Return the set-up of the head node. All nodes share its /opt/slurm, so scripts in its folders run on them."""
    source = quote(site.scripts + "/hooks")
    lines = [
        "#!/bin/bash",
        f"# Set-up of the head node of {site.name}: prolog and epilog of all nodes.",
        "set -euo pipefail",
        f"mkdir -p {SCRIPTS}/prolog.d {SCRIPTS}/epilog.d {HOOKS}",
        f"aws s3 cp --recursive --region {quote(site.region)} {source} {HOOKS}",
        f"install -m 755 {HOOKS}/prolog.sh {SCRIPTS}/prolog.d/50_craton.sh",
        f"install -m 755 {HOOKS}/epilog.sh {SCRIPTS}/epilog.d/50_craton.sh",
    ]
    return "\n".join(lines) + "\n"
