"""Take Kubernetes nodes out of service and back: cordon them, with the taint `craton.dev/unhealthy=MARK:NoSchedule`.

Changes by others stay: their taints are kept, and a node that is already out is left alone. A change carries the node's
resource version, so one of two concurrent changes is refused and retried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from craton.job.cluster import SchedulerSettings
from craton.orchestration.errors import SchedulerError
from craton.orchestration.kubernetes.api import EVERY_NAMESPACE, Connection, KubernetesApiError, ask
from craton.orchestration.kubernetes.pods import MANAGED_BY, Manifest
from craton.orchestration.node_maintenance import MARK, ServiceNode

TAINT = "craton.dev/unhealthy"
REASON = "craton.dev/heal-reason"
GPU, OF_NVIDIA = "nvidia.com/gpu", "nvidia.com/"  # whole GPUs; whole GPUs and MIG slices
NODE_POOL = "karpenter.sh/nodepool"
# https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-resiliency-node-labels.html, read 2026-11-16:
# Schedulable, Unschedulable, UnschedulablePendingReboot, UnschedulablePendingReplacement.
HYPERPOD_HEALTH, HYPERPOD_OUT = "sagemaker.amazonaws.com/node-health-status", "Unschedulable"
# Taints of autoscalers that remove nodes: https://karpenter.sh/docs/concepts/disruption/ (v1; `disruption` before v1)
# and cluster-autoscaler/utils/taints/taints.go of kubernetes/autoscaler, read 2026-11-16.
GOING = ("karpenter.sh/disrupted", "karpenter.sh/disruption", "ToBeDeletedByClusterAutoscaler")
NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
MAX_TRIES = 5
CONFLICT = 409
Change = Callable[[Manifest], Manifest | None]


class KubernetesService:
    def __init__(self, scheduler: SchedulerSettings) -> None:
        self._namespace, self._pool = scheduler.namespace, scheduler.node_pool

    def nodes(self) -> list[ServiceNode]:
        """Return the nodes of the pool or cluster: those with GPUs, if any have. A node is idle if no pod has its GPUs;
        without permission to list all pods, or without GPUs, only nodes busy with runs are known."""
        return ask(self._nodes)

    async def _nodes(self, connection: Connection) -> list[ServiceNode]:
        in_pool = {"labelSelector": f"{NODE_POOL}={self._pool}"} if self._pool else {}
        every = await connection.list("v1", "Node", "", **in_pool)
        # A node that Craton took out stays in the list even if its driver, and so its GPUs, do not come back.
        with_gpus = [node for node in every if has_gpus(node) or mark_of(node)] if any(map(has_gpus, every)) else []
        pods = await connection.list_if_shown(["v1"], "Pod", EVERY_NAMESPACE, fieldSelector=NOT_ENDED)
        knows_idle = bool(with_gpus) and pods is not None
        if pods is None:
            namespace, ours = self._namespace or connection.namespace, f"{MANAGED_BY}=craton"
            pods = await connection.list_if_shown(["v1"], "Pod", namespace, fieldSelector=NOT_ENDED, labelSelector=ours)
        busy = {str((pod.get("spec") or {}).get("nodeName")) for pod in pods or () if is_work(pod)}
        return [service_node(node, busy, knows_idle) for node in with_gpus or every]

    def take_out(self, node: str, mark: str, reason: str) -> None:
        ask(lambda connection: _change(connection, node, lambda item: cordoned(item, mark, reason)))

    def can_hand_over(self, action: str) -> bool:
        return False

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        """Return False: clouds repair cordoned, unhealthy nodes by their own rules."""
        return False

    def give_back(self, node: str, mark: str) -> str:
        return ask(lambda connection: _give_back(connection, node, mark))


def cordoned(node: Manifest, mark: str, reason: str) -> Manifest:
    """Return the patch that takes a node out; pure. SchedulerError if it is already out."""
    if out := why_out(node):
        raise SchedulerError(f"{node['metadata']['name']} is already out of service ({out}); it is left as it is")
    taints = (node.get("spec") or {}).get("taints") or ()
    taint = {"key": TAINT, "value": mark, "effect": "NoSchedule"}
    return {
        "metadata": {"annotations": {REASON: f"{MARK}{mark} {reason}"}},
        "spec": {"unschedulable": True, "taints": [*taints, taint]},
    }


def uncordoned(node: Manifest, mark: str) -> Manifest | None:
    """Return the patch that puts a node back; None if it does not carry the mark."""
    if mark_of(node) != mark:
        return None
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if taint.get("key") != TAINT]
    return {"metadata": {"annotations": {REASON: None}}, "spec": {"unschedulable": None, "taints": taints or None}}


def mark_of(node: Mapping[str, Any]) -> str:
    taints = (node.get("spec") or {}).get("taints") or ()
    return next((str(taint.get("value") or "") for taint in taints if taint.get("key") == TAINT), "")


def has_gpus(node: Manifest) -> bool:
    return GPU in ((node.get("status") or {}).get("capacity") or {})


def why_out(node: Manifest) -> str:
    """Return why a node takes no new work; empty if it does."""
    metadata, spec = node["metadata"], node.get("spec") or {}
    if mark := mark_of(node):
        return str((metadata.get("annotations") or {}).get(REASON) or f"{MARK}{mark}")
    conditions = (node.get("status") or {}).get("conditions") or ()
    if any(condition.get("type") == "Ready" and condition.get("status") != "True" for condition in conditions):
        return "it is not ready"
    health = str((metadata.get("labels") or {}).get(HYPERPOD_HEALTH) or "")
    if health.startswith(HYPERPOD_OUT):
        return f"HyperPod reports it as {health}"
    if taken := [taint["key"] for taint in spec.get("taints") or () if taint.get("key") in (TAINT, *GOING)]:
        return f"it is tainted {taken[0]}"
    return "it is cordoned" if spec.get("unschedulable") else ""


def is_work(pod: Manifest) -> bool:
    """Whether a pod belongs to a run or requests GPUs."""
    spec = pod.get("spec") or {}
    if ((pod.get("metadata") or {}).get("labels") or {}).get(MANAGED_BY) == "craton" or spec.get("resourceClaims"):
        return True
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    asked = [name for container in containers for name in (container.get("resources") or {}).get("requests") or ()]
    return any(name.startswith(OF_NVIDIA) for name in asked)


def service_node(node: Manifest, busy: Collection[str], knows_idle: bool) -> ServiceNode:
    name, out = str(node["metadata"]["name"]), why_out(node)
    return ServiceNode(name, bool(out), out, True if name in busy else False if knows_idle else None, mark_of(node))


def _place(name: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}


async def _give_back(connection: Connection, node: str, mark: str) -> str:
    manifest = await connection.read(_place(node))
    if manifest is None:
        return f"Kubernetes has no node {node}"
    if mark_of(manifest) != mark:
        reason = why_out(manifest)
        return f"{node} was taken out by someone else: {reason}" if reason else f"{node} is already in service"
    is_done = await _change(connection, node, lambda now: uncordoned(now, mark))
    return "" if is_done else f"{node} was changed by someone else meanwhile"


async def _change(connection: Connection, name: str, change: Change) -> bool:
    """Apply a change to a node; return whether there was something to change."""
    place = _place(name)
    for tried in range(1, MAX_TRIES + 1):
        manifest = await connection.read(place)
        if manifest is None:
            raise KubernetesApiError(f"Kubernetes has no node {name}; `kubectl get nodes` lists them", 404)
        patch = change(manifest)
        if patch is None:
            return False
        patch["metadata"]["resourceVersion"] = (manifest.get("metadata") or {}).get("resourceVersion")
        try:
            await connection.patch(place, patch)
            return True
        except KubernetesApiError as error:  # someone else changed it meanwhile
            if error.status != CONFLICT or tried == MAX_TRIES:
                raise
    raise AssertionError("the last try returns or raises")
