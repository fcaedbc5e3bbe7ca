"""The pod that is one node of a run: the same for every kind of owner, as tight as the job allows. Pure.

It holds no token of the cluster, may not gain rights, and has no capability but to pin memory where the network needs
it. A value of the job file is a text here, never a part of a command or a reference to another variable. Secrets are
files in memory, which the pod's program gives to the ranks: the container's own environment does not have them.
"""

from __future__ import annotations

from typing import Any

from craton.orchestration.draft import IMAGE_PYTHON
from craton.orchestration.kubernetes.names import literal
from craton.orchestration.kubernetes.target import (
    METRICS_PORT,
    RUN_CODE,
    RUN_FILES,
    RUN_NODES,
    SCRATCH,
    SECRETS,
    KubernetesTarget,
    PodMount,
    settled_env,
)

CONTAINER = "node"  # of every pod, and the name of the pods' group in a JobSet or a Volcano Job
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
RUN_ANNOTATION = "craton/run"  # a label of pods as well, by which metrics get the run's own name
SUBMISSION_ANNOTATION = "craton/submission"
DIRECTORY_ANNOTATION = "craton/directory"  # the run directory, as the pods see it
WITHIN_ANNOTATION = "craton/within"  # the level that the job named, for people to read
MODULE = "craton.orchestration.kubernetes.pod"
# A node whose kubelet is silent: pods leave it after five minutes unless they say otherwise. Agents notice in seconds,
# but a replacement comes only then. Kubernetes itself needs most of a minute until it taints such a node.
AWAY_SECONDS = 60
AWAY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# How the program of a pod ends; the owner of the pods knows these numbers.
EXIT_DONE = 0  # done, or stopped by its user
EXIT_FAILED = 1  # try again, and count it
EXIT_AGAIN = 75  # the scheduler wanted it to end (EX_TEMPFAIL of sysexits.h): try again, and do not count it
EXIT_FATAL = 77  # trying again would fail again

Manifest = dict[str, Any]


def labels_of(target: KubernetesTarget) -> dict[str, str]:
    """By which all objects of a run, and all runs, are found."""
    return {MANAGED_BY: "craton", INSTANCE: target.name, COMPONENT: target.kind}


def metadata_of(target: KubernetesTarget, name: str = "") -> Manifest:
    placed = {"namespace": target.namespace} if target.namespace else {}
    noted = {
        RUN_ANNOTATION: target.run,
        SUBMISSION_ANNOTATION: target.submission,
        DIRECTORY_ANNOTATION: target.directory,
        **({WITHIN_ANNOTATION: target.near.level} if target.near else {}),
    }
    return {
        "name": name or target.name,
        **placed,
        "labels": labels_of(target),
        "annotations": noted,
    }


def pod_template(
    target: KubernetesTarget,
    *,
    restart_policy: str = "Never",
    subdomain: str = "",
    scheduler: str = "",
    annotations: dict[str, str] | None = None,
    has_affinity: bool = False,
    priority_class: str = "",
) -> Manifest:
    """`has_affinity`: placement is asked of the default scheduler, pod by pod, for nobody places the gang as one."""
    noted = dict(annotations or {})
    if target.node_pool:
        noted["karpenter.sh/do-not-disrupt"] = "true"  # a node is not taken away from a gang to save money
    spec: Manifest = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": target.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(target),
        "containers": [_container(target)],
        "volumes": _volumes(target),
        "tolerations": _tolerations(target),
    }
    if subdomain:
        spec["subdomain"] = subdomain
    if scheduler:
        spec["schedulerName"] = scheduler
    if priority_class:
        spec["priorityClassName"] = priority_class
    if target.service_account:
        spec["serviceAccountName"] = target.service_account
    if target.node_pool:
        spec["nodeSelector"] = {"karpenter.sh/nodepool": target.node_pool}
    if affinity := _affinity(target, has_affinity):
        spec["affinity"] = affinity
    metadata: Manifest = {"labels": {**labels_of(target), RUN_ANNOTATION: target.run}}
    if noted:
        metadata["annotations"] = noted
    return {"metadata": metadata, "spec": spec}


def _container(target: KubernetesTarget) -> Manifest:
    ports = [{"name": "metrics", "containerPort": METRICS_PORT}]
    if target.server_port:
        ports.append({"name": "http", "containerPort": target.server_port})
    container: Manifest = {
        "name": CONTAINER,
        "image": target.image,
        "command": [IMAGE_PYTHON, "-m", MODULE, literal(target.directory)],
        "env": _environment(target),
        "ports": ports,
        "resources": {"requests": target.resources, "limits": target.limits}
        if target.limits
        else {"requests": target.resources},
        "volumeMounts": _mounts(target),
        "securityContext": _container_security(target),
    }
    if target.is_open:
        probe = {"httpGet": {"path": "/health", "port": "http"}}
        container["readinessProbe"] = {**probe, "periodSeconds": 5}
    return container


def _environment(target: KubernetesTarget) -> list[Manifest]:
    pod_ip = {"name": "CRATON_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    node = {"name": "CRATON_HOST_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    plain = [{"name": name, "value": literal(value)} for name, value in settled_env(target).items()]
    return [pod_ip, node, *plain]


def _pod_security(target: KubernetesTarget) -> Manifest:
    security: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    if target.user is not None:
        user, group = target.user
        security |= {"runAsUser": user, "runAsGroup": group}
    if target.is_non_root or (target.user is not None and target.user[0] != 0):
        security["runAsNonRoot"] = True
    return security


def _container_security(target: KubernetesTarget) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]}
    if target.pins_memory:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _volumes(target: KubernetesTarget) -> list[Manifest]:
    memory: Manifest = {"medium": "Memory"}
    if target.shared_memory_bytes:
        memory["sizeLimit"] = f"{target.shared_memory_bytes // 2**30}Gi"
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": memory}]
    if target.is_scratch:
        volumes.append({"name": "scratch", "emptyDir": {}})
    if target.files:
        volumes.append({"name": "run-files", "configMap": {"name": target.name, "items": _items(target)}})
    if target.code:
        volumes.append({"name": "run-code", "configMap": {"name": f"{target.name}-code"}})
    if target.secrets:
        volumes.append({"name": "secrets", "projected": {"sources": _secret_sources(target)}})
    if target.is_ordered:
        volumes.append({"name": "run-nodes", "configMap": {"name": target.nodes_map}})
    return [*volumes, *(_volume(mount) for mount in target.mounts)]


def _items(target: KubernetesTarget) -> list[Manifest]:
    """A key of a ConfigMap has no slashes, a file of a run may."""
    return [{"key": config_key(name), "path": name} for name in target.files]


def _secret_sources(target: KubernetesTarget) -> list[Manifest]:
    """Of each Secret, the keys that the job names and no others."""
    holders = dict.fromkeys(target.secrets.values())
    return [
        {
            "secret": {
                "name": holder,
                "items": [{"key": name, "path": name} for name, item in target.secrets.items() if item == holder],
            }
        }
        for holder in holders
    ]


def config_key(name: str) -> str:
    return name.replace("/", "--")


def _volume(mount: PodMount) -> Manifest:
    if mount.claim:
        return {"name": mount.name, "persistentVolumeClaim": {"claimName": mount.claim}}
    return {"name": mount.name, "hostPath": {"path": mount.path, "type": "Directory"}}


def _mounts(target: KubernetesTarget) -> list[Manifest]:
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if target.is_scratch:
        mounts.append({"name": "scratch", "mountPath": SCRATCH})
    if target.files:
        mounts.append({"name": "run-files", "mountPath": RUN_FILES, "readOnly": True})
    if target.code:
        mounts.append({"name": "run-code", "mountPath": RUN_CODE, "readOnly": True})
    if target.secrets:
        mounts.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
    if target.is_ordered:
        mounts.append({"name": "run-nodes", "mountPath": RUN_NODES, "readOnly": True})
    return [*mounts, *({"name": mount.name, "mountPath": mount.path} for mount in target.mounts)]


def _tolerations(target: KubernetesTarget) -> list[Manifest]:
    away = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": AWAY_SECONDS}
        for key in AWAY_TAINTS
    ]
    return [*({"key": key, "operator": "Exists"} for key in target.tolerations), *away]


def _affinity(target: KubernetesTarget, has_affinity: bool) -> Manifest:
    affinity: Manifest = {}
    wanted: list[Manifest] = []
    if target.instance_types:
        wanted.append(
            {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(target.instance_types)}
        )
    if target.exclude:
        wanted.append({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(target.exclude)})
    if wanted:
        terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if has_affinity and target.near is not None:
        # The first pod of a run matches itself, so it is free to go anywhere; the others follow it.
        term = {"labelSelector": {"matchLabels": {INSTANCE: target.name}}, "topologyKey": target.near.label}
        if target.near.is_required:
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        else:
            wish = {"weight": 100, "podAffinityTerm": term}
            affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    return affinity
