"""SageMaker HyperPod: the request that creates the cluster (`aws sagemaker create-cluster --cli-input-json`), its
lifecycle scripts, and a stack for the file system, which HyperPod only mounts.

HyperPod handles EFA and placement itself; capacity is a training plan.
"""

from __future__ import annotations

import json
from typing import Any

from craton.infrastructure.aws.scripts import NO_HOLD, setup_script, slurm_conf_lines, slurm_hooks
from craton.infrastructure.aws.site import AwsSite
from craton.infrastructure.aws.stack import storage_stack

DEEP_CHECKS = ["InstanceStress", "InstanceConnectivity"]
ROOT_VOLUME_GB = 500


def hyperpod_slurm(site: AwsSite) -> dict[str, str]:
    controller = _group(site, "controller", f"ml.{site.aws.head_instance}", 1, "on_create_controller.sh")
    controller["SlurmConfig"] = {"NodeType": "Controller"}
    nodes = _nodes(site)
    nodes["SlurmConfig"] = {"NodeType": "Compute", "PartitionNames": [site.queue]}
    request = _request(site, [controller, nodes])
    request["Orchestrator"] = {"Slurm": {"SlurmConfigStrategy": "Merge"}}  # keeps the lines that our script adds
    return {
        "create-cluster.json": _json(request),
        **storage_stack(site),
        "scripts/on_create.sh": setup_script(site),
        "scripts/on_create_controller.sh": _controller(site),
        **{f"scripts/{name}": text for name, text in slurm_hooks(site).items()},
    }


def hyperpod_eks(site: AwsSite) -> dict[str, str]:
    """Deep health checks run before a node takes work; HyperPod's own Helm chart installs the device plugins."""
    nodes = _nodes(site)
    nodes["OnStartDeepHealthChecks"] = DEEP_CHECKS
    scheduler = site.file.scheduler
    if scheduler and scheduler.tolerations:
        taints = [{"Key": key, "Value": "present", "Effect": "NoSchedule"} for key in scheduler.tolerations]
        nodes["KubernetesConfig"] = {"Taints": taints}
    request = _request(site, [nodes])
    request["Orchestrator"] = {"Eks": {"ClusterArn": site.aws.eks_cluster}}
    return {
        "create-cluster.json": _json(request),
        **storage_stack(site),
        "scripts/on_create.sh": "#!/bin/bash\n# Nothing to set up: nodes get everything they need as pods.\nexit 0\n",
    }


def _request(site: AwsSite, groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ClusterName": site.name,
        "InstanceGroups": groups,
        "VpcConfig": {"SecurityGroupIds": list(site.aws.security_groups), "Subnets": [site.aws.subnet]},
        "NodeRecovery": "Automatic" if site.file.health.policy == "replace" else "None",
        "Tags": [{"Key": "craton:cluster", "Value": site.name}],
    }


def _nodes(site: AwsSite) -> dict[str, Any]:
    group = _group(site, site.queue, f"ml.{site.instance.name}", site.num_nodes, "on_create.sh")
    if site.aws.training_plan:
        group["TrainingPlanArn"] = site.aws.training_plan
    if site.aws.image:
        group["ImageId"] = site.aws.image
    return group


def _group(site: AwsSite, name: str, machine: str, count: int, script: str) -> dict[str, Any]:
    storage: list[dict[str, Any]] = [{"EbsVolumeConfig": {"VolumeSizeInGB": ROOT_VOLUME_GB}}]
    lustre = site.lustre
    if lustre.file_system:
        mount = {
            "DnsName": f"{lustre.file_system}.fsx.{site.region}.amazonaws.com",
            "MountName": lustre.mount_name,
            "MountPath": lustre.path,
        }
        storage.append({"FsxLustreConfig": mount})
    return {
        "InstanceGroupName": name,
        "InstanceType": machine,
        "InstanceCount": count,
        "LifeCycleConfig": {"SourceS3Uri": site.scripts, "OnCreate": script},
        "ExecutionRole": site.aws.execution_role,
        # Use all processors in the catalog: 1 would disable half of them; a Grace core has one thread.
        "ThreadsPerCore": 1 if machine.startswith("ml.p6e-") else 2,
        "InstanceStorageConfigs": storage,
    }


def _controller(site: AwsSite) -> str:
    lines = "\n".join(slurm_conf_lines())
    return f"""\
{setup_script(site)}
# Slurm's prolog, epilog and health check; added once, also if this script runs again.
conf=/opt/slurm/etc/slurm.conf
if [ -f "$conf" ] && ! grep -q '^# craton' "$conf"; then
  cat >> "$conf" <<'CONF'
# craton
{lines}
CONF
  # A second line of the same name would replace the first, so append to an existing line.
  if grep -qi '^SchedulerParameters=' "$conf"; then
    sed -i 's/^SchedulerParameters=.*/&,{NO_HOLD}/I' "$conf"
  else
    echo SchedulerParameters={NO_HOLD} >> "$conf"
  fi
  systemctl is-active --quiet slurmctld && scontrol reconfigure || true
fi
"""


def _json(request: dict[str, Any]) -> str:
    return json.dumps(request, indent=2) + "\n"
