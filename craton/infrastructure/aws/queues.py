"""One-time set-up of a Kubernetes cluster for gang scheduling: queues with quotas, and the topology that Kueue, KAI or
Volcano use to place a gang.

Quotas cover the whole cluster, computed from nodes and instance. They include every resource that Craton's pods
request, because Kueue never admits a workload that requests any other.
"""

from __future__ import annotations

from typing import Any

from craton.infrastructure.aws.interfaces import level_labels
from craton.infrastructure.aws.site import GIB, AwsSite
from craton.infrastructure.topology import HOSTNAME_LABEL, kai_topology, kueue_topology
from craton.yaml_text import to_yaml

Manifest = dict[str, Any]
EFA = "vpc.amazonaws.com/efa"
GPU = "nvidia.com/gpu"
HUGE_PAGES_GIB = 10  # per node, reserved for EFA by AWS's images
PRIORITIES = {"low": 0, "high": 1000}
UNLIMITED = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
GPU_TAINT = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}


def namespace_object(site: AwsSite) -> dict[str, str]:
    """Return the namespace of jobs, queue, claim and health pods. kubectl applies files by name; this one is first."""
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": site.namespace}}
    return {"manifests/00-namespace.yaml": to_yaml(space)}


def queue_objects(site: AwsSite, machine: dict[str, str]) -> dict[str, str]:
    """Return the manifests for the cluster file's `scheduler.gang`; empty for none."""
    gang = site.file.scheduler.gang if site.file.scheduler else "none"
    if gang == "kueue":
        objects = _kueue(site, machine)
    elif gang == "kai":
        objects = _kai(site)
    elif gang == "volcano":
        objects = _volcano(site)
    else:
        return {}
    return {f"manifests/{gang}.yaml": to_yaml(*objects)}


def topology_name(site: AwsSite) -> str:
    return (site.file.scheduler and site.file.scheduler.topology) or "fabric"


def capacity(site: AwsSite) -> dict[str, str]:
    """Return resource → capacity of the whole cluster."""
    nodes, instance = site.num_nodes, site.instance
    amounts = {
        "cpu": str(nodes * instance.vcpus),
        "memory": f"{nodes * int(instance.host_memory_bytes / GIB)}Gi",
        GPU: str(nodes * instance.num_gpus),
    }
    if instance.efa_version:
        amounts[EFA] = str(nodes * instance.network_interfaces)
        if not site.node_pool:  # Karpenter's nodes have no huge pages
            amounts["hugepages-2Mi"] = f"{nodes * HUGE_PAGES_GIB}Gi"
    stated = site.file.scheduler.resources if site.file.scheduler else {}
    return amounts | {name: str(nodes * count) for name, count in stated.items()}


def machine_label(site: AwsSite, target: str) -> dict[str, str]:
    """The node label of the instance type; HyperPod's types have a prefix."""
    prefix = "ml." if target.startswith("hyperpod") else ""
    return {"node.kubernetes.io/instance-type": prefix + site.instance.name}


def _kueue(site: AwsSite, machine: dict[str, str]) -> list[Manifest]:
    """Return Kueue's objects. A pool of Karpenter gets no topology: with one, Kueue admits jobs only to existing nodes,
    and Karpenter creates nodes only for pods of admitted jobs."""
    flavor = site.instance.name.replace(".", "-")
    quota = capacity(site)
    api = "kueue.x-k8s.io/v1beta2"
    spec: Manifest = {"nodeLabels": machine, "tolerations": [GPU_TAINT]}
    topology = []
    if not site.node_pool:
        spec = {"topologyName": topology_name(site), **spec}
        topology = [kueue_topology(level_labels(site), topology_name(site))]
    return [
        *topology,
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": flavor}, "spec": spec},
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": site.queue},
            "spec": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": site.namespace}},
                "queueingStrategy": "BestEffortFIFO",
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {
                        "coveredResources": list(quota),
                        "flavors": [
                            {
                                "name": flavor,
                                "resources": [{"name": name, "nominalQuota": most} for name, most in quota.items()],
                            }
                        ],
                    }
                ],
            },
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": site.queue, "namespace": site.namespace},
            "spec": {"clusterQueue": site.queue},
        },
        *(
            {"apiVersion": api, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
            for name, value in _priorities(site).items()
        ),
    ]


def _kai(site: AwsSite) -> list[Manifest]:
    gpus = int(capacity(site)[GPU])

    def queue(name: str, limit: int, parent: str = "") -> Manifest:
        spec: Manifest = {"parentQueue": parent} if parent else {}
        spec["resources"] = {
            "cpu": UNLIMITED,
            "memory": UNLIMITED,
            "gpu": {"quota": gpus, "limit": limit, "overQuotaWeight": 1},
        }
        return {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": name}, "spec": spec}

    parent = f"{site.queue}-all"
    topology = kai_topology(level_labels(site), topology_name(site))
    return [topology, queue(parent, -1), queue(site.queue, gpus, parent)]


def _volcano(site: AwsSite) -> list[Manifest]:
    """Return the queue, and the settings with which Volcano's controller derives HyperNodes from node labels."""
    levels = [{"nodeLabel": label} for label in (*level_labels(site).values(), HOSTNAME_LABEL)]
    discovery = {
        "networkTopologyDiscovery": [
            {
                "source": "label",
                "enabled": True,
                "interval": "1m",
                "config": {"networkTopologyTypes": {topology_name(site): levels}},
            }
        ]
    }
    plugins = [
        ["priority", "gang", "conformance"],
        ["drf", "predicates", "capacity", "nodeorder", "binpack", "network-topology-aware"],
    ]
    scheduling = {
        "actions": "enqueue, allocate, backfill",
        "tiers": [{"plugins": [{"name": name} for name in tier]} for tier in plugins],
    }
    gpus = {GPU: capacity(site)[GPU]}
    return [
        {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "Queue",
            "metadata": {"name": site.queue},
            "spec": {"weight": 1, "reclaimable": True, "deserved": gpus, "capability": gpus},
        },
        _config("volcano-controller-configmap", "volcano-controller.conf", discovery),
        _config("volcano-scheduler-configmap", "volcano-scheduler.conf", scheduling),
    ]


def _config(name: str, key: str, document: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "volcano-system"},
        "data": {key: to_yaml(document)},
    }


def _priorities(site: AwsSite) -> dict[str, int]:
    own = site.file.scheduler.priority if site.file.scheduler else None
    return PRIORITIES | ({own: PRIORITIES["high"]} if own and own not in PRIORITIES else {})
