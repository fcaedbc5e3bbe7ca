"""Nodes of Kubernetes taken out of service and back: cordoned, and tainted `craton.dev/unhealthy=MARK:NoSchedule`.

What others have done to a node stays: their taints are kept, and one that was cordoned before is left so. A change is
sent with the version of the node that it was made from, so that of two at once one is refused, and tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from craton.job import Scheduler
from craton.orchestration.kubernetes.api import ApiError, Connection, ask
from craton.orchestration.kubernetes.pods import MANAGED_BY, Manifest
from craton.orchestration.service import MARK, ServiceNode

TAINT = "craton.dev/unhealthy"
REASON, WAS_CORDONED = "craton.dev/heal-reason", "craton.dev/was-cordoned"
GPU = "nvidia.com/gpu"
MOST_TRIES = 5
CONFLICT = 409
Change = Callable[[Manifest], Manifest | None]


class KubernetesService:
    def __init__(self, scheduler: Scheduler) -> None:
        self._namespace = scheduler.namespace

    def nodes(self) -> list[ServiceNode]:
        """Those with GPUs, where some have; whether one is busy is told by the pods of runs that may be seen."""
        return ask(self._nodes)

    async def _nodes(self, connection: Connection) -> list[ServiceNode]:
        every = await connection.list("v1", "Node", "")
        with_gpus = [node for node in every if GPU in ((node.get("status") or {}).get("capacity") or {})]
        namespace = self._namespace or connection.namespace
        pods = await connection.list_if_shown(["v1"], "Pod", namespace, labelSelector=f"{MANAGED_BY}=craton") or []
        busy = {
            str((pod.get("spec") or {}).get("nodeName"))
            for pod in pods
            if (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
        }
        return [_node(node, busy) for node in with_gpus or every]

    def take_out(self, node: str, mark: str, reason: str) -> None:
        ask(lambda connection: _change(connection, node, lambda found: cordoned(found, mark, reason)))

    def can_hand_over(self, action: str) -> bool:
        return False

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        """Clouds repair what is cordoned and unhealthy by their own rules."""
        return False

    def give_back(self, node: str, mark: str) -> str:
        found = next((each for each in self.nodes() if each.name == node), None)
        if found is None:
            return f"Kubernetes has no node {node}"
        if found.mark != mark:
            why = f": {found.reason}" if found.reason else ""
            return f"{node} is {'out by somebody else' if found.is_out else 'in service already'}{why}"
        is_done = ask(lambda connection: _change(connection, node, lambda now: uncordoned(now, mark)))
        return "" if is_done else f"{node} was taken over by somebody else meanwhile"


def cordoned(node: Manifest, mark: str, reason: str) -> Manifest:
    """The patch that takes a node out; pure."""
    spec = node.get("spec") or {}
    taints = [each for each in spec.get("taints") or () if each.get("key") != TAINT]
    before = (node.get("metadata") or {}).get("annotations") or {}
    was_cordoned = "true" if spec.get("unschedulable") else "false"
    if mark_of(node):  # our own cordon is not somebody else's
        was_cordoned = str(before.get(WAS_CORDONED) or "false")
    annotations = {REASON: f"{MARK}{mark} {reason}", WAS_CORDONED: was_cordoned}
    taint = {"key": TAINT, "value": mark, "effect": "NoSchedule"}
    return {"metadata": {"annotations": annotations}, "spec": {"unschedulable": True, "taints": [*taints, taint]}}


def uncordoned(node: Manifest, mark: str) -> Manifest | None:
    """The patch that gives it back; None where it does not bear the mark."""
    if mark_of(node) != mark:
        return None
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    taints = [each for each in (node.get("spec") or {}).get("taints") or () if each.get("key") != TAINT]
    return {
        "metadata": {"annotations": {REASON: None, WAS_CORDONED: None}},
        "spec": {"unschedulable": annotations.get(WAS_CORDONED) == "true" or None, "taints": taints or None},
    }


def mark_of(node: Mapping[str, Any]) -> str:
    taints = (node.get("spec") or {}).get("taints") or ()
    return next((str(each.get("value") or "") for each in taints if each.get("key") == TAINT), "")


def _node(node: Manifest, busy: set[str]) -> ServiceNode:
    name, mark = str(node["metadata"]["name"]), mark_of(node)
    conditions = (node.get("status") or {}).get("conditions") or ()
    not_ready = any(each.get("type") == "Ready" and each.get("status") != "True" for each in conditions)
    is_cordoned = bool((node.get("spec") or {}).get("unschedulable"))
    said = str(((node["metadata"].get("annotations")) or {}).get(REASON) or "")
    reason = said if mark else "it is not ready" if not_ready else "it is cordoned" if is_cordoned else ""
    return ServiceNode(name, bool(mark or not_ready or is_cordoned), reason, name in busy, mark)


async def _change(connection: Connection, name: str, change: Change) -> bool:
    """Whether there was something to change."""
    place = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    for tried in range(1, MOST_TRIES + 1):
        found = await connection.read(place)
        if found is None:
            raise ApiError(f"Kubernetes has no node {name}; `kubectl get nodes` shows what there is", 404)
        patch = change(found)
        if patch is None:
            return False
        patch["metadata"]["resourceVersion"] = (found.get("metadata") or {}).get("resourceVersion")
        try:
            await connection.patch(place, patch)
            return True
        except ApiError as error:  # somebody else changed it meanwhile
            if error.status != CONFLICT or tried == MOST_TRIES:
                raise
    raise AssertionError("the last try returns or raises")
