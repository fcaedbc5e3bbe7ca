"""The backend and its client, against a stand-in for an API server that keeps objects and refuses wrong ones."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from counted_calls import counted_calls
from kubernetes_jobs import LEAF, SPINE, cluster, draft, job
from kubernetes_runs import SECRET, add_pod, drafted, submitted
from kubernetes_standin import TOKEN, StandIn

from craton.cli import main
from craton.cli.views import live
from craton.extras import MissingExtraError
from craton.orchestration import RunStateError, Standing, StartError, backend_of, read_submission
from craton.orchestration.backend import write_submission
from craton.orchestration.errors import SchedulerError
from craton.orchestration.kubernetes import KubernetesBackend
from craton.orchestration.kubernetes.api import load_kr8s
from craton.orchestration.kubernetes.backend import MANIFEST_FILE
from craton.orchestration.kubernetes.objects import KUEUE_VERSIONS
from craton.orchestration.start import stop_run
from craton.orchestration.start.runs import resumed_job
from craton.orchestration.watching import settled, standing_of, watch
from craton.telemetry import RunDirectory, summarize

JOBSETS = ("jobset.x-k8s.io/v1alpha2", "jobsets")


def test_it_is_the_backend_of_that_name() -> None:
    assert isinstance(backend_of("kubernetes"), KubernetesBackend)


def test_what_is_sent_is_what_is_written_and_everything_belongs_to_the_owner(server: StandIn, tmp_path: Path) -> None:
    made, run = drafted(tmp_path)
    written = (run.path / MANIFEST_FILE).read_text()
    submission = KubernetesBackend().submit(made, run)
    assert (submission.on, submission.job) == ("kubernetes", "JobSet/llm")
    assert submission.details["namespace"] == "train"
    creations = [line for line in server.requests if line.startswith("POST")]
    assert all("fieldValidation=Strict" in line for line in creations)
    assert "/jobsets" in creations[0], "what may be refused comes first"
    uid = server.of("jobsets")[0]["metadata"]["uid"]
    for document in yaml.safe_load_all(written):
        name = document["metadata"]["name"]
        kept = next(
            each for (*_, own), each in server.objects.items() if (each["kind"], own) == (document["kind"], name)
        )
        if kept["kind"] != "JobSet":
            assert kept["metadata"].pop("ownerReferences")[0]["uid"] == uid
        kept["metadata"].pop("uid")
        data = kept.pop("data") if kept["kind"] == "Secret" or name == "llm-nodes" else None
        assert kept == document
        if kept["kind"] == "Secret":
            assert base64.b64decode(data["HF_TOKEN"]).decode() == SECRET
    for path in run.path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert TOKEN.encode() not in path.read_bytes(), path


def add_node(server: StandIn, name: str, leaf: str, instance: str = "p5.48xlarge") -> None:
    labels = {LEAF: leaf, SPINE: "s1", "node.kubernetes.io/instance-type": instance}
    node = {"metadata": {"name": name, "labels": labels}, "status": {"images": ["large"]}}
    server.put("v1", "nodes", node, namespace="")


def sent_places(server: StandIn) -> dict[str, Any]:
    [sent] = [each for each in server.of("configmaps") if each["metadata"]["name"] == "llm-nodes"]
    return dict(json.loads(sent["data"]["nodes.json"]))


def test_where_the_nodes_are_that_it_may_go_to_is_sent_along(server: StandIn, tmp_path: Path) -> None:
    for number in range(5):
        add_node(server, f"g{number}", f"leaf{number // 3}")
    add_node(server, "system", "leaf0", "m7i.large")
    server.page = 2
    submitted(tmp_path)
    assert sent_places(server) == {
        "levels": ["spine", "leaf"],
        "addresses": {f"g{number}": ["s1", f"leaf{number // 3}"] for number in range(5)},
        "why": "",
    }


def test_who_may_not_list_nodes_can_start_a_run_and_its_pods_know_why_they_are_not_in_order(
    server: StandIn, tmp_path: Path
) -> None:
    server.hidden = {"nodes"}
    submitted(tmp_path)
    told = sent_places(server)
    assert told["addresses"] == {}
    assert told["why"] == "the submitting user may not list the nodes of the cluster"


def test_a_single_pod_needs_no_order(server: StandIn, tmp_path: Path) -> None:
    submitted(tmp_path, nodes=1)
    assert not [line for line in server.requests if "/nodes" in line]


def test_an_object_that_is_refused_leaves_nothing_behind(server: StandIn, tmp_path: Path) -> None:
    made, run = drafted(tmp_path)
    text = (run.path / MANIFEST_FILE).read_text()
    (run.path / MANIFEST_FILE).write_text(text.replace("restartPolicy:", "restartsPolicy:"))
    with pytest.raises(SchedulerError, match=r"Kubernetes refused: strict decoding error: .*restartsPolicy"):
        KubernetesBackend().submit(made, run)
    assert server.objects == {}
    (run.path / MANIFEST_FILE).write_text(text)
    server.forbidden = {"configmaps"}
    with pytest.raises(
        SchedulerError, match=r"Kubernetes forbids it: configmaps is forbidden.*; request that permission"
    ):
        KubernetesBackend().submit(made, run)
    assert server.objects == {}, "the owner was made, and is removed with what it owns"


def test_without_the_right_to_make_network_policies_it_runs_and_says_so(server: StandIn, tmp_path: Path) -> None:
    server.forbidden = {"networkpolicies"}
    made, run = drafted(tmp_path)
    submission = KubernetesBackend().submit(made, run)
    assert "other pods in the cluster can connect to its pods" in submission.details["warning"]


def test_a_name_that_is_taken_is_refused_while_it_runs_and_replaced_when_it_has_ended(
    server: StandIn, tmp_path: Path
) -> None:
    run = submitted(tmp_path)
    made, _ = drafted(tmp_path)
    with pytest.raises(
        RunStateError, match="JobSet llm already exists on the cluster and has not ended; `craton stop llm`"
    ):
        KubernetesBackend().submit(made, run)
    [owner] = server.of("jobsets")
    owner["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs"}]}
    before = owner["metadata"]["uid"]
    KubernetesBackend().submit(made, run)
    [again] = server.of("jobsets")
    assert again["metadata"]["uid"] != before
    assert len(server.of("configmaps")) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {"app.kubernetes.io/managed-by": "helm"}},
        {"labels": {}, "annotations": {}},
        {"annotations": {"craton/run": "LLM", "craton/directory": "/fsx/runs/llm"}},
        {"annotations": {"craton/run": "llm", "craton/directory": "/fsx/others/llm"}},
    ],
)
def test_what_others_have_left_under_the_name_is_not_removed(
    server: StandIn, tmp_path: Path, change: dict[str, Any]
) -> None:
    made, run = drafted(tmp_path)
    KubernetesBackend().submit(made, run)
    [owner] = server.of("jobsets")
    owner["status"] = {"conditions": [{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}]}
    owner["metadata"] |= change
    with pytest.raises(
        RunStateError,
        match="JobSet llm already exists on the cluster and belongs to another run; choose another name with `--name`",
    ):
        KubernetesBackend().submit(made, run)
    assert server.of("jobsets") == [owner]


@pytest.mark.parametrize(
    ("gang", "status", "state", "message"),
    [
        ("kueue", {"conditions": [{"type": "Completed", "status": "True"}]}, "done", ""),
        (
            "none",
            {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "code 77"}]},
            "failed",
            "its job Job/llm ended: PodFailurePolicy: code 77",
        ),
        ("volcano", {"state": {"phase": "Completed"}}, "done", ""),
        ("volcano", {"state": {"phase": "Terminated"}}, "failed", "its job Job/llm ended: Terminated"),
        ("volcano", {"state": {"phase": "Aborted"}}, "lost", "its job Job/llm ended: Aborted"),
    ],
)
def test_how_a_run_ended_is_known_where_its_directory_is_not_seen(
    server: StandIn, tmp_path: Path, gang: str, status: dict[str, Any], state: str, message: str
) -> None:
    run = submitted(tmp_path, gang=gang)
    [owner] = server.of("jobsets") or server.of("jobs")
    owner["status"] = status
    seen = settled(summarize(run), standing_of(run))
    assert (seen.state, seen.message) == (state, message)


def test_a_gang_of_which_a_part_has_no_node_says_why_it_is_not_whole(server: StandIn, tmp_path: Path) -> None:
    run = submitted(tmp_path, gang="none")
    add_pod(server, "llm", 0)
    few = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    held = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": few}
    for index in (1, 2, 3):
        add_pod(server, "llm", index, "Pending", conditions=[held])
    why = "3 of 4 pods cannot be scheduled: of 4 nodes, 4 have insufficient nvidia.com/gpu"
    fresh = summarize(run)
    assert fresh.state == "starting"
    old = summarize(run, time.time() + 600)
    assert old.state == "lost"
    for summary in (fresh, old):
        seen = settled(summary, standing_of(run))
        assert (seen.state, seen.message) == ("starting", why)


def test_how_its_job_ended_is_told_before_that_no_agent_was_seen(tmp_path: Path) -> None:
    _, run = drafted(tmp_path)
    old = summarize(run, time.time() + 600)
    assert (old.state, old.message[:23]) == ("lost", "no agent has started on")
    ended = Standing("ended", "22", reason="CANCELLED")
    assert settled(old, ended).message == settled(summarize(run), ended).message == "its job 22 ended: CANCELLED"
    assert settled(old, replace(ended, outcome="failed")).message == "its job 22 ended: CANCELLED"
    assert settled(old, Standing("ended")).message == old.message, "of this machine, which has no word of its own"


@pytest.mark.parametrize(
    "hidden",
    [
        *(pytest.param({kind}, marks=pytest.mark.slow) for kind in ("workloads", "events", "podgroups")),
        {"workloads", "events", "podgroups"},
    ],
)
def test_a_caller_who_may_not_see_why_a_run_waits_still_sees_the_run(
    server: StandIn, tmp_path: Path, hidden: set[str]
) -> None:
    runs = [submitted(tmp_path, gang=gang, name=gang) for gang in ("kueue", "volcano", "kai", "none")]
    add_pod(server, "none", 0)
    server.hidden = hidden
    found = KubernetesBackend().look(runs)
    assert {name: each.condition for name, each in found.items()} == {
        "kueue": "waiting",
        "volcano": "waiting",
        "kai": "waiting",
        "none": "running",
    }
    if "workloads" in hidden:
        assert "you may not list" in found["kueue"].sentence
        assert "Workloads" in found["kueue"].sentence
    stop_run(runs[0])
    assert [each["metadata"]["name"] for each in server.of("jobsets")] == ["kai"]


def test_an_older_kueue_is_asked_in_its_own_version(server: StandIn, tmp_path: Path) -> None:
    run = submitted(tmp_path)
    newer, older = KUEUE_VERSIONS
    said = {"type": "QuotaReserved", "status": "False", "reason": "Suspended", "message": ""}
    labels = {"kueue.x-k8s.io/job-uid": server.of("jobsets")[0]["metadata"]["uid"]}
    server.put(older, "workloads", {"metadata": {"name": "w", "labels": labels}, "status": {"conditions": [said]}})
    assert "on hold" not in standing_of(run).sentence
    server.absent = {newer}
    assert standing_of(run).sentence == "the queue research is on hold"


def test_events_of_a_run_whose_name_begins_alike_are_not_its_own(server: StandIn, tmp_path: Path) -> None:
    runs = [submitted(tmp_path, gang="none", name=name) for name in ("llama", "llama-8b")]
    runs += [submitted(tmp_path, gang="kai", name=name) for name in ("mixtral", "mixtral-8x7b")]
    uids = {each["metadata"]["name"]: each["metadata"]["uid"] for each in (*server.of("jobs"), *server.of("jobsets"))}
    for number, about in enumerate(
        [
            {"kind": "Job", "name": "llama-8b", "uid": uids["llama-8b"]},
            {"kind": "Job", "name": "llama", "uid": "of-an-older-one"},
            # The Job that a JobSet makes: its name is known, its uid is not.
            {"kind": "Job", "name": "mixtral-8x7b-node-0", "uid": "made-by-the-controller"},
        ]
    ):
        event = {"reason": "FailedCreate", "message": "exceeded quota: research", "involvedObject": about}
        server.put("v1", "events", {"metadata": {"name": f"e{number}"}, "type": "Warning", **event})
    found = KubernetesBackend().look(runs)
    assert {name: "exceeded quota" in each.sentence for name, each in found.items()} == {
        "llama": False,
        "llama-8b": True,
        "mixtral": False,
        "mixtral-8x7b": True,
    }


def test_look_asks_once_for_each_kind_however_many_runs_there_are(server: StandIn, tmp_path: Path) -> None:
    runs = [submitted(tmp_path, name=f"run-{number}") for number in range(3)]
    runs.append(submitted(tmp_path, gang="volcano", name="vol"))
    jobsets = {each["metadata"]["name"]: each for each in server.of("jobsets")}
    jobsets["run-0"]["status"] = {"conditions": [{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}]}
    for index in range(4):
        add_pod(server, "run-1", index)
    uid = jobsets["run-2"]["metadata"]["uid"]
    said = {"type": "QuotaReserved", "status": "False", "reason": "Suspended", "message": ""}
    metadata = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": uid}}
    server.put("kueue.x-k8s.io/v1beta2", "workloads", {"metadata": metadata, "status": {"conditions": [said]}})
    [volcano] = server.of("jobs")
    group = {"metadata": {"name": f"vol-{volcano['metadata']['uid']}"}, "status": {"phase": "Pending"}}
    server.put("scheduling.volcano.sh/v1beta1", "podgroups", group)
    server.requests.clear()
    found = KubernetesBackend().look(runs)
    assert {name: each.condition for name, each in found.items()} == {
        "run-0": "ended",
        "run-1": "running",
        "run-2": "waiting",
        "vol": "waiting",
    }
    assert found["run-1"].nodes == ("n0", "n1", "n2", "n3")
    assert found["run-2"].sentence == "the queue research is on hold"
    assert "has no room" in found["vol"].sentence
    assert len(server.requests) == 6, server.requests  # two kinds of owners, pods, workloads, groups, events


def test_look_reads_every_page_and_knows_what_is_gone_or_elsewhere(server: StandIn, tmp_path: Path) -> None:
    server.page = 2
    runs = [submitted(tmp_path, name=f"run-{number}") for number in range(5)]
    gone = server.of("jobsets")[3]["metadata"]["name"]
    server.remove((*JOBSETS, "train", gone))
    found = KubernetesBackend().look(runs)
    assert {name for name, each in found.items() if each.condition == "waiting"} == {run.name for run in runs} - {gone}
    assert (found[gone].condition, found[gone].sentence) == ("ended", "it was deleted")
    server.shutdown()
    server.server_close()
    found = KubernetesBackend().look(runs)
    assert {each.condition for each in found.values()} == {"unknown"}
    assert "does not respond" in found[gone].sentence


def test_500_runs_are_looked_at_with_a_few_requests(server: StandIn, tmp_path: Path) -> None:
    first = submitted(tmp_path, name="run-0")
    submission = (first.path / "backend.json").read_text()
    [owner] = server.of("jobsets")
    runs = [first]
    for number in range(1, 500):
        run = RunDirectory(tmp_path / "runs" / f"run-{number}")
        run.path.mkdir()
        (run.path / "backend.json").write_text(submission.replace("run-0", run.name))
        labels = {**owner["metadata"]["labels"], "app.kubernetes.io/instance": run.name}
        metadata = {"name": run.name, "labels": labels, "annotations": owner["metadata"]["annotations"]}
        server.put(*JOBSETS, {**owner, "metadata": metadata})
        add_pod(server, run.name, 0)
        runs.append(run)
    server.requests.clear()
    with counted_calls() as calls:
        found = KubernetesBackend().look(runs)
    assert len(found) == 500
    assert [each.condition for each in found.values()].count("running") == 499
    assert len(server.requests) <= 4, server.requests  # owners, pods, workloads, events
    assert calls.number < 500 * 200  # a third of it


def test_a_server_is_stopped_by_its_owner_s_end_wherever_its_directory_is(server: StandIn, tmp_path: Path) -> None:
    place = cluster(nodes=1, storage={"shared": {"path": str(tmp_path), "claim": "fsx"}})
    run = RunDirectory.create(tmp_path / "runs", "chat")
    made = draft(job("serve", place, name="chat"), run.path)
    for file, text in {**made.files(), **KubernetesBackend().files(made, run)}.items():
        (run.path / file).write_text(text)
    write_submission(run, KubernetesBackend().submit(made, run))
    assert read_submission(run).details["directory"] == str(run.path)
    add_pod(server, "chat", 0)
    stop_run(run)
    assert server.of("leaderworkersets") == []
    assert len(server.of("pods")) == 1, "it drains"


def test_a_stop_removes_the_owner_and_a_kill_the_pods_at_once(server: StandIn, tmp_path: Path) -> None:
    backend, run = KubernetesBackend(), submitted(tmp_path)
    add_pod(server, "llm", 0)
    backend.stop(run)
    assert server.of("jobsets") == server.of("configmaps") == server.of("secrets") == []
    assert len(server.of("pods")) == 1, "it has its grace"
    backend.stop(run)  # a second time, while it leaves
    assert len(server.of("pods")) == 1
    backend.kill(run)
    assert server.of("pods") == []
    with pytest.raises(RunStateError, match="llm is no longer on the cluster"):
        backend.stop(run)


def test_a_run_that_was_removed_has_ended_when_its_last_pod_has(server: StandIn, tmp_path: Path) -> None:
    run = submitted(tmp_path)
    own = read_submission(run).details["submission"]
    add_pod(server, "llm", 0, submission=own)
    add_pod(server, "llm", 1, submission=own)
    stop_run(run)
    standing = standing_of(run)
    assert (standing.condition, standing.is_leaving) == ("running", True)
    assert standing.sentence.startswith("it was deleted, 2 pods have not terminated yet (n0, n1); if a node is lost")
    assert settled(summarize(run), standing).state == "stopping"
    with pytest.raises(
        RunStateError, match=r"llm is still stopping: .* 2 pods have not terminated yet .*`craton stop llm` waits"
    ):
        resumed_job(run)
    add_pod(server, "llm", 0, "Failed", own)
    add_pod(server, "llm", 1, submission="of the same name, by another machine")
    gone = standing_of(run)
    assert (gone.condition, gone.reason) == ("ended", "Gone")
    assert settled(summarize(run), gone).state == "stopped"


SAVED_BY_LOOK = 6  # more than a stop that waits for nothing makes


def test_a_stop_from_afar_waits_for_the_pods_and_does_not_say_that_nothing_was_saved(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(tmp_path)
    add_pod(server, "llm", 0, submission=read_submission(run).details["submission"])
    looks: list[int] = []

    def before_answer(request: str) -> None:
        if request.startswith("GET") and "/pods" in request and not server.of("jobsets"):
            looks.append(1)
            if len(looks) == SAVED_BY_LOOK:
                server.objects.pop(("v1", "pods", "train", "llm-node-0-0-abcde"))

    server.before_answer = before_answer
    monkeypatch.setattr(watch, "SCHEDULER_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["craton", "stop", "llm"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert len(looks) > SAVED_BY_LOOK, "until it was gone"
    said = capsys.readouterr().out
    assert "llm stopped; its checkpoints are in the run directory of its pods" in said
    assert "no checkpoint" not in said
    assert "from the beginning" not in said


def test_a_run_that_waits_is_stopped_without_the_right_to_delete_pods(server: StandIn, tmp_path: Path) -> None:
    """Its pods, where there are any, go with their owner."""
    run = submitted(tmp_path)
    add_pod(server, "llm", 0, "Pending")
    server.requests.clear()
    stop_run(run)
    assert server.of("jobsets") == []
    assert [each for each in server.requests if each.startswith("DELETE") and "/pods" in each] == []


def test_a_stop_that_the_pods_see_by_its_marker_leaves_them_alone(server: StandIn, tmp_path: Path) -> None:
    shared = {"shared": {"path": str(tmp_path), "claim": "fsx"}}
    run = submitted(tmp_path, storage=shared)
    KubernetesBackend().stop(run)
    assert len(server.of("jobsets")) == 1


def test_a_submission_is_six_requests_and_little_work(server: StandIn, tmp_path: Path) -> None:
    backend = KubernetesBackend()
    made, run = drafted(tmp_path)
    load_kr8s()  # which takes a third of a second, once
    with counted_calls() as calls:
        backend.files(made, run)
        backend.submit(made, run)
    asked = sorted(request.partition("?")[0].rpartition("/")[2] for request in server.requests)
    assert asked == ["configmaps", "configmaps", "jobsets", "networkpolicies", "nodes", "secrets"]
    assert calls.number < 400_000  # half of it: writing YAML


def test_no_cluster_no_login_and_no_client_are_sentences(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = drafted(tmp_path)
    server.kubeconfig.write_text(server.kubeconfig.read_text().replace(TOKEN, "old"))
    with pytest.raises(SchedulerError, match=r"rejects your credentials .*log in again"):
        KubernetesBackend().submit(made, run)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(SchedulerError, match=r"no Kubernetes cluster found .*KUBECONFIG"):
        KubernetesBackend().submit(made, run)
    monkeypatch.setitem(sys.modules, "kr8s", None)
    monkeypatch.setitem(sys.modules, "kr8s.asyncio", None)
    with pytest.raises(MissingExtraError, match=r"needs kr8s, .*\[kubernetes\]"):
        KubernetesBackend().check(made, run)


def test_a_check_refuses_before_anything_is_sent(server: StandIn, tmp_path: Path) -> None:
    KubernetesBackend().check(*drafted(tmp_path))
    wanted, run = job("command", {**cluster(), "storage": {}}), RunDirectory(tmp_path / "runs" / "llm")
    with pytest.raises(StartError, match="need shared storage"):
        KubernetesBackend().check(draft(wanted, run.path), run)
    assert server.requests == []


def test_what_kubectl_would_do_is_shown(server: StandIn, tmp_path: Path) -> None:
    made, run = drafted(tmp_path)
    [command] = KubernetesBackend().command(made, run)
    assert command == ["kubectl", "create", "--validate=strict", "-f", str(run.path / MANIFEST_FILE)]


def test_the_client_is_not_loaded_until_it_is_needed() -> None:
    code = "import sys, craton.orchestration.kubernetes; sys.exit('kr8s' in sys.modules or 'httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
