"""Explain why a run waits, in one sentence: pure functions over Kubernetes objects.

The deciding component comes first: Kueue's Workload, then the PodGroup of Volcano or KAI, then the pods, then the
events of a run without pods. For unschedulable pods, Karpenter's reason for not creating a node is added. The meaning
of each reason is in `waiting.toml`; an unknown reason is reported as it is, with its message, not guessed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from craton.orchestration.kubernetes.pods import WITHIN_ANNOTATION, Manifest

_NODES = re.compile(
    r"(?P<none>\d+)/(?P<all>\d+) nodes are (?:un)?available: (?P<parts>.*?)(?:\. preemption:.*|\. no new claims.*|\.?)$"
)
_FEW = re.compile(r"no nodes with enough resources were found: (?P<parts>.*)", re.DOTALL)  # KAI
_EXCLUDED = re.compile(r"Total nodes: (?P<all>\d+); excluded: (?P<parts>.*)")  # Kueue
_EXCLUSION = re.compile(r'(?P<what>\w+)(?: "(?P<name>[^"]*)")?: (?P<count>\d+)')
_KAI_FEW = "node(s) didn't have enough resources: "
_PART = re.compile(r"(?P<count>\d+) (?P<why>.+)")
_KARPENTER = "Failed to schedule pod, "  # prefix of its events; other schedulers repeat the pods' conditions in theirs
_KARPENTER_LETTERS = 300  # of an unknown message, which may list every requirement of every pool
_ANY_WORD = ("", "Pending", "Inadmissible")  # generic reasons of Kueue before 0.19
MADE_AGAIN = "its pods have ended, and Kubernetes recreates them after a back-off that doubles with every failure"
_TAINT = re.compile(r"node\(s\) had untolerated taint(?:\(s\))?(?: \{(?P<taint>[^}]*)\})?")


@dataclass(frozen=True)
class Seen:
    """The Kubernetes objects of a run."""

    owner: Manifest
    pods: Sequence[Manifest] = ()
    workload: Manifest | None = None  # Kueue's
    pod_group: Manifest | None = None  # Volcano's or KAI's
    events: Sequence[Manifest] = ()
    hidden: Sequence[str] = ()  # kinds that would explain more, which the caller may not list


@dataclass(frozen=True)
class Waiting:
    reason: str  # the component's own code
    sentence: str  # the explanation
    is_for_ever: bool = False  # waiting alone does not help


@dataclass(frozen=True)
class _Decision:
    by: str
    of: str
    reason: str
    message: str
    words: dict[str, str] = field(default_factory=dict)


def why_waiting(objects: Seen) -> Waiting:
    """Explain in one sentence why a run waits."""
    decision = _decider(objects)
    if decision is None and _have_ended(objects.pods):
        return Waiting("", MADE_AGAIN)
    if decision is None and objects.hidden:
        kinds = " and ".join(f"{item}s" for item in objects.hidden)
        return Waiting("", f"reason unknown: you may not list {kinds} in its namespace; request that permission")
    if decision is None:
        return Waiting("", "Kubernetes has not processed it yet")
    return _explained(decision, objects)


def _decider(objects: Seen) -> _Decision | None:
    for look in (_kueue, _pod_group, _containers, _unscheduled, _events):
        if result := look(objects):
            return result
    if _is_queued(objects.owner) and objects.workload is None and "Workload" not in objects.hidden:
        return _Decision("kueue", "QuotaReserved", "PendingEvaluation", "")
    return None


def _have_ended(pods: Sequence[Manifest]) -> bool:
    """Whether all pods have ended while the owner has not: after a failure it backs off before it recreates them."""
    phases = [str((pod.get("status") or {}).get("phase") or "") for pod in pods]
    return "Failed" in phases and all(phase in ("Failed", "Succeeded") for phase in phases)


def _kueue(objects: Seen) -> _Decision | None:
    if objects.workload is None:
        return None
    conditions = _conditions(objects.workload, "conditions")
    evicted, reserved = conditions.get("Evicted"), conditions.get("QuotaReserved")
    admitted, gated = conditions.get("Admitted"), conditions.get("BlockedOnPreemptionGates")
    if evicted and evicted.get("status") == "True" and not _is_newer(reserved, evicted):
        return _Decision("kueue", "Evicted", evicted.get("reason", ""), evicted.get("message", ""))
    if gated and gated.get("status") == "True":
        return _Decision("kueue", "BlockedOnPreemptionGates", gated.get("reason", ""), gated.get("message", ""))
    if reserved is None:  # a new Workload may have no condition yet
        return _Decision("kueue", "QuotaReserved", "PendingEvaluation", "")
    if reserved.get("status") != "True":
        return _Decision("kueue", "QuotaReserved", reserved.get("reason", ""), reserved.get("message", ""))
    if admitted is None or admitted.get("status") != "True":
        checks = (objects.workload.get("status") or {}).get("admissionChecks") or ()
        open_checks = [
            f"{check.get('name')} ({check.get('state')})" for check in checks if check.get("state") != "Ready"
        ]
        reason = (admitted or {}).get("reason") or "UnsatisfiedAdmissionChecks"
        words = {"checks": ", ".join(open_checks) or "of its queue"}
        return _Decision("kueue", "Admitted", reason, (admitted or {}).get("message", ""), words)
    return None


def _pod_group(objects: Seen) -> _Decision | None:
    group = objects.pod_group
    if group is None:
        return None
    status = group.get("status") or {}
    if str(group.get("apiVersion", "")).startswith("scheduling.run.ai/"):
        for condition in reversed(status.get("schedulingConditions") or ()):
            if condition.get("status", "True") == "True":
                return _kai_condition(condition)
        return None
    if status.get("phase") == "Running":
        return None
    unschedulable = _conditions(group, "conditions").get("Unschedulable")
    if unschedulable and unschedulable.get("status") == "True":
        return _Decision("volcano", "Unschedulable", unschedulable.get("reason", ""), unschedulable.get("message", ""))
    phase = status.get("phase")
    return _Decision("volcano", "phase", phase, "") if phase in ("Pending", "Inqueue") else None


def _kai_condition(condition: Manifest) -> _Decision:
    details = condition.get("reasons") or ()
    reason = next((item.get("reason") for item in details if item.get("reason")), None) or condition.get("reason", "")
    messages = [str(detail["message"]) for detail in details if detail.get("message")] or [condition.get("message", "")]
    return _Decision("kai", "UnschedulableOnNodePool", reason, "; ".join(messages))


def _containers(objects: Seen) -> _Decision | None:
    """Return the most common waiting reason of containers in scheduled pods; errors before normal startup."""
    messages_by_reason: dict[str, list[str]] = {}
    for pod in objects.pods:
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            held = (status.get("state") or {}).get("waiting")
            if held:
                messages_by_reason.setdefault(str(held.get("reason", "")), []).append(str(held.get("message", "")))
    if not messages_by_reason:
        return None
    reason = max(
        messages_by_reason,
        key=lambda item: (item not in ("ContainerCreating", "PodInitializing"), len(messages_by_reason[item])),
    )
    if reason == "ContainerCreating" and (result := _event(objects, ("FailedMount", "FailedAttachVolume"))):
        return result
    return _Decision(
        "kubernetes",
        "container",
        reason,
        messages_by_reason[reason][0],
        {"waiting": str(len(messages_by_reason[reason]))},
    )


def _unscheduled(objects: Seen) -> _Decision | None:
    held = [
        condition
        for pod in objects.pods
        if (condition := _conditions(pod, "conditions").get("PodScheduled")) and condition.get("status") == "False"
    ]
    if not held:
        return None
    first = next((item for item in held if item.get("reason") != "SchedulingGated"), held[0])
    return _Decision(
        "kubernetes", "PodScheduled", first.get("reason", ""), first.get("message", ""), {"waiting": str(len(held))}
    )


def _events(objects: Seen) -> _Decision | None:
    return None if objects.pods else _event(objects, ("FailedCreate",))


def _event(objects: Seen, reasons: tuple[str, ...]) -> _Decision | None:
    newest = None
    for event in objects.events:
        if event.get("reason") in reasons and (newest is None or _moment(event) >= _moment(newest)):
            newest = event
    return _Decision("kubernetes", "event", newest["reason"], newest.get("message") or "") if newest else None


def _explained(decision: _Decision, objects: Seen) -> Waiting:
    facts = _facts()
    detail, meant, never = _detail(decision)
    if counts := _nodes_beside(decision, objects):
        detail = f"{detail}; {counts}" if detail not in ("", _one_line(decision.message)) else counts
    if not_made := _not_made(decision, objects):
        detail = f"{detail}; {not_made}" if detail else not_made
    fact = facts["reasons"].get((decision.by, decision.of, decision.reason))
    if meant and decision.by == "kueue" and decision.reason in (*_ANY_WORD, "TopologyPlacementFailed"):
        # A generic reason covers several cases; the message has the specific one.
        fact = facts["reasons"].get((decision.by, decision.of, meant), fact)
    if fact is None:
        message = f": {_one_line(decision.message)}" if decision.message else ""
        return Waiting(decision.reason, f"{decision.by} reports {decision.reason or decision.of}{message}", never)
    words = {
        "queue": _queue(objects),
        "pods": _counted(_asked_pods(objects), "pod"),
        "within": f" on one {level}" if (level := _within(objects.owner)) else "",
        "waiting": "some",
        "checks": "",
        "detail": f": {detail}" if detail else "",
        "message": _one_line(decision.message),
        **decision.words,
    }
    reason = meant or decision.reason if fact["reason"] != decision.reason else decision.reason
    return Waiting(reason, str(fact["sentence"]).format(**words), bool(fact.get("for_ever")) or never)


def _detail(decision: _Decision) -> tuple[str, str, bool]:
    """Return (explanation of a message, the reason it stands for, whether it is permanent); the message itself if no
    pattern matches."""
    if decision.of == "PodScheduled" and (counted := _node_counts(decision.message)):
        return counted, "", False
    for pattern, fact in _facts()["messages"]:
        if match := pattern.search(decision.message):
            return str(fact["sentence"]).format(**match.groupdict()), fact.get("reason", ""), bool(fact.get("for_ever"))
    return _one_line(decision.message), "", False


def _node_counts(message: str) -> str:
    """Explain `0/64 nodes are available: 60 Insufficient nvidia.com/gpu, 4 node(s) had untolerated taint {x: y}`."""
    match = _NODES.search(_one_line(message))
    if match is None:
        return ""
    parts = []
    for text in match["parts"].split(", "):
        if part := _PART.fullmatch(text.strip()):
            parts.append(f"{part['count']} {_node_words(part['why'])}")
        elif parts:
            parts[-1] += f", {text}"
    return f"of {_counted(int(match['all']), 'node')}, {', '.join(parts)}" if parts else ""


def _nodes_beside(decision: _Decision, objects: Seen) -> str:
    """Return the problems per node, where they are reported besides the reason: Kueue and KAI append them to their
    message, Volcano sets them on its pods."""
    message = _one_line(decision.message)
    if decision.by == "kueue" and (match := _EXCLUDED.search(message)):
        parts = [
            f"{entry['count']} {_exclusion_words(entry['what'], entry['name'])}"
            for entry in _EXCLUSION.finditer(match["parts"])
        ]
        return f"of {_counted(int(match['all']), 'node')}, {', '.join(parts)}" if parts else ""
    if decision.by == "kai" and (match := _FEW.search(message)):
        counted = [part for word in match["parts"].split(". ") if (part := _PART.fullmatch(word.strip(" .")))]
        parts = [f"{part['count']} {_node_words(part['why'])}" for part in counted]
        return f"of the nodes, {', '.join(parts)}" if parts else ""
    if decision.by == "volcano" and decision.of == "Unschedulable" and "node(s)" not in message:
        held = [_conditions(pod, "conditions").get("PodScheduled") or {} for pod in objects.pods]
        return next((counts for item in held if (counts := _node_counts(str(item.get("message", ""))))), "")
    return ""


def _not_made(decision: _Decision, objects: Seen) -> str:
    """Return why Karpenter created no node for pending pods, by its newest event; it may have created one since."""
    if decision.of not in ("PodScheduled", "Unschedulable", "UnschedulableOnNodePool"):
        return ""
    unscheduled = {pod["metadata"]["name"] for pod in objects.pods if not (pod.get("spec") or {}).get("nodeName")}
    events = [
        event
        for event in objects.events
        if event.get("reason") == "FailedScheduling"
        and str(event.get("message", "")).startswith(_KARPENTER)
        and (event.get("involvedObject") or {}).get("name") in unscheduled
    ]
    if not events:
        return ""
    newest = max(events, key=_moment)
    why = _detail(_Decision("karpenter", "event", "", newest["message"].removeprefix(_KARPENTER)))[0]
    if len(why) > _KARPENTER_LETTERS:
        why = f"{why[:_KARPENTER_LETTERS]}…"
    return f"Karpenter created no node at {_moment(newest)[11:16]} UTC: {why}"


def _exclusion_words(kind: str, name: str | None) -> str:
    if kind == "resource":
        return f"have insufficient {name}"
    if kind == "taint":
        return f"have the taint {name}, which is missing in `tolerations:` of the cluster file"
    return f"are excluded by {kind}" + (f" {name}" if name else "")


def _node_words(why: str) -> str:
    if why.startswith(_KAI_FEW):
        return f"have insufficient {why.removeprefix(_KAI_FEW)}"
    if why.startswith("Insufficient "):
        return f"have insufficient {why.removeprefix('Insufficient ')}"
    if taint := _TAINT.fullmatch(why):
        return f"have the taint {taint['taint'] or 'of others'}, which is missing in `tolerations:` of the cluster file"
    return {
        "node(s) didn't match Pod's node affinity/selector": "do not match its instance type or pool",
        "node(s) didn't match pod affinity rules": "are too far from the run's other pods (pod affinity)",
        "node(s) didn't satisfy existing pods anti-affinity rules": "are blocked by the anti-affinity of other pods",
        "node(s) were unschedulable": "are cordoned",
        "node(s) had volume node affinity conflict": "cannot attach its volume",
        "node(s) didn't find available persistent volumes to bind": "have no volume for its claim",
        "node(s) didn't match pod topology spread constraints": "would violate topology spread constraints",
        "node(s) didn't have free ports for the requested pod ports": "have its port in use",
        "Too many pods": "are at their pod limit",
    }.get(why, why)


@lru_cache(maxsize=1)
def _facts() -> dict[str, Any]:
    document = tomllib.loads(files(__package__).joinpath("waiting.toml").read_text(encoding="utf-8"))
    return {
        "reasons": {(entry["by"], entry["of"], entry["reason"]): entry for entry in document["reason"]},
        "messages": [(re.compile(item["pattern"], re.DOTALL), item) for item in document["message"]],
    }


def _conditions(manifest: Manifest, key: str) -> dict[str, Manifest]:
    """Return conditions by type, the newest of each: Volcano adds one per attempt."""
    return {item.get("type", ""): item for item in (manifest.get("status") or {}).get(key) or ()}


def _is_newer(condition: Manifest | None, than: Manifest) -> bool:
    if condition is None or condition.get("reason") == than.get("reason"):
        return False
    return str(condition.get("lastTransitionTime", "")) > str(than.get("lastTransitionTime", ""))


def _moment(event: Manifest) -> str:
    return str(
        event.get("lastTimestamp") or event.get("eventTime") or (event.get("metadata") or {}).get("creationTimestamp")
    )


def _labels(manifest: Manifest) -> dict[str, str]:
    return (manifest.get("metadata") or {}).get("labels") or {}


def _is_queued(owner: Manifest) -> bool:
    return "kueue.x-k8s.io/queue-name" in _labels(owner)


def _queue(objects: Seen) -> str:
    labels = _labels(objects.owner)
    named = labels.get("kueue.x-k8s.io/queue-name") or labels.get("kai.scheduler/queue")
    return str(named or (objects.owner.get("spec") or {}).get("queue") or "default")


def _within(owner: Manifest) -> str:
    return str(((owner.get("metadata") or {}).get("annotations") or {}).get(WITHIN_ANNOTATION, ""))


def _asked_pods(objects: Seen) -> int:
    spec = objects.owner.get("spec") or {}
    jobs = spec.get("replicatedJobs") or ()
    if jobs:
        return sum(int(job["template"]["spec"].get("parallelism", 1)) * int(job.get("replicas", 1)) for job in jobs)
    if spec.get("tasks"):
        return sum(int(task.get("replicas", 1)) for task in spec["tasks"])
    size = (spec.get("leaderWorkerTemplate") or {}).get("size")
    return int(spec.get("parallelism") or size or len(objects.pods) or 1)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
