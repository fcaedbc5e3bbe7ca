"""Manifests for Kubernetes nodes: device plugins, Karpenter's pools, the shared volume, the health check."""

from __future__ import annotations

from importlib import resources
from typing import Any

from craton.infrastructure.aws.interfaces import interfaces
from craton.infrastructure.aws.queues import EFA, GPU, GPU_TAINT, capacity
from craton.infrastructure.aws.scripts import CHECK_SECONDS, HEALTH_INTERVAL_SECONDS
from craton.infrastructure.aws.site import AwsSite, facts
from craton.yaml_text import to_yaml

Manifest = dict[str, Any]
SYSTEM = "kube-system"


def device_plugins(site: AwsSite, machine: dict[str, str]) -> dict[str, str]:
    """NVIDIA's, and EFA's where the instance has EFA."""
    images = facts()["images"]
    folder = {"name": "plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins", "type": "Directory"}}
    mount = {"name": "plugins", "mountPath": "/var/lib/kubelet/device-plugins"}
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    nvidia = {
        "name": "plugin",
        "image": images["nvidia_device_plugin"],
        "env": [{"name": "FAIL_ON_INIT_ERROR", "value": "false"}],
        "securityContext": locked,
        "volumeMounts": [mount],
    }
    sets = [_daemons("nvidia-device-plugin", SYSTEM, nvidia, [folder], machine)]
    if site.instance.efa_version:
        efa = {
            "name": "plugin",
            "image": images["efa_device_plugin"].replace("REGION", site.region),
            "securityContext": locked,
            "volumeMounts": [mount, {"name": "infiniband", "mountPath": "/dev/infiniband"}],
            "resources": {"requests": {"cpu": "10m", "memory": "20Mi"}},
        }
        devices = {"name": "infiniband", "hostPath": {"path": "/dev/infiniband"}}
        pods = _daemons("efa-device-plugin", SYSTEM, efa, [folder, devices], machine)
        pods["spec"]["template"]["spec"]["hostNetwork"] = True  # it queries the instance metadata
        sets.append(pods)
    return {"manifests/device-plugins.yaml": to_yaml(*sets)}


def karpenter(site: AwsSite) -> dict[str, str]:
    """A NodePool and its EC2NodeClass, where the cluster file names a node pool."""
    pool = site.node_pool
    if not pool:
        return {}
    aws = site.aws
    reserved = aws.capacity_block or aws.capacity_reservation
    requirements = [
        ("node.kubernetes.io/instance-type", site.instance.name),
        ("karpenter.sh/capacity-type", "reserved" if reserved else "on-demand"),
        *((("topology.kubernetes.io/zone", aws.zone),) if aws.zone else ()),
    ]
    quota = capacity(site)
    node_pool = {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": pool},
        "spec": {
            "template": {
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": pool},
                    "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in requirements],
                    "taints": [{"key": GPU, "value": "present", "effect": "NoSchedule"}],
                    "expireAfter": "Never",  # never replace a node under a running job because of its age
                }
            },
            "limits": {"cpu": quota["cpu"], GPU: quota[GPU]},
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "10m"},
        },
    }
    groups: list[Manifest] = [
        {"tags": {"craton:cluster": site.name}},  # the stack's own: EFA among the nodes, and the file system
        {"tags": {"aws:eks:cluster-name": site.name}},  # EKS's: control plane, and system nodes with the DNS
        *({"id": group} for group in aws.security_groups),
    ]
    spec: Manifest = {
        "amiSelectorTerms": [{"id": aws.image}] if aws.image else [{"alias": "al2023@latest"}],
        **({"amiFamily": "AL2023"} if aws.image else {}),
        "role": karpenter_role(site),
        "subnetSelectorTerms": [{"id": aws.subnet}],
        "securityGroupSelectorTerms": groups,
        "instanceStorePolicy": "RAID0",
        "networkInterfaces": [
            {"networkCardIndex": one.card, "deviceIndex": one.device, "interfaceType": one.kind}
            for one in interfaces(site)
        ],
        "metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 2},
        "tags": {"craton:cluster": site.name},
    }
    if reserved:
        spec["capacityReservationSelectorTerms"] = [{"id": reserved}]
    if aws.placement_group:
        spec["placementGroupSelector"] = {"name": aws.placement_group}
    node_class = {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": {"name": pool},
        "spec": spec,
    }
    return {"manifests/karpenter.yaml": to_yaml(node_pool, node_class)}


def karpenter_role(site: AwsSite) -> str:
    """Name of the role of Karpenter's nodes."""
    return site.aws.karpenter_role or f"KarpenterNodeRole-{site.name}"


def shared_volume(site: AwsSite) -> dict[str, str]:
    """Return the volume claim that jobs mount, on an existing file system; its id is not known before."""
    lustre, shared = site.lustre, site.file.storage.shared
    if not lustre.file_system or shared is None:
        return {}
    claim = shared.claim or "shared"
    size = f"{lustre.capacity_gib or 1200}Gi"  # size of the claim; FSx provides the whole file system
    handle = {
        "dnsname": f"{lustre.file_system}.fsx.{site.region}.amazonaws.com",
        "mountname": lustre.mount_name,
    }
    name = f"{site.name.lower()}-{claim}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteMany"],
            "mountOptions": ["flock"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "csi": {"driver": "fsx.csi.aws.com", "volumeHandle": lustre.file_system, "volumeAttributes": handle},
        },
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": site.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": {"storage": size}},
        },
    }
    return {"manifests/storage.yaml": to_yaml(volume, wanted)}


def health_checks(site: AwsSite, machine: dict[str, str]) -> dict[str, str]:
    """Return a DaemonSet that runs `craton doctor` every few minutes. With `health.policy` drain or replace it cordons
    a node whose GPUs fail; only then does it have permission to change nodes."""
    image = site.file.scheduler.image if site.file.scheduler else None
    if not image:
        return {}
    cordons = site.file.health.policy != "observe"
    name = "craton-health"
    program = resources.files("craton.infrastructure.aws").joinpath("node_check.py").read_text(encoding="utf-8")
    labels = {"app.kubernetes.io/name": name}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": site.namespace, "labels": labels},
        "data": {"node_check.py": program},
    }
    container = {
        "name": "check",
        "image": image,
        "command": ["python", "/check/node_check.py"],
        "env": [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "CHECK_SECONDS", "value": str(CHECK_SECONDS)},
            {"name": "INTERVAL_SECONDS", "value": str(HEALTH_INTERVAL_SECONDS)},
            {"name": "CORDON", "value": "yes" if cordons else "no"},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},  # sees all GPUs, requests none
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},  # nvidia-smi, whatever the image sets
        ],
        # XIDs are in the kernel log, which only root with SYSLOG may read
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["SYSLOG"]},
        },
        "volumeMounts": [
            {"name": "check", "mountPath": "/check", "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/fit"]}, "periodSeconds": 30},
    }
    volumes = [
        {"name": "check", "configMap": {"name": name}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # as jobs have it, not the 64 MiB of a bare container
    ]
    pods = _daemons(name, site.namespace, container, volumes, machine)
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": site.namespace},
        "automountServiceAccountToken": False,
    }
    pods["spec"]["template"]["spec"] |= {"serviceAccountName": name, "automountServiceAccountToken": cordons}
    objects = [account, config, *(_may_cordon(name, site.namespace) if cordons else []), pods]
    return {"manifests/health.yaml": to_yaml(*objects)}


def _may_cordon(name: str, namespace: str) -> list[Manifest]:
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [subject],
        },
    ]


def _daemons(
    name: str, namespace: str, container: Manifest, volumes: list[Manifest], machine: dict[str, str]
) -> Manifest:
    """A pod on every GPU node."""
    labels = {"app.kubernetes.io/name": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeSelector": machine,
                    "tolerations": [GPU_TAINT, {"key": EFA, "operator": "Exists"}],
                    **({"priorityClassName": "system-node-critical"} if namespace == SYSTEM else {}),
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }
