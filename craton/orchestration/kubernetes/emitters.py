"""Emit a run as Kubernetes objects: a JobSet for Kueue or KAI, a Volcano Job, an Indexed Job, a LeaderWorkerSet. Pure.

Every kind gives the same guarantees. Pods are gang-scheduled if there is a gang scheduler. A failed pod is recreated
under the same index, up to `run.restarts` times, while the others live: their agents recover the run around it, from
peer memory. A FATAL run (exit code 77) fails at once. Pods that the scheduler ends (a drained node, a preempted job)
exit with code 75, which is not counted.

A run with members is one JobSet for every scheduler, with a replicated job for each group of slots. It ends as its own
replicated job does.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from craton import yaml_text
from craton.orchestration.kubernetes.members import SlotTarget
from craton.orchestration.kubernetes.names import label_value
from craton.orchestration.kubernetes.pods import (
    CONTAINER,
    EXIT_AGAIN,
    EXIT_FATAL,
    INSTANCE,
    MEMBER_LABEL,
    SLOT_LABEL,
    Manifest,
    config_key,
    metadata_of,
    pod_template,
)
from craton.orchestration.kubernetes.target import CODE_FILE, METRICS_PORT, KubernetesTarget

EVICTIONS = 3  # that a Volcano Job with `restarts: 0` survives
NO_LIMIT = 2**31 - 1
VOLCANO_GROUP = "scheduling.k8s.io/group-name"  # annotation of pods: the PodGroup that they belong to
KEPT_SECONDS = 7 * 86400  # ended objects stay for a week, for `ps`; then Kubernetes deletes them


def manifests(target: KubernetesTarget, slots: Sequence[SlotTarget] = ()) -> list[Manifest]:
    """Return all objects of a run, with slots for its members, the owner of the others first."""
    owner = jobset_with_slots(target, slots) if target.has_slots else owner_of(target)
    around: list[Manifest] = []
    if target.own_secrets or any(item.target.own_secrets for item in slots):
        around.append(secret(target))
    if target.files:
        around.append(config_map(target))
    if target.code:
        around.append(code_map(target))
    if target.is_ordered:
        around.append(nodes_map(target))
    if target.has_slots and target.gang == "volcano":
        around.append(volcano_group(target, slots))
    if target.gang == "none" and target.kind != "serve" and not target.has_slots:
        around.append(headless_service(target))
    if target.is_open:
        around.append(server_service(target))
    return [owner, *around, network_policy(target)]


def to_yaml(documents: list[Manifest]) -> str:
    return yaml_text.to_yaml(*documents, indent_lists=False, allow_unicode=True)


def owner_of(target: KubernetesTarget) -> Manifest:
    if target.kind == "serve":
        return leader_worker_set(target)
    return {"kueue": jobset_kueue, "kai": jobset_kai, "volcano": volcano_job, "none": indexed_job}[target.gang](target)


def jobset_kueue(target: KubernetesTarget) -> Manifest:
    """Return a JobSet that Kueue keeps suspended until quota and a fitting topology domain are available."""
    metadata = metadata_of(target)
    metadata["labels"] |= _kueue_labels(target)
    return _jobset(metadata, _job_spec(target, pod_template(target, annotations=_kueue_annotations(target))))


def jobset_kai(target: KubernetesTarget) -> Manifest:
    """Return a JobSet for KAI, which creates the PodGroup. KAI reads placement from the JobSet, not the pods."""
    metadata = metadata_of(target)
    metadata["labels"] |= {"kai.scheduler/queue": target.queue}
    if target.priority:
        metadata["labels"]["priorityClassName"] = target.priority
    metadata["annotations"] |= _kai_annotations(target)
    spec = _job_spec(target, pod_template(target, scheduler="kai-scheduler"))
    return _jobset(metadata, spec, _kai_minimum(target))


def jobset_with_slots(target: KubernetesTarget, slots: Sequence[SlotTarget]) -> Manifest:
    """Return the JobSet of a run with members. Its outcome is that of the run's own pods: those of slots never fail
    their Job, and it is not waited for."""
    metadata = metadata_of(target)
    if target.gang == "kueue":
        metadata["labels"] |= _kueue_labels(target)
    if target.gang == "kai":
        metadata["labels"] |= {"kai.scheduler/queue": target.queue}
        metadata["labels"] |= {"priorityClassName": target.priority} if target.priority else {}
    jobset = _jobset(metadata, _job_spec(target, _template_with_slots(target, 1)), _kai_minimum(target))
    jobset["spec"]["successPolicy"] = {"operator": "All", "targetReplicatedJobs": [CONTAINER]}
    for item in slots:
        labels = {SLOT_LABEL: item.target.slot}
        labels |= {MEMBER_LABEL: label_value(item.members[0])} if len(item.members) == 1 else {}
        spec = _slot_spec(item.target, _template_with_slots(item.target, item.num_slots, labels))
        jobset["spec"]["replicatedJobs"].append(
            _replicated_job(item.target.slot, item.num_slots, spec, _kai_minimum(item.target))
        )
    return jobset


def volcano_group(target: KubernetesTarget, slots: Sequence[SlotTarget]) -> Manifest:
    """Return the PodGroup that makes all pods of a JobSet one gang; Volcano itself makes one for each Job."""
    num_pods = target.gang_pods + sum(item.num_slots * item.target.gang_pods for item in slots)
    spec: Manifest = {"minMember": num_pods}
    if target.queue:
        spec["queue"] = target.queue
    if target.priority:
        spec["priorityClassName"] = target.priority
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": metadata_of(target),
        "spec": spec,
    }


def volcano_job(target: KubernetesTarget) -> Manifest:
    # Volcano reads 0 as its default, 3. Without restarts a failure is final; only evicted pods come back.
    has_restarts = target.restarts > 0
    failed = (
        [{"events": ["PodEvicted", "PodFailed"], "action": "RestartPod"}]
        if has_restarts
        else [
            {"exitCode": EXIT_AGAIN, "action": "RestartPod"},
            {"event": "PodEvicted", "action": "RestartPod"},
            {"event": "PodFailed", "action": "TerminateJob"},
        ]
    )
    spec: Manifest = {
        "schedulerName": "volcano",
        "minAvailable": target.gang_pods,
        "maxRetry": target.restarts if has_restarts else EVICTIONS,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "plugins": {"svc": ["--publish-not-ready-addresses=true"], "env": []},
        # The order matters: the first match applies, and every failure is also a PodFailed.
        "policies": [
            {"exitCode": EXIT_FATAL, "action": "TerminateJob"},
            *failed,
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "tasks": [{"name": CONTAINER, "replicas": target.num_pods, "template": _ending(target, pod_template(target))}],
    }
    if target.queue:
        spec["queue"] = target.queue
    if target.priority:
        spec["priorityClassName"] = target.priority
    if target.near is not None:
        mode = "hard" if target.near.is_required else "soft"
        spec["networkTopology"] = {"mode": mode, "highestTierAllowed": target.near.tier}
    return {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": metadata_of(target), "spec": spec}


def indexed_job(target: KubernetesTarget) -> Manifest:
    """Return an Indexed Job, without gang scheduling: pods with a node wait for those without."""
    template = pod_template(target, subdomain=target.name, has_affinity=True, priority_class=target.priority)
    spec = {**_job_spec(target, template), "ttlSecondsAfterFinished": KEPT_SECONDS}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata_of(target), "spec": spec}


def leader_worker_set(target: KubernetesTarget) -> Manifest:
    """Return a LeaderWorkerSet for a server, which is restarted whenever it exits."""
    metadata = metadata_of(target)
    annotations: dict[str, str] = {}
    scheduler = {"kai": "kai-scheduler", "volcano": "volcano"}.get(target.gang, "")
    if target.gang == "kueue":
        metadata["labels"] |= _kueue_labels(target)
        annotations = _kueue_annotations(target)
    if target.gang == "kai":
        metadata["labels"] |= {"kai.scheduler/queue": target.queue}
        metadata["annotations"] |= _kai_annotations(target)
    if target.gang == "volcano" and target.queue:
        # The creator of the PodGroup reads it: the LeaderWorkerSet controller from the set, where gang scheduling is
        # enabled, else Volcano's controller from the pods.
        annotations = {"scheduling.volcano.sh/queue-name": target.queue}
        metadata["annotations"] |= annotations
    template = pod_template(
        target,
        restart_policy="Always",
        scheduler=scheduler,
        annotations=annotations,
        has_affinity=target.gang == "none",
        priority_class="" if target.gang == "kueue" else target.priority,
    )
    spec = {
        "replicas": 1,
        "leaderWorkerTemplate": {
            "size": target.num_pods,
            "restartPolicy": "RecreateGroupOnPodRestart" if target.num_pods > 1 else "None",
            "workerTemplate": template,
        },
        "networkConfig": {"subdomainPolicy": "Shared"},
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": spec,
    }


def config_map(target: KubernetesTarget) -> Manifest:
    """Return the ConfigMap with the files of a run whose directory the first pod creates."""
    data = {config_key(name): text for name, text in target.files.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata_of(target), "immutable": True, "data": data}


def code_map(target: KubernetesTarget) -> Manifest:
    data = {CODE_FILE: base64.b64encode(target.code).decode()}
    metadata = metadata_of(target, f"{target.name}-code")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "binaryData": data}


def nodes_map(target: KubernetesTarget) -> Manifest:
    """Return the ConfigMap for the nodes' topology, without data; the labels of the nodes are added on submission."""
    metadata = metadata_of(target, target.nodes_map)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True}


def secret(target: KubernetesTarget) -> Manifest:
    """Return the Secret without values; they are added on submission and written nowhere else."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata_of(target, target.own_secret), "type": "Opaque"}


def headless_service(target: KubernetesTarget) -> Manifest:
    """Return the headless Service that gives pods DNS names, published before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: target.name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata_of(target), "spec": spec}


def server_service(target: KubernetesTarget) -> Manifest:
    ports = [{"name": "http", "port": target.server_port, "targetPort": "http"}]
    spec = {"selector": {INSTANCE: target.name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata_of(target, f"{target.name}-http"), "spec": spec}


def network_policy(target: KubernetesTarget) -> Manifest:
    """Allow connections only between the run's own pods, because ranks do not authenticate connections (torch's store
    and gloo have no password). Metrics, and a server that listens for others, are open."""
    ours: Manifest = {"from": [{"podSelector": {"matchLabels": {INSTANCE: target.name}}}]}
    ports = [{"port": METRICS_PORT}, *([{"port": target.server_port}] if target.is_open else [])]
    spec = {
        "podSelector": {"matchLabels": {INSTANCE: target.name}},
        "policyTypes": ["Ingress"],
        "ingress": [ours, {"ports": ports}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(target),
        "spec": spec,
    }


def _jobset(metadata: Manifest, job_spec: Manifest, job_annotations: dict[str, str] | None = None) -> Manifest:
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        # The inner Job recreates its pods one by one; when it fails, the JobSet fails.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [_replicated_job(CONTAINER, 1, job_spec, job_annotations)],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _replicated_job(
    name: str, replicas: int, job_spec: Manifest, job_annotations: dict[str, str] | None = None
) -> Manifest:
    template: Manifest = {"metadata": {"annotations": job_annotations}} if job_annotations else {}
    template["spec"] = job_spec
    return {"name": name, "replicas": replicas, "template": template}


def _template_with_slots(target: KubernetesTarget, num_slots: int, labels: dict[str, str] | None = None) -> Manifest:
    annotations = _kueue_annotations(target, num_slots) if target.gang == "kueue" else {}
    if target.gang == "volcano":
        annotations = {VOLCANO_GROUP: target.name}
    return pod_template(
        target,
        scheduler={"kai": "kai-scheduler", "volcano": "volcano"}.get(target.gang, ""),
        annotations=annotations,
        priority_class=target.priority if target.gang in ("none", "volcano") else "",
        labels=labels,
    )


def _slot_spec(target: KubernetesTarget, template: Manifest) -> Manifest:
    """Return a Job that never fails, whatever its pods do: their member has its own limits, and a failed Job would fail
    the JobSet. (`RestartJob` of a JobSet's failure policy is behind a feature gate, off by default in 0.12.)"""
    return {
        "parallelism": target.num_pods,
        "completions": target.num_pods,
        "completionMode": "Indexed",
        "backoffLimit": NO_LIMIT,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": [0]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


def _job_spec(target: KubernetesTarget, template: Manifest) -> Manifest:
    return {
        "parallelism": target.num_pods,
        "completions": target.num_pods,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": target.restarts,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exits(EXIT_FATAL)},
                {"action": "Ignore", "onExitCodes": _exits(EXIT_AGAIN)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": _ending(target, template),
    }


def _ending(target: KubernetesTarget, template: Manifest) -> Manifest:
    """Set the pods' deadline, for a run that fails to stop before its time limit by itself. On the pods, because on the
    owner the time in a queue would count too."""
    if target.time_limit:
        template["spec"]["activeDeadlineSeconds"] = target.time_limit
    return template


def _exits(code: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}


def _kueue_labels(target: KubernetesTarget) -> dict[str, str]:
    labels = {"kueue.x-k8s.io/queue-name": target.queue}
    return labels | ({"kueue.x-k8s.io/priority-class": target.priority} if target.priority else {})


def _kueue_annotations(target: KubernetesTarget, num_slots: int = 1) -> dict[str, str]:
    if target.near is not None and target.near.is_required and num_slots > 1:  # each slot by itself
        return {
            "kueue.x-k8s.io/podset-slice-required-topology": target.near.label,
            "kueue.x-k8s.io/podset-slice-size": str(target.num_pods),
        }
    if target.near is not None:
        how = "required" if target.near.is_required else "preferred"
        return {f"kueue.x-k8s.io/podset-{how}-topology": target.near.label}
    # Without it a quota of 8 GPUs may be 4 each on two nodes, and an admitted pod never finds a node.
    return {"kueue.x-k8s.io/podset-unconstrained-topology": "true"} if target.topology else {}


def _kai_minimum(target: KubernetesTarget) -> dict[str, str]:
    return {"kai.scheduler/batch-min-member": str(target.gang_pods)} if target.gang == "kai" else {}


def _kai_annotations(target: KubernetesTarget) -> dict[str, str]:
    if target.near is None:
        return {}
    how = "required" if target.near.is_required else "preferred"
    return {"kai.scheduler/topology": target.topology, f"kai.scheduler/topology-{how}-placement": target.near.label}
