"""Why a run waits, from what Kueue, Volcano, KAI, the default scheduler and the kubelet say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kubernetes_jobs import SHARED, cluster, job, target
from kubernetes_schemas import problems

from craton.orchestration.kubernetes.emitters import manifests
from craton.orchestration.kubernetes.standing import standing_of
from craton.orchestration.kubernetes.waiting import MADE_AGAIN, Seen, Waiting, _facts, why_waiting

UID = "7d1f"
KUEUE = "kueue.x-k8s.io/v1beta2"


def owner(gang: str, kind: str = "pretrain") -> dict[str, Any]:
    """As the API server has it."""
    scheduler = {"gang": gang, "queue": "research", **({"topology": "efa"} if gang in ("kueue", "kai") else {})}
    place = cluster(nodes=1 if kind == "serve" else 4, scheduler=scheduler if gang != "none" else {})
    made = manifests(target(job(kind, place, placement={"within": "leaf"}), SHARED))[0]
    made["metadata"]["uid"] = UID
    return made


def condition(kind: str, status: str, reason: str, message: str = "", at: str = "10:00") -> dict[str, Any]:
    moment = f"2026-11-15T{at}:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


def workload(*conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    pod = {"spec": {"containers": [{"name": "node", "image": "x"}]}}
    spec = {"queueName": "research", "podSets": [{"name": "node", "count": 4, "template": pod}]}
    made = {"apiVersion": KUEUE, "kind": "Workload", "metadata": {"name": "jobset-llm-1"}, "spec": spec}
    made["status"] = {"conditions": list(conditions), **status}
    assert problems(made) == []
    return made


def pod(index: int, phase: str = "Pending", *conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    spec = {"nodeName": f"node-{index}"} if phase == "Running" else {}
    return {
        "metadata": {"name": f"llm-{index}"},
        "spec": spec,
        "status": {"phase": phase, "conditions": list(conditions), **status},
    }


def waiting_container(index: int, reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(index, containerStatuses=[{"name": "node", "state": state, "restartCount": 0}])


def event(reason: str, message: str, at: str = "10:00", about: str = "llm") -> dict[str, Any]:
    return {
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-11-15T{at}:00Z",
        "involvedObject": {"name": about},
    }


KUEUE_CASES = [
    (
        "WaitingForQuota",
        "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor p5, 16 more "
        "needed",
        "needs 4 pods at once on one leaf, and the queue research has not enough unused quota: 16 more "
        "nvidia.com/gpu of p5 are needed",
    ),
    (
        "ExceedsMaxQuota",
        "couldn't assign flavors to pod set node: insufficient quota for nvidia.com/gpu in flavor p5, previously "
        "considered podsets requests (0) + current podset request (32) > maximum capacity (16)",
        "requests more than the maximum quota of the queue research: it requests 32 nvidia.com/gpu of p5, whose "
        "maximum is 16; use fewer nodes, or request a larger quota",
    ),
    (
        "TopologyPlacementFailed",
        'couldn\'t assign flavors to pod set node: topology "efa" allows to fit only 3 out of 4 pod(s)',
        "needs 4 pods on one leaf, and no topology domain has enough room: only 3 of 4 pods fit",
    ),
    (
        "NoMatchingFlavor",
        "couldn't assign flavors to pod set node: resource vpc.amazonaws.com/efa unavailable in ClusterQueue",
        "no resource flavor of the queue research fits its pods: the queue does not cover vpc.amazonaws.com/efa: "
        "its administrator must add it to coveredResources",
    ),
    (
        "Misconfigured",
        "LocalQueue research doesn't exist",
        "the queue research is misconfigured: the queue research does not exist; `kubectl get localqueues` lists "
        "the queues; its administrator must fix it",
    ),
    (
        "TopologyPlacementFailed",
        "couldn't assign flavors to pod set node: topology \"efa\" doesn't allow to fit any of 4 pod(s). Total nodes: "
        '8; excluded: resource "nvidia.com/gpu": 5, taint "dedicated=infra:NoSchedule": 2, nodeSelector: 1',
        "needs 4 pods on one leaf, and no topology domain has enough room: none of its pods fits; of 8 nodes, 5 "
        "have insufficient nvidia.com/gpu, 2 have the taint dedicated=infra:NoSchedule, which is missing in "
        "`tolerations:` of the cluster file, 1 are excluded by nodeSelector",
    ),
    (
        "NoMatchingFlavor",
        "couldn't assign flavors to pod set node: flavor p4d doesn't match node affinity, flavor cpu doesn't match "
        "node affinity",
        "no resource flavor of the queue research fits its pods: the nodes of p4d do not match the job's instance "
        "type or pool",
    ),
    (
        "NoMatchingFlavor",
        "couldn't assign flavors to pod set node: untolerated taint {nvidia.com/gpu present NoSchedule <nil>} in "
        "flavor p5, flavor cpu doesn't match node affinity",
        "no resource flavor of the queue research fits its pods: the nodes of p5 have the taint {nvidia.com/gpu "
        "present NoSchedule <nil>}, which is missing in `tolerations:` of the cluster file",
    ),
    (
        "Misconfigured",
        "Workload namespace doesn't match ClusterQueue selector",
        "the queue research is misconfigured: its namespace may not use the queue: it does not match the "
        "ClusterQueue's namespaceSelector; its administrator must fix it",
    ),
    (
        "Misconfigured",
        "ClusterQueue p5 is inactive",
        "the queue research is misconfigured: the ClusterQueue p5 is inactive; `kubectl describe ClusterQueue p5` "
        "shows why; its administrator must fix it",
    ),
    ("WaitingForPreemptedWorkloads", "", "other jobs are being preempted for it and have not ended yet"),
    ("Suspended", "", "the queue research is on hold"),
    ("PendingEvaluation", "", "Kueue has not evaluated it yet in the queue research"),
    ("WaitingForPodsReady", "", "the queue research admits no job until the pods of the previous job are ready"),
]


@pytest.mark.parametrize(("reason", "message", "sentence"), KUEUE_CASES)
def test_kueue_has_not_reserved_the_quota(reason: str, message: str, sentence: str) -> None:
    seen = Seen(owner("kueue"), workload=workload(condition("QuotaReserved", "False", reason, message)))
    found = why_waiting(seen)
    assert (found.reason, found.sentence) == (reason, sentence)
    assert found.is_for_ever == (reason in ("ExceedsMaxQuota", "NoMatchingFlavor", "Misconfigured"))


@pytest.mark.parametrize(("reason", "message", "sentence"), KUEUE_CASES[:10])
def test_an_older_kueue_has_one_word_for_all_and_the_message_tells_more(
    reason: str, message: str, sentence: str
) -> None:
    for word in ("Pending", "Inadmissible"):
        found = why_waiting(Seen(owner("kueue"), workload=workload(condition("QuotaReserved", "False", word, message))))
        assert (found.reason, found.sentence) == (reason, sentence)


def test_labels_that_no_node_has_do_not_read_as_a_full_cluster() -> None:
    def told(word: str, message: str) -> Waiting:
        said = condition("QuotaReserved", "False", word, f"couldn't assign flavors to pod set node: {message}")
        return why_waiting(Seen(owner("kueue"), workload=workload(said)))

    for word in ("TopologyPlacementFailed", "Pending"):
        found = told(word, "no topology domains at level: rack")
        assert found.sentence.startswith(
            "Kueue has no node for its pods: no schedulable node of the queue has the label rack and"
        )
        assert not found.is_for_ever, "nodes that are cordoned are told in the same words"
        mistyped = told(word, "no requested topology level: rakc")
        assert mistyped.sentence == (
            "no resource flavor of the queue research fits its pods: their Topology has no level rakc, which "
            "`levels:` of the cluster file names"
        )
        assert mistyped.is_for_ever


def test_kueue_s_other_stages() -> None:
    def told(*conditions: dict[str, Any], **status: Any) -> str:
        return why_waiting(Seen(owner("kueue"), workload=workload(*conditions, **status))).sentence

    assert told() == "Kueue has not evaluated it yet in the queue research"
    assert why_waiting(Seen(owner("kueue"))).sentence == "Kueue has not evaluated it yet in the queue research"
    reserved = condition("QuotaReserved", "True", "QuotaReserved")
    checks = [
        {"name": "capacity", "state": "Pending", "message": "", "lastTransitionTime": "2026-11-15T10:00:00Z"},
        {"name": "budget", "state": "Ready", "message": "", "lastTransitionTime": "2026-11-15T10:00:00Z"},
    ]
    unmet = condition("Admitted", "False", "UnsatisfiedAdmissionChecks")
    assert told(reserved, unmet, admissionChecks=checks) == (
        "its quota is reserved; it waits for the admission checks capacity (Pending)"
    )
    evicted = condition("Evicted", "True", "Preempted", "Preempted to accommodate a workload", at="11:00")
    assert told(condition("QuotaReserved", "False", "Pending", at="11:00"), evicted).startswith(
        "a job with a better claim to the quota of research preempted it; it restarts automatically"
    )
    later = condition(
        "QuotaReserved",
        "False",
        "WaitingForQuota",
        "insufficient unused quota for cpu in flavor p5, 3 more needed",
        at="12:00",
    )
    assert "3 more cpu of p5" in told(later, evicted), "what came after the eviction is what keeps it waiting now"
    assert "the administrator stopped the queue" in told(condition("Evicted", "True", "ClusterQueueStopped"))


def volcano_group(phase: str, *conditions: dict[str, Any]) -> dict[str, Any]:
    made = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": f"llm-{UID}"},
        "spec": {"minMember": 4, "queue": "research"},
        "status": {"phase": phase, "conditions": list(conditions)},
    }
    assert problems(made) == []
    return made


def test_volcano() -> None:
    message = (
        "4/4 tasks in gang unschedulable: pod group is not ready, 4 Pending, 4 minAvailable; Pending: 3 "
        "node(s) resource fit failed."
    )
    group = volcano_group("Inqueue", condition("Unschedulable", "True", "NotEnoughResources", message))
    assert why_waiting(Seen(owner("volcano"), pod_group=group)).sentence == (
        "needs 4 pods at once on one leaf, and Volcano cannot place all of them: 4 of 4 cannot be scheduled: 3 "
        "node(s) resource fit failed"
    )
    # Recorded: without the nodes, which the pods' own conditions have.
    part = "pod group is not ready, 2 Pending, 2 minAvailable; Pending: 1 Schedulable, 1 Unschedulable"
    group = volcano_group(
        "Inqueue", condition("Unschedulable", "True", "NotEnoughResources", f"1/2 tasks in gang unschedulable: {part}")
    )
    held = condition("PodScheduled", "False", "Unschedulable", "0/203 nodes are unavailable: 75 Insufficient cpu.")
    assert why_waiting(Seen(owner("volcano"), [pod(0, "Pending", held)], pod_group=group)).sentence == (
        "needs 4 pods at once on one leaf, and Volcano cannot place all of them: 1 would fit, 1 cannot be "
        "scheduled; of 203 nodes, 75 have insufficient cpu"
    )
    early = "1/0 tasks in gang unschedulable: pod group is not ready, 1 minAvailable."
    group = volcano_group("Pending", condition("Unschedulable", "True", "NotEnoughResources", early))
    assert why_waiting(Seen(owner("volcano"), pod_group=group)).sentence.endswith("its pods do not exist yet")
    assert why_waiting(Seen(owner("volcano"), pod_group=volcano_group("Pending"))).sentence == (
        "the Volcano queue research has no room for it yet; it is not admitted"
    )
    assert (
        "its pods are being placed" in why_waiting(Seen(owner("volcano"), pod_group=volcano_group("Inqueue"))).sentence
    )


def kai_group(reason: str, message: str) -> dict[str, Any]:
    said = {
        "type": "UnschedulableOnNodePool",
        "nodePool": "default",
        "reason": "Unschedulable",
        "message": message,
        "transitionID": "1",
        "lastTransitionTime": "2026-11-15T10:00:00Z",
        "status": "True",
        "reasons": [{"reason": reason, "message": message}] if reason else [],
    }
    made = {
        "apiVersion": "scheduling.run.ai/v2alpha2",
        "kind": "PodGroup",
        "metadata": {"name": f"pg-llm-{UID}"},
        "spec": {"minMember": 4, "queue": "research"},
        "status": {"schedulingConditions": [said]},
    }
    assert problems(made) == []
    return made


@pytest.mark.parametrize(
    ("reason", "message", "sentence"),
    [
        (
            "",
            "Resources were found for 2 pods while 4 are required for gang scheduling. Additional pods cannot be "
            "scheduled",
            "needs 4 pods at once on one leaf, and KAI cannot place all of them: there is room for 2 of 4",
        ),
        (
            "OverLimit",
            "research quota has reached the allowable limit of GPUs. Limit is 64 GPUs, currently 48 GPUs allocated and "
            "workload requested 32 GPUs",
            "it would exceed the limit of the queue research: 48 of 64 GPUs are in use, and it requests 32",
        ),
        (
            "NonPreemptibleOverQuota",
            "Non-preemptible workload is over quota. Workload requested 32 GPUs, but research quota is 16 GPUs, while "
            "0 GPUs are already allocated for non-preemptible pods.",
            "a non-preemptible job may not exceed the quota of research: it requests 32 GPUs, and the quota is 16; "
            "use a preemptible priority class",
        ),
        (
            "PodSchedulingErrors",
            "Resources were found for 1 pods while 4 are required for gang scheduling. Additional pods cannot be "
            "scheduled due to: no nodes with enough resources were found: 2 node(s) had untolerated taint(s). \n5 "
            "node(s) didn't have enough resources: GPUs.",
            "needs 4 pods at once on one leaf, and KAI cannot place all of them: there is room for 1 of 4; of the "
            "nodes, 2 have the taint of others, which is missing in `tolerations:` of the cluster file, 5 have "
            "insufficient GPUs",
        ),
        (
            "PodSchedulingErrors",
            "no nodes with enough resources were found: 1 node(s) didn't match Pod's node affinity/selector.",
            "needs 4 pods at once on one leaf, and KAI cannot place all of them: of the nodes, 1 do not match its "
            "instance type or pool",
        ),
        (
            "QueueDoesNotExist",
            "",
            "the queue research does not exist; `kubectl get queues.scheduling.run.ai` lists the queues",
        ),
    ],
)
def test_kai(reason: str, message: str, sentence: str) -> None:
    assert why_waiting(Seen(owner("kai"), pod_group=kai_group(reason, message))).sentence == sentence


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            "0/64 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 3 node(s) were "
            "unschedulable, 60 Insufficient nvidia.com/gpu. preemption: 0/64 nodes are available: 64 No preemption "
            "victims found for incoming pod.",
            "2 of 4 pods cannot be scheduled on one leaf: of 64 nodes, 1 have the taint nvidia.com/gpu: present, "
            "which is missing in `tolerations:` of the cluster file, 3 are cordoned, 60 have insufficient "
            "nvidia.com/gpu",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. no new claims to "
            "deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.",
            "2 of 4 pods cannot be scheduled on one leaf: of 1 node, 1 do not match its instance type or pool",
        ),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3 nodes are "
            "available: 3 Preemption is not helpful for scheduling.",
            "2 of 4 pods cannot be scheduled on one leaf: its volume claim is not bound yet; `kubectl get pvc` "
            "shows why",
        ),
        (
            'persistentvolumeclaim "fsx" not found',
            "2 of 4 pods cannot be scheduled on one leaf: the PersistentVolumeClaim fsx does not exist in the "
            "namespace",
        ),
    ],
)
def test_the_default_scheduler(message: str, sentence: str) -> None:
    held = condition("PodScheduled", "False", "Unschedulable", message)
    seen = Seen(owner("none"), [pod(0, "Running"), pod(1, "Running"), pod(2, "Pending", held), pod(3, "Pending", held)])
    assert why_waiting(seen).sentence == sentence


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            "no instance type has enough resources, requirements=karpenter.sh/nodepool In [p5], resources="
            '{"cpu":"172","hugepages-2Mi":"5Gi"} (NodePool=p5)',
            'no instance type of its pools has {"cpu":"172","hugepages-2Mi":"5Gi"}',
        ),
        (
            'incompatible with provisioner "p5", no instance type satisfied resources {"cpu":"24"} and requirements x',
            'no instance type of its pools has {"cpu":"24"}',
        ),
        (
            "unsatisfiable topology constraint for pod affinity, key=rack (counts = , podDomains = rack Exists",
            "the rack of a future node is unknown in advance",
        ),
        (
            'incompatible requirements, label "rack" does not have known values',
            "its pools do not label nodes with rack",
        ),
        ("all available instance types exceed limits for nodepool (NodePool=p5)", "the limits of the pool are reached"),
        ("the moon is full", "the moon is full"),
    ],
)
def test_why_karpenter_makes_no_node(message: str, sentence: str) -> None:
    nodes = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    pods = [pod(0, "Running"), pod(1, "Pending", condition("PodScheduled", "False", "Unschedulable", nodes))]
    events = (
        event("FailedScheduling", nodes, "10:09", about="llm-1"),
        event("FailedScheduling", f"Failed to schedule pod, {message}", "10:05", about="llm-1"),
        event("FailedScheduling", "Failed to schedule pod, before it had a node", "10:06", about="llm-0"),
    )
    assert why_waiting(Seen(owner("none"), pods, events=events)).sentence == (
        "1 of 4 pods cannot be scheduled on one leaf: of 2 nodes, 2 do not match its instance type or pool; Karpenter "
        f"created no node at 10:05 UTC: {sentence}"
    )


def test_containers_volumes_and_pods_that_cannot_be_made() -> None:
    def told(*pods: dict[str, Any], events: tuple[dict[str, Any], ...] = ()) -> str:
        return why_waiting(Seen(owner("none"), list(pods), events=events)).sentence

    creating = waiting_container(0, "ContainerCreating")
    pull = waiting_container(1, "ImagePullBackOff", 'Back-off pulling image "example.com/train:1"')
    assert told(creating, creating) == "2 of 4 pods have a node and are pulling the image and mounting volumes"
    assert told(creating, pull).startswith('the image cannot be pulled: Back-off pulling image "example.com/train:1"')
    missing = waiting_container(0, "CreateContainerConfigError", 'secret "craton-secrets" not found')
    assert "`kubectl create secret generic craton-secrets" in told(missing)
    assert "no folder /scratch" in told(
        creating,
        events=(
            event("FailedMount", "MountVolume.SetUp failed: hostPath type check failed: /scratch is not a directory"),
        ),
    )
    for message, sentence in (
        (
            'MountVolume.SetUp failed for volume "secrets" : references non-existent secret key: OTHER',
            "has no key OTHER",
        ),
        ('MountVolume.SetUp failed for volume "secrets" : secret "craton-secrets" not found', "kubectl create secret"),
        ('MountVolume.SetUp failed for volume "run-files" : configmap "llm" not found', "the run's ConfigMap llm"),
    ):
        assert sentence in told(creating, events=(event("FailedMount", message),))
    forbidden = 'pods "llm-0" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities'
    assert told(events=(event("FailedCreate", forbidden),)) == (
        "its pods cannot be created: the namespace enforces the pod security standard restricted:latest: "
        "unrestricted capabilities"
    )
    root = 'violates PodSecurity "restricted:latest": runAsNonRoot != true (pod must set it)'
    assert told(events=(event("FailedCreate", root),)).endswith("set `non_root: true` in the cluster file's scheduler")
    old, new = event("FailedCreate", "old", "09:00"), event("FailedCreate", "new", "11:00")
    assert told(events=(new, old)).endswith("new")
    assert told() == "Kubernetes has not processed it yet"


def test_a_word_that_nobody_knows_is_passed_on() -> None:
    said = condition("QuotaReserved", "False", "MoonIsFull", "come back\n tomorrow")
    found = why_waiting(Seen(owner("kueue"), workload=workload(said)))
    assert found.sentence == "kueue reports MoonIsFull: come back tomorrow"


def test_pods_that_have_ended_are_made_again_after_a_pause() -> None:
    """The controller of Jobs keeps a lost pod until it makes the next: ten seconds later, then twenty, and so on."""
    assert why_waiting(Seen(owner("none"), [pod(0, "Failed")])).sentence == MADE_AGAIN
    assert why_waiting(Seen(owner("none"), [pod(0, "Failed"), pod(1, "Succeeded")], hidden=["Event"])).sentence == (
        "its pods have ended, and Kubernetes recreates them after a back-off that doubles with every failure"
    )
    assert why_waiting(Seen(owner("none"), [pod(0, "Failed"), pod(1, "Pending")])).sentence != MADE_AGAIN
    assert why_waiting(Seen(owner("none"))).sentence == "Kubernetes has not processed it yet"


def test_every_fact_makes_a_sentence() -> None:
    words = dict.fromkeys(("queue", "pods", "within", "waiting", "checks", "detail", "message"), "x")
    facts = _facts()
    assert len(facts["reasons"]) >= 50
    for fact in facts["reasons"].values():
        assert fact["sentence"].format(**words)
        assert not fact["sentence"].endswith(".")
    for pattern, fact in facts["messages"]:
        assert set(re.findall(r"{(\w+)}", fact["sentence"])) <= set(pattern.groupindex)


def test_where_a_run_stands() -> None:
    def stands(gang: str, status: dict[str, Any], *pods: dict[str, Any], kind: str = "pretrain") -> tuple[str, str]:
        found = standing_of(Seen({**owner(gang, kind), "status": status}, list(pods)))
        return found.condition, found.reason

    assert stands("kueue", {}) == ("waiting", "PendingEvaluation")
    assert stands("none", {}, pod(0, "Running")) == ("running", "")
    assert stands("kueue", {"conditions": [condition("Completed", "True", "AllJobsCompleted")]}) == (
        "ended",
        "AllJobsCompleted",
    )
    assert stands("none", {"conditions": [condition("Failed", "True", "PodFailurePolicy")]}) == (
        "ended",
        "PodFailurePolicy",
    )
    assert stands("none", {"conditions": [condition("Failed", "False", "x")]}) == ("waiting", "")
    assert stands("volcano", {"state": {"phase": "Completed"}}) == ("ended", "Completed")
    assert stands("volcano", {"state": {"phase": "Running"}}, pod(0, "Running")) == ("running", "")
    assert stands("none", {}, waiting_container(0, "CrashLoopBackOff"), kind="serve") == ("waiting", "CrashLoopBackOff")
    crashing = waiting_container(0, "CrashLoopBackOff", "back-off 5m0s")
    crashing["status"]["phase"] = "Running"  # as Kubernetes calls it between two starts
    assert stands("none", {}, crashing, kind="serve") == ("waiting", "CrashLoopBackOff")
    partly = standing_of(
        Seen({**owner("none"), "status": {"failed": 2}}, [pod(0, "Running"), waiting_container(1, "ContainerCreating")])
    )
    assert (partly.condition, partly.nodes, partly.restarts) == ("running", ("node-0",), 2)
    assert "have a node" in partly.sentence
