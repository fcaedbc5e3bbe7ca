"""Read all objects of runs from a cluster: one request per kind, for any number of runs.

Listing owners and pods is required. Objects that explain a wait (Kueue's Workloads, PodGroups, events) are read only if
a run waits; a caller without permission to list them gets less detail, not an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from craton.orchestration.kubernetes.api import Connection
from craton.orchestration.kubernetes.pods import CONTAINER, INSTANCE, MANAGED_BY, Manifest
from craton.orchestration.kubernetes.standing import ended_as, is_running
from craton.orchestration.kubernetes.waiting import Seen

OURS = f"{MANAGED_BY}=craton"
KUEUE_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")  # older releases know only the second
VOLCANO_JOBS = "batch.volcano.sh/v1alpha1"
VOLCANO_GROUPS = "scheduling.volcano.sh/v1beta1"
KAI_GROUPS = "scheduling.run.ai/v2alpha2"
MAX_NAMES = 50  # in one selector, which is part of a URL
SECONDS_LETTERS = len("2026-11-15T10:00:00")


async def seen_of(
    connection: Connection, namespace: str, kinds: Mapping[str, str]
) -> tuple[dict[str, Seen], list[Manifest]]:
    """Return (KIND/NAME → its objects, all pods of runs); `kinds` has one KIND/NAME per version to look for. Pods
    outlive a deleted owner while they save."""
    versions = {version: job.partition("/")[0] for version, job in kinds.items()}
    owners_lists, pods = await asyncio.gather(
        asyncio.gather(
            *(connection.list(version, kind, namespace, labelSelector=OURS) for version, kind in versions.items())
        ),
        connection.list("v1", "Pod", namespace, labelSelector=OURS),
    )
    owners = [owner for listed in owners_lists for owner in listed]
    pods_of: dict[str, list[Manifest]] = {}
    for pod in pods:
        pods_of.setdefault(pod["metadata"]["labels"].get(INSTANCE, ""), []).append(pod)
    waiting = [owner for owner in owners if not _has_started(owner, pods_of.get(_instance_of(owner), []))]
    hidden: set[str] = set()
    workloads, groups, events = await asyncio.gather(
        _workloads(connection, namespace, waiting, hidden),
        _pod_groups(connection, namespace, waiting, hidden),
        _events(connection, namespace, waiting, hidden),
    )
    by_owner = {}
    for owner in owners:
        uid, its_pods = owner["metadata"]["uid"], pods_of.get(_instance_of(owner), [])
        workload, group = workloads.get(uid), groups.get(uid)
        parts = [item for item in (owner, workload, group, *its_pods) if item is not None]
        messages = [event for event in events if is_about(event, owner, parts)]
        objects = Seen(owner, its_pods, workload, group, messages, sorted(hidden))
        by_owner[f"{owner['kind']}/{owner['metadata']['name']}"] = objects
    return by_owner, pods


def is_about(event: Manifest, owner: Manifest, parts: Sequence[Manifest]) -> bool:
    """Whether an event concerns one of these objects, or the object between an owner and its pods. That one is not
    read, but its name is known; an older object of the same name may have had events as well."""
    about = event.get("involvedObject") or {}
    if about.get("uid") in {part["metadata"]["uid"] for part in parts}:
        return True
    name = owner["metadata"]["name"]
    between: dict[str, set[tuple[str, str]]] = {
        "JobSet": {("Job", job) for job in _jobs_of(owner)},
        "LeaderWorkerSet": {("StatefulSet", name), ("StatefulSet", f"{name}-0")},
    }
    if (about.get("kind"), about.get("name")) not in between.get(owner["kind"], set()):
        return False
    moment = str(event.get("lastTimestamp") or event.get("eventTime") or "")
    return moment[:SECONDS_LETTERS] >= str(owner["metadata"].get("creationTimestamp") or "")[:SECONDS_LETTERS]


def _jobs_of(jobset: Manifest) -> list[str]:
    replicated = (jobset.get("spec") or {}).get("replicatedJobs") or [{"name": CONTAINER}]
    return [
        f"{jobset['metadata']['name']}-{job['name']}-{number}"
        for job in replicated
        for number in range(int(job.get("replicas", 1)))
    ]


async def _workloads(
    connection: Connection, namespace: str, owners: list[Manifest], hidden: set[str]
) -> dict[str, Manifest]:
    """Return owner's uid → Kueue's Workload."""
    uids = [owner["metadata"]["uid"] for owner in owners if "kueue.x-k8s.io/queue-name" in owner["metadata"]["labels"]]
    result = {}
    for first in range(0, len(uids), MAX_NAMES):
        selector = f"kueue.x-k8s.io/job-uid in ({','.join(uids[first : first + MAX_NAMES])})"
        listed = await connection.list_if_shown(KUEUE_VERSIONS, "Workload", namespace, labelSelector=selector)
        if listed is None:
            hidden.add("Workload")
        for item in listed or ():
            result[item["metadata"]["labels"]["kueue.x-k8s.io/job-uid"]] = item
    return result


async def _pod_groups(
    connection: Connection, namespace: str, owners: list[Manifest], hidden: set[str]
) -> dict[str, Manifest]:
    """Return owner's uid → Volcano's or KAI's PodGroup, whose name ends with that uid."""
    versions = set()
    if any(entry["apiVersion"] == VOLCANO_JOBS for entry in owners):
        versions.add(VOLCANO_GROUPS)
    if any("kai.scheduler/queue" in item["metadata"]["labels"] for item in owners):
        versions.add(KAI_GROUPS)
    result: dict[str, Manifest] = {}
    for version in sorted(versions):
        listed = await connection.list_if_shown([version], "PodGroup", namespace)
        if listed is None:
            hidden.add("PodGroup")
        for group in listed or ():
            name = group["metadata"]["name"]
            uids = [owner["metadata"]["uid"] for owner in owners if name.endswith(owner["metadata"]["uid"])]
            result |= dict.fromkeys(uids, group)
    return result


async def _events(connection: Connection, namespace: str, owners: list[Manifest], hidden: set[str]) -> list[Manifest]:
    if not owners:
        return []
    listed = await connection.list_if_shown(["v1"], "Event", namespace, fieldSelector="type=Warning")
    if listed is None:
        hidden.add("Event")
    return listed or []


def _instance_of(owner: Manifest) -> str:
    return str(owner["metadata"]["labels"].get(INSTANCE, ""))


def _has_started(owner: Manifest, pods: list[Manifest]) -> bool:
    """Whether all pods run, or the run has ended: there is no wait to explain."""
    return ended_as(owner) is not None or (
        bool(pods) and all(is_running(pod) or (pod.get("status") or {}).get("phase") == "Succeeded" for pod in pods)
    )
