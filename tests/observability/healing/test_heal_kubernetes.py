"""Healing on Kubernetes: cordoned and tainted, given back as it was, runs told to leave; against the stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes_standin import StandIn

from craton.job.cluster import SchedulerSettings
from craton.observability.healing import HealingScope, heal, undo
from craton.observability.healing.issues import Issue
from craton.orchestration import service_of
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.changes import evacuate, hosts_of, plan_evacuation
from craton.orchestration.errors import SchedulerError
from craton.orchestration.kubernetes.node_maintenance import cordoned, service_node
from craton.telemetry import RunDirectory

JOBSETS = "jobset.x-k8s.io/v1alpha2"
TAINT = "craton.dev/unhealthy"
KUBERNETES = SchedulerSettings(kind="kubernetes", namespace="train")


def add_node(server: StandIn, name: str, gpus: int = 8, ready: str = "True", **spec: Any) -> dict[str, Any]:
    status = {
        "conditions": [{"type": "Ready", "status": ready}],
        "capacity": {"nvidia.com/gpu": str(gpus)} if gpus else {},
    }
    node = {"metadata": {"name": name, "resourceVersion": "5"}, "spec": spec, "status": status}
    server.put("v1", "nodes", node, namespace="")
    return node


def add_pod(server: StandIn, run: str, node: str, phase: str = "Running") -> None:
    labels = {"app.kubernetes.io/managed-by": "craton", "app.kubernetes.io/instance": run}
    metadata = {"name": f"{run}-{node}", "labels": labels}
    server.put("v1", "pods", {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}})


@pytest.fixture
def ten(server: StandIn) -> StandIn:
    for number in range(10):
        add_node(server, f"n{number}")
    add_node(server, "system-1", gpus=0)
    return server


def node_of(server: StandIn, name: str) -> dict[str, Any]:
    return server.objects["v1", "nodes", "", name]


def test_nodes_with_gpus_and_how_they_are(ten: StandIn) -> None:
    add_pod(ten, "llm", "n1")
    add_pod(ten, "old", "n2", phase="Succeeded")
    add_node(ten, "n3", unschedulable=True)
    add_node(ten, "n4", ready="Unknown")
    found = {node.name: node for node in service_of(KUBERNETES).nodes()}
    assert len(found) == 10, "one without GPUs is not part of the share"
    assert [name for name, node in found.items() if node.is_out] == ["n3", "n4"]
    assert [name for name, node in found.items() if node.is_busy] == ["n1"]
    assert (found["n3"].reason, found["n4"].reason, found["n3"].mark) == ("it is cordoned", "it is not ready", "")


def test_cordoned_and_tainted_within_the_share_and_undone(ten: StandIn, tmp_path: Path) -> None:
    ten.objects["v1", "nodes", "", "n1"]["spec"]["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    place = HealingScope("eks", service_of(KUBERNETES), (), tmp_path)
    issues = [Issue(f"n{number}", "reboot", "xid", "XID 79") for number in (1, 2)]
    found = heal(place, issues, "act", 0.1)
    (action,) = found.actions
    assert (action.node, [each.is_held for each in found.decisions]) == ("n1", [False, True])
    spec = node_of(ten, "n1")["spec"]
    assert spec["unschedulable"] is True
    assert spec["taints"][1:] == [{"key": TAINT, "value": action.id, "effect": "NoSchedule"}]
    assert "unschedulable" not in node_of(ten, "n2")["spec"]
    undo(place, action.id)
    after = node_of(ten, "n1")
    assert after["spec"] == {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
    assert after["metadata"]["annotations"] == {}


def test_what_is_out_already_is_not_taken_over_and_only_its_own_mark_gives_it_back(ten: StandIn) -> None:
    service = service_of(KUBERNETES)
    add_node(ten, "n6", unschedulable=True)
    service.take_out("n5", "ab12", "reset: ECC")
    for node, why in {"n5": "craton:ab12 reset: ECC", "n6": "it is cordoned"}.items():
        with pytest.raises(SchedulerError, match=rf"{node} is already out of service \({why}\); it is left as it is"):
            cordoned(node_of(ten, node), "cd34", "reboot: XID 79")
    assert service.give_back("n5", "cd34") == "n5 was taken out by someone else: craton:ab12 reset: ECC"
    assert service.give_back("n5", "ab12") == ""
    assert node_of(ten, "n5")["spec"] == {}
    assert service.give_back("n5", "ab12") == "n5 is already in service"
    assert service.give_back("gone", "ab12") == "Kubernetes has no node gone"


def test_who_cordons_between_the_look_and_the_action_keeps_the_node(ten: StandIn) -> None:
    def meanwhile(node: dict[str, Any]) -> None:
        node["spec"]["unschedulable"], node["metadata"]["resourceVersion"] = True, "6"

    ten.before_patch = meanwhile
    with pytest.raises(SchedulerError, match="it is cordoned"):
        service_of(KUBERNETES).take_out("n1", "ab12", "reset: ECC")
    assert node_of(ten, "n1")["spec"] == {"unschedulable": True}


@pytest.mark.parametrize(
    ("labels", "taint", "why"),
    [
        ({"sagemaker.amazonaws.com/node-health-status": "Schedulable"}, "nvidia.com/gpu", ""),
        (
            {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReplacement"},
            "nvidia.com/gpu",
            "HyperPod reports it as UnschedulablePendingReplacement",
        ),
        ({"sagemaker.amazonaws.com/node-health-status": "Unschedulable"}, "", "HyperPod reports it as Unschedulable"),
        ({}, "karpenter.sh/disrupted", "it is tainted karpenter.sh/disrupted"),
        ({}, "ToBeDeletedByClusterAutoscaler", "it is tainted ToBeDeletedByClusterAutoscaler"),
        ({}, TAINT, f"it is tainted {TAINT}"),
    ],
)
def test_what_others_take_away_in_their_own_words_is_out(labels: dict[str, str], taint: str, why: str) -> None:
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    node = {"metadata": {"name": "n1", "labels": labels}, "spec": {"taints": taints}}
    found = service_node(node, busy=(), knows_idle=True)
    assert (found.is_out, found.reason, found.mark) == (bool(why), why, "")


def test_a_node_is_idle_where_nobody_of_any_namespace_has_its_gpus(ten: StandIn) -> None:
    def add(name: str, node: str, **resources: dict[str, str]) -> None:
        pod = {"metadata": {"name": name}, "spec": {"nodeName": node, "containers": [{"resources": resources}]}}
        ten.put("v1", "pods", pod, namespace="others")

    add("whole", "n2", requests={"nvidia.com/gpu": "8"})
    add("slice", "n3", requests={"nvidia.com/mig-1g.10gb": "1"})
    add("exporter", "n4", requests={"cpu": "1"})
    add_pod(ten, "llm", "n5")

    def busy() -> dict[str, bool | None]:
        return {node.name: node.is_busy for node in service_of(KUBERNETES).nodes()}

    found = busy()
    assert [name for name, is_busy in found.items() if is_busy] == ["n2", "n3", "n5"]
    assert list(found.values()).count(False) == 7
    ten.hidden.add("*/pods")
    found = busy()
    assert [name for name, is_busy in found.items() if is_busy] == ["n5"], "our own are seen"
    assert list(found.values()).count(None) == 9, "of the others nobody knows"


def test_the_share_is_of_the_node_pool_and_of_what_was_taken_out_of_it(ten: StandIn) -> None:
    for name in ("n1", "n2", "n3"):
        node_of(ten, name)["metadata"]["labels"] = {"karpenter.sh/nodepool": "p5"}
    pool = service_of(SchedulerSettings(kind="kubernetes", namespace="train", node_pool="p5"))
    pool.take_out("n2", "ab12", "reboot: XID 79")
    node_of(ten, "n2")["status"]["capacity"] = {}  # its driver did not come back
    assert [(node.name, node.is_out) for node in pool.nodes()] == [("n1", False), ("n2", True), ("n3", False)]
    assert len(service_of(KUBERNETES).nodes()) == 10


def test_what_others_change_at_the_same_moment_is_kept(ten: StandIn) -> None:
    theirs = {"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}

    def meanwhile(node: dict[str, Any]) -> None:
        if not node["spec"].get("taints"):
            node["spec"]["taints"] = [theirs]
            node["metadata"]["resourceVersion"] = "6"

    ten.before_patch = meanwhile
    service_of(KUBERNETES).take_out("n1", "ab12", "reset: ECC")
    assert [each["key"] for each in node_of(ten, "n1")["spec"]["taints"]] == [theirs["key"], TAINT]


def test_who_may_not_change_nodes_is_told(ten: StandIn, tmp_path: Path) -> None:
    ten.forbidden.add("nodes")
    place = HealingScope("eks", service_of(KUBERNETES), (), tmp_path)
    found = heal(place, [Issue("n1", "reboot", "xid", "XID 79")], "act", 0.1)
    assert not found.is_well
    assert "Kubernetes forbids it" in found.failures[0]
    with pytest.raises(SchedulerError, match="no node n77"):
        service_of(KUBERNETES).take_out("n77", "ab12", "x")


def test_a_run_leaves_by_its_pod_on_that_node(ten: StandIn, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "llm")
    details = {
        "namespace": "train",
        "server": f"http://127.0.0.1:{ten.server_port}",
        "version": JOBSETS,
        "directory": str(run.path),
    }
    write_submission(run, Submission("kubernetes", "JobSet/llm", details))
    launch = {"generation": 1, "nodes": ["node-1", "node-0"], "ranks_per_node": 1, "command": ["x"]}
    run.launch_path.write_text(json.dumps(launch))
    (run.path / "hosts").mkdir()
    for index, host in enumerate(("n3", "n7")):
        (run.path / "hosts" / f"{index}.json").write_text(json.dumps({"call": "x", "host": host}))
        add_pod(ten, "llm", host)
    owner = {"apiVersion": JOBSETS, "kind": "JobSet", "metadata": {"name": "llm"}}
    owner["metadata"] |= {"labels": {"app.kubernetes.io/managed-by": "craton", "app.kubernetes.io/instance": "llm"}}
    ten.put(JOBSETS, "jobsets", owner)
    assert hosts_of(run) == {"node-0": "n3", "node-1": "n7"}, "names are those of pods, whatever the order of ranks"
    assert plan_evacuation(run, "node-1").how == "pod"
    evacuate(run, "node-1")
    assert [pod["metadata"]["name"] for pod in ten.of("pods")] == ["llm-n3"]
