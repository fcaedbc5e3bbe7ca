"""Runs with members on Kubernetes: one JobSet with slots, valid by the schemas and as in the golden files.

No cluster is available to these tests: objects are held against schemas, not against the controllers of JobSet, Kueue,
KAI and Volcano.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_jobs import LAPTOP, LEAF, SHARED, cluster, draft, job
from kubernetes_runs import SECRET
from kubernetes_schemas import problems
from kubernetes_standin import StandIn

from craton.job import Job, parse_job
from craton.orchestration import StartError
from craton.orchestration.backend import write_submission
from craton.orchestration.draft import Draft, draft_run
from craton.orchestration.draft.members import Members, member_jobs, report_launch
from craton.orchestration.kubernetes import KubernetesBackend
from craton.orchestration.kubernetes.emitters import manifests, to_yaml
from craton.orchestration.kubernetes.members import (
    SlotTarget,
    check_owner,
    owner_target,
    read_slots,
    slots_layout,
    slots_of,
    slots_text,
)
from craton.orchestration.kubernetes.names import MAX_LETTERS, label_value
from craton.orchestration.kubernetes.target import KubernetesTarget, target_of
from craton.orchestration.watching import standing_of
from craton.telemetry import RunDirectory
from craton.telemetry.members import MemberSpec, MembersSpec, read_members

FOLDER = Path(__file__).with_name("kubernetes_golden")
QUEUED: dict[str, dict[str, str]] = {
    "none": {},
    "kueue": {"queue": "research", "topology": "efa"},
    "kai": {"queue": "research"},
    "volcano": {"queue": "research"},
}


def place(gang: str = "kueue", nodes: int = 2, **more: Any) -> dict[str, Any]:
    return cluster("p5", nodes, scheduler={"gang": gang, **QUEUED[gang]}, **more)


def sweep(gang: str = "kueue", **more: Any) -> Job:
    values = {"train.learning_rate": [1e-4, 3e-4, 1e-3], "train.global_batch_sequences": [128, 256]}
    document = {"run": {"secrets": ["HF_TOKEN"]}, "sweep": {**values, "parallel": 2}, **more}
    return job("pretrain", document.pop("place", place(gang)), **document)


def emitted(wanted: Job, root: Path = SHARED, members: Members | None = None) -> tuple[KubernetesTarget, Any]:
    """The target and the slots of a job, without a plan, which changes nothing that is emitted."""
    run = root / wanted.name
    owned = members or member_jobs(wanted, run, "kubernetes")
    assert owned is not None
    made = replace(draft(owned.owner or wanted, run), members=owned)
    if owned.spec.purpose == "sweep":
        made = replace(made, launch=report_launch(wanted, run, 0, {}, 29500, "kubernetes", "python3"))
    check_owner(made, run)
    shell = {"HF_TOKEN", "ROLLOUT_KEY"}
    plain = target_of(made, run, submission="0123456789abcdef", shell_variables=shell, user=(1000, 1000))
    target = owner_target(made, run, plain, shell)
    return target, slots_of(made, run, target, shell)


def valid(target: KubernetesTarget, slots: tuple[SlotTarget, ...]) -> list[dict[str, Any]]:
    documents = manifests(target, slots)
    assert [problem for document in documents for problem in problems(document)] == []
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents
    return documents


def check_golden(name: str, documents: list[dict[str, Any]], config: pytest.Config) -> None:
    text, path = to_yaml(documents), FOLDER / f"{name}.yaml"
    if config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), (
        f"{path.name} differs; if that is meant, `pytest --update-golden` and read the diff"
    )


def replicated(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in documents[0]["spec"]["replicatedJobs"]}


def limits(replicated_job: dict[str, Any]) -> dict[str, str]:
    container = replicated_job["template"]["spec"]["template"]["spec"]["containers"][0]
    return dict(container["resources"].get("limits", {}))


def test_a_sweep_is_one_jobset_with_as_many_slots_as_run_at_a_time(pytestconfig: pytest.Config) -> None:
    target, slots = emitted(sweep())
    documents = valid(target, slots)
    jobs = replicated(documents)
    assert {name: item["replicas"] for name, item in jobs.items()} == {"node": 1, "slot0": 2}
    assert len(slots[0].members) == 6
    assert jobs["slot0"]["template"]["spec"]["parallelism"] == 2, "the nodes of one member"
    assert limits(jobs["slot0"])["nvidia.com/gpu"] == "8"
    assert limits(jobs["node"]) == {}, "it only reports"
    check_golden("jobset_sweep", documents, pytestconfig)


def weights_job(tmp_path: Path, base_nodes: int = 1, gang: str = "kueue") -> Job:
    """A job that starts from the weights of another, which needs fewer nodes."""
    base = {"name": "base", "kind": "pretrain", "cluster": place(gang, base_nodes)}
    base |= {"model": "llama-3.1-8b", "data": {"path": "/fsx/tokens", "sequence": 8192}}
    base |= {"train": {"global_batch_sequences": 256, "steps": 1000}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    document = {**base, "name": "llm", "cluster": place(gang, 4), "model": {"job": "base.yaml"}}
    return parse_job(yaml.safe_dump(document, sort_keys=False), folder=tmp_path)


def test_the_job_of_the_weights_has_a_slot_for_itself(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    target, slots = emitted(weights_job(tmp_path))
    documents = valid(target, slots)
    jobs = replicated(documents)
    assert (jobs["node"]["template"]["spec"]["parallelism"], jobs["slot0"]["template"]["spec"]["parallelism"]) == (4, 1)
    labels = jobs["slot0"]["template"]["spec"]["template"]["metadata"]["labels"]
    assert (labels["craton/run"], labels["craton/member"]) == ("llm", "base")
    with pytest.raises(StartError, match=r"the pods do not see .*/llm; set CRATON_RUNS to a folder below /fsx"):
        emitted(weights_job(tmp_path), LAPTOP)
    check_golden("jobset_weights", documents, pytestconfig)


@pytest.mark.parametrize("gang", list(QUEUED))
def test_every_scheduler_gets_one_jobset_that_ends_as_the_run_does(gang: str) -> None:
    target, slots = emitted(sweep(gang))
    documents = valid(target, slots)
    spec = documents[0]["spec"]
    assert documents[0]["kind"] == "JobSet"
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    own, slot = (replicated(documents)[name]["template"]["spec"] for name in ("node", "slot0"))
    assert own["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    assert {rule["action"] for rule in slot["podFailurePolicy"]["rules"]} == {"Ignore"}
    assert slot["podFailurePolicy"]["rules"][0]["onExitCodes"]["operator"] == "NotIn", "no exit code fails the Job"
    assert "backoffLimitPerIndex" not in slot
    assert [item["kind"] for item in documents].count("Service") == 0, "JobSet makes its own"
    templates = [item["template"] for item in (own, slot)]
    schedulers = {"kai": "kai-scheduler", "volcano": "volcano"}
    assert all(item["spec"].get("schedulerName", "") == schedulers.get(gang, "") for item in templates)
    labels = documents[0]["metadata"]["labels"]
    if gang == "volcano":
        [group] = [item for item in documents if item["kind"] == "PodGroup"]
        assert group["spec"] == {"minMember": 1 + 2 * 2, "queue": "research"}
        assert all(item["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "llm" for item in templates)
    if gang in ("kueue", "kai"):
        assert labels[{"kueue": "kueue.x-k8s.io/queue-name", "kai": "kai.scheduler/queue"}[gang]] == "research"


def test_a_placement_is_for_each_member_by_itself() -> None:
    target, slots = emitted(sweep(placement={"within": "leaf"}))
    slot = replicated(valid(target, slots))["slot0"]["template"]["spec"]["template"]
    assert slot["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-slice-required-topology": LEAF,
        "kueue.x-k8s.io/podset-slice-size": "2",
    }
    with pytest.raises(StartError, match="only Kueue can place each member of a run by itself; remove `placement:`"):
        emitted(sweep("none", placement={"within": "leaf"}))


def test_members_share_slots_only_if_their_pods_are_alike() -> None:
    jobs = {
        "a": job("pretrain", place(nodes=2), name="a"),
        "b": job("pretrain", place(nodes=4), name="b"),
        "c": job("pretrain", place(nodes=2), name="c", run={"env": {"A": "b"}}),
    }
    spec = MembersSpec([MemberSpec(name) for name in jobs])
    target, slots = emitted(job("pretrain", place(nodes=1)), members=Members(spec, jobs))
    valid(target, slots)
    assert [(item.members, item.num_slots, item.target.num_pods) for item in slots] == [
        (("a", "c"), 2, 2),
        (("b",), 1, 4),
    ]
    one = Members(replace(spec, parallel=1), jobs)
    assert [item.num_slots for item in emitted(job("pretrain", place(nodes=1)), members=one)[1]] == [1, 1]


def test_the_values_of_secrets_are_in_no_object_and_members_get_those_of_their_owner() -> None:
    documents = valid(*emitted(sweep()))
    [secret] = [item for item in documents if item["kind"] == "Secret"]
    assert "data" not in secret
    for item in replicated(documents).values():
        volumes = item["template"]["spec"]["template"]["spec"]["volumes"]
        [source] = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "secrets"]
        assert source[0]["secret"]["name"] == secret["metadata"]["name"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (sweep(place={**place(), "storage": {}}, data={"path": "s3://b/t", "sequence": 8192}), "needs shared storage"),
        (
            sweep(
                place={**place(), "storage": {"shared": {"path": "s3://b"}}}, data={"path": "s3://b/t", "sequence": 8}
            ),
            "a run with members needs shared storage",
        ),
    ],
)
def test_a_run_with_members_needs_storage_that_all_pods_mount(wanted: Job, message: str) -> None:
    with pytest.raises(StartError, match=message):
        emitted(wanted)


def test_a_member_with_another_queue_or_time_limit_is_refused() -> None:
    for run, message in (
        ({"queue": "other"}, "member a: its queue is other, and that of the run is research"),
        ({"time_limit": "1h"}, r"member a: run\.time_limit of a member is the run's on Kubernetes"),
    ):
        members = Members(MembersSpec([MemberSpec("a")]), {"a": job("pretrain", place(), name="a", run=run)})
        with pytest.raises(StartError, match=message):
            emitted(job("pretrain", place()), members=members)


def drafted_sweep(folder: Path, gang: str) -> tuple[Draft, RunDirectory]:
    """A run on shared storage, with the files that `craton run` writes before it submits them."""
    wanted = sweep(place=place(gang, 1, storage={"shared": {"path": str(folder), "claim": "fsx"}}))
    wanted = wanted.model_copy(update={"data": wanted.data.model_copy(update={"path": f"{folder}/tokens"})})
    run = RunDirectory.create(folder / "runs", "llm")
    drafted = draft_run(wanted, run.path, on="kubernetes", is_dry=True)
    for name, text in {**drafted.files(), **KubernetesBackend().files(drafted, run)}.items():
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text(text)
    return drafted, run


def test_a_sweep_is_submitted_stopped_and_resumed_as_a_whole(tmp_path: Path, server: StandIn) -> None:
    drafted, run = drafted_sweep(tmp_path, "volcano")
    slots = read_slots(run)
    assert slots is not None
    assert slots_text(slots) == (run.path / "slots.json").read_text()
    assert [(group.name, group.num_slots, len(group.members)) for group in slots.groups] == [("slot0", 2, 6)]
    write_submission(run, KubernetesBackend().submit(drafted, run))
    [jobset], [group], [secret] = (server.of(plural) for plural in ("jobsets", "podgroups", "secrets"))
    assert group["metadata"]["ownerReferences"][0]["uid"] == jobset["metadata"]["uid"]
    assert b64decode(secret["data"]["HF_TOKEN"]).decode() == SECRET
    assert all(SECRET not in path.read_text() for path in run.path.rglob("*.*") if path.is_file())
    server.put(
        "v1",
        "pods",
        {
            "metadata": {"name": "llm-slot0-1-0-abcde", "labels": jobset["metadata"]["labels"]},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Running"},
        },
    )
    assert standing_of(run).condition == "running"
    KubernetesBackend().kill(run)
    assert server.of("jobsets") == server.of("podgroups") == []
    resumed = replace(drafted, members=Members(read_members(run)))  # its job files are in the directory
    assert set(KubernetesBackend().files(resumed, run)) == {"kubernetes.yaml", "slots.json"}


def test_a_laptop_sends_the_slots_with_the_other_files() -> None:
    target, slots = emitted(sweep(), LAPTOP)
    assert slots_layout(target, slots).groups[0].num_slots == 2
    assert {"members.json", *(f"jobs/{name}.yaml" for name in slots[0].members)} <= set(target.files)


def test_labels_hold_any_name_and_the_longest_pod_name_fits() -> None:
    assert label_value("rollout-0") == "rollout-0"
    for text in ("llm/base", "x" * 80, "_", "a_"):
        value = label_value(text)
        assert value != text
        assert len(value) <= 63
        assert value[0].isalnum()
        assert value[-1].isalnum()
    assert label_value("a/b") != label_value("a.b")
    assert len(f"{'x' * MAX_LETTERS}-slot999-999-1023-xxxxx") <= 63
