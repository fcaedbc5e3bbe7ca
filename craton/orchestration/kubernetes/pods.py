"""The pod template: one pod is one node of a run, the same for every kind of owner, with minimal privileges. Pure.

A pod has no API token, no privilege escalation, and no capability except IPC_LOCK where the network needs it. Values of
the job file are plain text, never part of a command or a variable reference. Secrets are files in memory that the pod's
program passes to the ranks; the container's own environment does not contain them.
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

CONTAINER = "node"  # the container, and the replicated job of a JobSet or the task of a Volcano Job
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
RUN_ANNOTATION = "craton/run"  # also a label of pods, which gives metrics the run's name
SLOT_LABEL, MEMBER_LABEL = "craton/slot", "craton/member"  # of pods for members; the second if they run only one
SUBMISSION_ANNOTATION = "craton/submission"
DIRECTORY_ANNOTATION = "craton/directory"  # the run directory in the pods
WITHIN_ANNOTATION = "craton/within"  # the topology level of the job's placement, for people
MODULE = "craton.orchestration.kubernetes.pod"
SLOT_MODULE = "craton.orchestration.kubernetes.members.slot_pod"
SLOT_NUMBER = "CRATON_SLOT_NUMBER"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"  # label that JobSet gives the pods of a replica
# Kubernetes evicts pods from an unreachable node after five minutes by default. Agents notice it in seconds, but a
# replacement pod comes only after the eviction. Kubernetes itself needs most of a minute to taint such a node.
AWAY_SECONDS = 60
AWAY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# Exit codes of the pod's program; the owner's failure policy knows them.
EXIT_DONE = 0  # done, or stopped by its user
EXIT_FAILED = 1  # retry, counted
EXIT_AGAIN = 75  # ended by the scheduler (EX_TEMPFAIL of sysexits.h): retry, not counted
EXIT_FATAL = 77  # a retry would fail again

Manifest = dict[str, Any]


def labels_of(target: KubernetesTarget) -> dict[str, str]:
    """Return the labels that identify all objects of a run, and all runs."""
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
    labels: dict[str, str] | None = None,
) -> Manifest:
    """Return the pod template. `has_affinity`: request placement from the default scheduler, by pod affinity."""
    noted = dict(annotations or {})
    if target.node_pool:
        noted["karpenter.sh/do-not-disrupt"] = "true"  # consolidation must not remove a node from a gang
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
    metadata: Manifest = {"labels": {**labels_of(target), RUN_ANNOTATION: target.run, **(labels or {})}}
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
        "command": [IMAGE_PYTHON, "-m", SLOT_MODULE if target.slot else MODULE, literal(target.directory)],
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
    number = {"name": SLOT_NUMBER, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_INDEX}']"}}}
    plain = [{"name": name, "value": literal(value)} for name, value in settled_env(target).items()]
    return [pod_ip, node, *([number] if target.slot else []), *plain]


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
    """Map ConfigMap keys, which have no slashes, to file paths of the run."""
    return [{"key": config_key(name), "path": name} for name in target.files]


def _secret_sources(target: KubernetesTarget) -> list[Manifest]:
    """Project from each Secret only the keys that the job names."""
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
        # The first pod of a run matches itself, so it can go anywhere; the others follow it.
        term = {"labelSelector": {"matchLabels": {INSTANCE: target.name}}, "topologyKey": target.near.label}
        if target.near.is_required:
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        else:
            wish = {"weight": 100, "podAffinityTerm": term}
            affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    return affinity
