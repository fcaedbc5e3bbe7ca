"""From the objects of a run to where it stands: waiting, running or ended. Pure."""

from __future__ import annotations

from craton.orchestration.backend import Standing
from craton.orchestration.kubernetes.pods import Manifest
from craton.orchestration.kubernetes.waiting import Seen, why_waiting

ENDED_VOLCANO = ("Completed", "Failed", "Terminated", "Aborted")


def standing_of(seen: Seen) -> Standing:
    """It runs while all pods of the owner's gang have started; before that it waits, and why is asked."""
    job = f"{seen.owner['kind']}/{seen.owner['metadata']['name']}"
    nodes = tuple(dict.fromkeys(node for pod in _living(seen) if (node := (pod.get("spec") or {}).get("nodeName"))))
    restarts = restarts_of(seen)
    if ended := ended_as(seen.owner):
        reason, message = ended
        return Standing("ended", job, nodes, reason, message, restarts)
    if seen.owner["metadata"].get("deletionTimestamp"):
        return Standing("ended", job, nodes, "Deleted", "it is being removed", restarts)
    running = [pod for pod in _living(seen) if (pod.get("status") or {}).get("phase") == "Running"]
    if running:
        held = len(_living(seen)) - len(running)
        sentence = why_waiting(seen).sentence if held else ""
        return Standing("running", job, nodes, "", sentence, restarts)
    waiting = why_waiting(seen)
    return Standing("waiting", job, nodes, waiting.reason, waiting.sentence, restarts)


def ended_as(owner: Manifest) -> tuple[str, str] | None:
    """(their word, their message) of an owner that has ended. A server does not end by itself."""
    status = owner.get("status") or {}
    if owner["kind"] == "LeaderWorkerSet":
        return None
    if owner["apiVersion"].startswith("batch.volcano.sh/"):
        state = status.get("state") or {}
        return (state["phase"], state.get("message") or "") if state.get("phase") in ENDED_VOLCANO else None
    for condition in status.get("conditions") or ():
        if condition.get("type") in ("Complete", "Completed", "Failed") and condition.get("status") == "True":
            return str(condition.get("reason") or condition["type"]), str(condition.get("message") or "")
    return None


def restarts_of(seen: Seen) -> int:
    """How often a pod was made again, by what the owner counts or the containers do."""
    status = seen.owner.get("status") or {}
    counted = int(status.get("retryCount") or status.get("restarts") or 0)
    failed = int(status.get("failed") or 0) if seen.owner["kind"] == "Job" else 0
    ended = len([pod for pod in seen.pods if (pod.get("status") or {}).get("phase") == "Failed"])
    again = sum(
        int(each.get("restartCount") or 0)
        for pod in seen.pods
        for each in (pod.get("status") or {}).get("containerStatuses") or ()
    )
    return max(counted, failed, ended) + again


def _living(seen: Seen) -> list[Manifest]:
    return [pod for pod in seen.pods if (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")]
