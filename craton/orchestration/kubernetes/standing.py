"""Derive the state of a run from its objects: waiting, running or ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from craton.orchestration.backend import Outcome, Standing
from craton.orchestration.kubernetes.pods import Manifest
from craton.orchestration.kubernetes.waiting import Seen, why_waiting

# A Volcano Job's policies turn a FATAL run into Terminated; Aborted means that someone ended it by hand.
VOLCANO_OUTCOMES: dict[str, Outcome] = {"Completed": "done", "Failed": "failed", "Terminated": "failed", "Aborted": ""}
GONE = "Gone"
CONDITION_OUTCOMES: dict[str, Outcome] = {"Complete": "done", "Completed": "done", "Failed": "failed"}


@dataclass(frozen=True)
class EndedPods:
    reason: str  # Kubernetes' own code
    message: str
    outcome: Outcome


def standing_of(objects: Seen) -> Standing:
    """Return the state: running as soon as one pod runs. The sentence says why other pods wait."""
    job = f"{objects.owner['kind']}/{objects.owner['metadata']['name']}"
    there = living(objects.pods)
    nodes, restarts = _nodes(there), restarts_of(objects)
    if ended := ended_as(objects.owner):
        return Standing("ended", job, nodes, ended.reason, ended.message, restarts, outcome=ended.outcome)
    if objects.owner["metadata"].get("deletionTimestamp"):
        return leaving_of(job, there, restarts)
    running = [pod for pod in there if is_running(pod)]
    if running:
        held = len(there) - len(running)
        sentence = why_waiting(objects).sentence if held else ""
        return Standing("running", job, nodes, "", sentence, restarts)
    waiting = why_waiting(objects)
    return Standing("waiting", job, nodes, waiting.reason, waiting.sentence, restarts)


def leaving_of(job: str, pods: Iterable[Manifest], restarts: int = 0) -> Standing:
    """Return the state of a run whose owner was deleted: it ends with its last pod."""
    there = living(pods)
    if not there:
        return Standing("ended", job, (), GONE, "it was deleted", restarts)
    nodes = _nodes(there)
    have = "pod has" if len(there) == 1 else "pods have"
    where = f" ({', '.join(nodes)})" if nodes else ""
    by_hand = f"kubectl delete pod {there[0]['metadata']['name']} --force"
    sentence = (
        f"it was deleted, {len(there)} {have} not terminated yet{where}; if a node is lost for good, run `{by_hand}`"
    )
    return Standing("running", job, nodes, GONE, sentence, restarts, is_leaving=True)


def living(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that have not ended; a terminating pod has not."""
    return [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")]


def is_running(pod: Manifest) -> bool:
    """Whether a pod runs. Kubernetes also calls a pod Running while its container is in CrashLoopBackOff."""
    status = pod.get("status") or {}
    waits = any(
        (container_status.get("state") or {}).get("waiting")
        for container_status in status.get("containerStatuses") or ()
    )
    return status.get("phase") == "Running" and not waits


def ended_as(owner: Manifest) -> EndedPods | None:
    """Return how an owner ended, or None. A server does not end by itself."""
    status = owner.get("status") or {}
    if owner["kind"] == "LeaderWorkerSet":
        return None
    if owner["apiVersion"].startswith("batch.volcano.sh/"):
        state = status.get("state") or {}
        phase = str(state.get("phase") or "")
        if phase not in VOLCANO_OUTCOMES:
            return None
        return EndedPods(phase, str(state.get("message") or ""), VOLCANO_OUTCOMES[phase])
    for condition in status.get("conditions") or ():
        kind = condition.get("type")
        if kind in CONDITION_OUTCOMES and condition.get("status") == "True":
            return EndedPods(
                str(condition.get("reason") or kind), str(condition.get("message") or ""), CONDITION_OUTCOMES[kind]
            )
    return None


def restarts_of(objects: Seen) -> int:
    """Return the number of restarts of pods and containers, by the counts of the owner and the containers."""
    status = objects.owner.get("status") or {}
    counted = int(status.get("retryCount") or status.get("restarts") or 0)
    failed = int(status.get("failed") or 0) if objects.owner["kind"] == "Job" else 0
    ended = len([pod for pod in objects.pods if (pod.get("status") or {}).get("phase") == "Failed"])
    again = sum(
        int(container_status.get("restartCount") or 0)
        for pod in objects.pods
        for container_status in (pod.get("status") or {}).get("containerStatuses") or ()
    )
    return max(counted, failed, ended) + again


def _nodes(pods: Iterable[Manifest]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for pod in pods if (node := (pod.get("spec") or {}).get("nodeName"))))
