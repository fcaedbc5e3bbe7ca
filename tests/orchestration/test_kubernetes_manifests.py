"""What is sent to Kubernetes: valid in every combination, as in the golden files, and never more than is needed."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_jobs import LAPTOP, LEAF, SHARED, cluster, draft, job, target
from kubernetes_schemas import problems

from craton.orchestration import StartError
from craton.orchestration.kubernetes.emitters import manifests, to_yaml
from craton.orchestration.kubernetes.names import MAX_LETTERS, object_name
from craton.orchestration.kubernetes.target import KubernetesTarget, PodMount, target_of

GANGS = ("none", "kueue", "kai", "volcano")
QUEUED: dict[str, dict[str, Any]] = {
    "none": {},
    "kueue": {"queue": "research", "topology": "efa"},
    "kai": {"queue": "research", "topology": "efa"},
    "volcano": {"queue": "research"},
}
TIGHT = {
    "priority": "high",
    "service_account": "trainer",
    "tolerations": ["nvidia.com/gpu", "dedicated"],
}
POOL = {"node_pool": "p5"}
RDMA = {"resources": {"rdma/hca_shared_devices_a": 1}}
SECRET = "hf_do_not_tell"
FOLDER = Path(__file__).with_name("kubernetes_golden")


def place(gang: str, machine: str = "p5", nodes: int | str = 4, **more: Any) -> dict[str, Any]:
    scheduler = {"gang": gang, **QUEUED[gang], **more.pop("scheduler", {})}
    return cluster(machine, nodes, scheduler=scheduler, **more)


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod template of the first document, whatever owns it."""
    spec = documents[0]["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if "tasks" in spec:
        spec = spec["tasks"][0]
    if "leaderWorkerTemplate" in spec:
        return dict(spec["leaderWorkerTemplate"]["workerTemplate"])
    return dict(spec["template"])


def container_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(pod_of(documents)["spec"]["containers"][0])


def limit_of(kind: str) -> dict[str, str]:
    """A server has none."""
    return {} if kind == "serve" else {"time_limit": "2d"}


# What a target may have beside gang, kind and placement, which change what it is made of.
AXES: list[list[dict[str, Any]]] = [
    [
        {"resources": {"cpu": "1", "memory": "1Gi"}, "limits": {}, "uses_efa": False, "shared_memory_bytes": 0},
        {
            "num_pods": 9,
            "uses_efa": True,
            "pins_memory": True,
            "resources": {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi", "cpu": "172"},
            "limits": {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"},
        },
        {"uses_efa": False, "resources": {"nvidia.com/gpu": "2"}, "limits": {"nvidia.com/gpu": "2"}},
    ],
    [
        {"mounts": ()},
        {"mounts": (PodMount("shared", "/fsx", "fsx"),)},
        {"mounts": (PodMount("shared", "/fsx"), PodMount("nvme", "/scratch"))},
    ],
    [
        {"secrets": {}},
        {"secrets": {"HF_TOKEN": "llm-secrets", "OTHER": "craton-secrets"}},
    ],
    [
        {"files": {}, "code": b"", "user": (1000, 100)},
        {"files": {"job.yaml": "a: 1\n", "plans/4.json": "{}"}, "code": b"", "user": None, "is_scratch": True},
        {"files": {"job.yaml": "a: 1\n"}, "code": b"packed", "user": (0, 0)},
    ],
    [
        {},
        {
            "priority": "high",
            "service_account": "trainer",
            "node_pool": "p5",
            "tolerations": ("nvidia.com/gpu",),
            "exclude": ("n1",),
            "time_limit": 7200,
            "save_before": 600,
            "namespace": "",
        },
    ],
    [{"is_open": False}, {"is_open": True, "server_port": 8000}],
]


@pytest.mark.parametrize("gang", GANGS)
def test_every_combination_is_valid_and_nothing_unknown_is_in_it(gang: str) -> None:
    count = 0
    for kind, near in itertools.product(
        ("pretrain", "command", "serve"), (None, {"within": "leaf"}, {"within": "spine", "wait": "10m"})
    ):
        made = target(job(kind, place(gang, nodes=1 if kind == "serve" else 4), placement=near))
        for changes in itertools.product(*AXES):
            documents = manifests(replace(made, **{key: value for each in changes for key, value in each.items()}))
            assert [problem for document in documents for problem in problems(document)] == []
            count += 1
    assert count == 9 * 3 * 3 * 2 * 3 * 2 * 2


@pytest.mark.parametrize("machine", ["p5", "lab"])
@pytest.mark.parametrize("gang", GANGS)
def test_job_files_make_valid_manifests_that_are_sent_as_they_are_printed(gang: str, machine: str) -> None:
    for kind, root in itertools.product(("pretrain", "command", "serve"), (LAPTOP, SHARED)):
        pool = POOL if root == SHARED else {}
        scheduler, nodes = {**TIGHT, **RDMA, **pool}, 1 if kind == "serve" else 6
        wanted = job(
            kind,
            place(gang, machine, nodes, scheduler=scheduler, storage={"nvme": {"path": "/scratch"}}),
            placement=None if pool else {"within": "leaf"},
            run={"secrets": ["HF_TOKEN"], "env": {"A": "b"}, "exclude": ["n1"], **limit_of(kind)},
            **({"recover": {"spares": 1}} if kind != "serve" else {}),
            **({"checkpoint": {"tiers": [{"to": "nvme", "every": "5m"}]}} if kind == "pretrain" else {}),
        )
        documents = manifests(target(wanted, root, shell_variables={"HF_TOKEN"}))
        assert [problem for document in documents for problem in problems(document)] == []
        resources = container_of(documents)["resources"]
        assert {**resources["limits"], "cpu": resources["requests"]["cpu"]} == resources["requests"], "of devices too"
        assert list(yaml.load_all(to_yaml(documents), Loader=yaml.CSafeLoader)) == documents


def test_the_checker_itself_refuses_what_is_unknown_or_of_another_type() -> None:
    for gang, kind in itertools.product(GANGS, ("pretrain", "serve")):
        documents = manifests(target(job(kind, place(gang, nodes=1))))
        for document in documents:
            assert problems({**document, "surprise": 1}), document["kind"]
        spec = pod_of(documents)["spec"]
        spec["restartPolicies"] = "Never"
        assert any("restartPolicies" in problem for problem in problems(documents[0]))
        del spec["restartPolicies"]
        spec["terminationGracePeriodSeconds"] = "soon"
        assert any("soon" in problem for problem in problems(documents[0]))


@pytest.mark.parametrize(
    ("name", "gang", "kind"),
    [
        ("jobset_kueue", "kueue", "pretrain"),
        ("jobset_kai", "kai", "pretrain"),
        ("volcano_job", "volcano", "pretrain"),
        ("indexed_job", "none", "command"),
        ("leader_worker_set", "kueue", "serve"),
        ("leader_worker_set_volcano", "volcano", "serve"),
    ],
)
def test_golden_files(name: str, gang: str, kind: str, pytestconfig: pytest.Config) -> None:
    serves = {"serve": {"host": "0.0.0.0", "initialize": "random", "api_keys": "KEYS"}} if kind == "serve" else {}
    pool, nodes = POOL if name == "leader_worker_set_volcano" else {}, 1 if kind == "serve" else 5
    wanted = job(
        kind,
        place(gang, "p5", nodes, scheduler={**TIGHT, **pool}, storage={"nvme": {"path": "/opt/dlami/nvme"}}),
        placement=None if pool else {"within": "leaf"},
        run={"secrets": ["HF_TOKEN"], "env": {"NCCL_DEBUG": "WARN"}, "exclude": ["ip-10-0-0-7"], **limit_of(kind)},
        **({"recover": {"spares": 1}} if kind != "serve" else {}),
        **({"checkpoint": {"tiers": [{"to": "nvme"}, {"to": "shared"}]}} if kind == "pretrain" else {}),
        **serves,
    )
    # The files in a ConfigMap are the job's own, and change with the job file's schema; one of them stands for all.
    made = target(wanted, SHARED if kind == "pretrain" else LAPTOP, shell_variables={"HF_TOKEN", "KEYS"})
    if made.files:
        made = target_of(
            draft(wanted, LAPTOP / "llm"), LAPTOP / "llm", submission=made.submission, shell_variables={"HF_TOKEN"}
        )
        made.files.clear()
        made.files["job.yaml"] = "name: llm\n"
    documents = manifests(made)
    for document in documents:
        if "x-k8s.io" not in document["apiVersion"] and "volcano" not in document["apiVersion"]:
            kubernetes_validate.validate(document, "1.37", strict=True)
    text = to_yaml(documents)
    path = FOLDER / f"{name}.yaml"
    if pytestconfig.getoption("--update-golden"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), (
        f"{path.name} differs; if that is meant, `pytest --update-golden` and read the diff"
    )


@pytest.mark.parametrize("gang", GANGS)
def test_a_pod_has_no_rights_that_the_job_does_not_need(gang: str) -> None:
    documents = manifests(target(job("pretrain", place(gang)), SHARED))
    pod, container = pod_of(documents)["spec"], container_of(documents)
    assert pod["automountServiceAccountToken"] is False
    assert "hostNetwork" not in pod
    assert "hostIPC" not in pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    alone = container_of(manifests(target(job("pretrain", place(gang, nodes=1)), SHARED)))
    assert alone["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert [volume["name"] for volume in pod["volumes"]] == ["shm", "run-nodes", "shared"]
    policy = next(each for each in documents if each["kind"] == "NetworkPolicy")
    assert policy["spec"]["ingress"][0]["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_a_namespace_that_wants_to_be_told_is_told_that_the_image_s_user_is_not_root() -> None:
    def security(user: tuple[int, int] | None, folder: Path = LAPTOP, **more: Any) -> dict[str, Any]:
        wanted = job("pretrain", place("none", scheduler=more))
        return dict(pod_of(manifests(target(wanted, folder, user=user)))["spec"]["securityContext"])

    assert "runAsNonRoot" not in security(None), "a root image would not start"
    assert security(None, non_root=True)["runAsNonRoot"] is True
    with pytest.raises(StartError, match=r"`non_root:`.* which is root; start it as another user"):
        security((0, 0), SHARED, non_root=True)


def test_the_devices_are_those_of_the_instance() -> None:
    def limits(instance: str, nodes: int = 4) -> dict[str, str]:
        where = {**place("none", nodes=nodes), "instance": instance}
        return dict(container_of(manifests(target(job("pretrain", where), SHARED)))["resources"]["limits"])

    for instance, count in {"p5.48xlarge": "32", "p5en.48xlarge": "16", "p6-b200.48xlarge": "8"}.items():
        assert limits(instance)["vpc.amazonaws.com/efa"] == count
        assert limits(instance)["nvidia.com/gpu"] == "8"
        assert limits(instance)["hugepages-2Mi"] == "5120Mi"
    assert set(limits("p5.48xlarge", 1)) == {"memory", "nvidia.com/gpu"}, "one node needs no network"
    lab = container_of(manifests(target(job("pretrain", place("none", "lab")), SHARED)))["resources"]["limits"]
    assert set(lab) == {"memory", "nvidia.com/gpu"}


def test_adapters_that_are_not_efa_are_those_that_the_cluster_file_names() -> None:
    def container(nodes: int, machine: str = "lab") -> dict[str, Any]:
        wanted = job("pretrain", place("none", machine, nodes, scheduler=RDMA))
        return container_of(manifests(target(wanted, SHARED)))

    several = container(4)
    for asked in several["resources"].values():
        assert asked["rdma/hca_shared_devices_a"] == "1"
    assert several["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "FI_PROVIDER" not in {each["name"] for each in several["env"]}
    alone = container(1)
    assert "rdma/hca_shared_devices_a" not in alone["resources"]["limits"], "one node needs no network"
    assert alone["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"vpc.amazonaws.com/efa", "rdma/hca_shared_devices_a"} <= set(container(4, "p5")["resources"]["limits"])


def test_pods_of_a_pool_that_may_be_empty_ask_for_nothing_that_karpenter_cannot_make() -> None:
    def container(**scheduler: str) -> dict[str, Any]:
        return container_of(manifests(target(job("pretrain", place("none", scheduler=scheduler)), SHARED)))

    def values(made: dict[str, Any]) -> dict[str, Any]:
        return {each["name"]: each.get("value") for each in made["env"]}

    pooled, fixed = container(**POOL), container()
    assert set(fixed["resources"]["limits"]) - set(pooled["resources"]["limits"]) == {"hugepages-2Mi"}
    assert pooled["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert values(pooled)["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert "FI_EFA_USE_HUGE_PAGE" not in values(fixed)


@pytest.mark.parametrize("gang", GANGS)
def test_a_place_that_karpenter_cannot_promise_is_a_wish_or_refused(gang: str) -> None:
    def asked(**placement: str) -> KubernetesTarget:
        return target(job("pretrain", place(gang, scheduler=POOL), placement=placement), SHARED)

    if gang == "kueue":
        for wanted in ({"within": "leaf", "wait": "10m"}, {"within": "zone"}):
            with pytest.raises(StartError, match=r"Kueue places jobs only on existing nodes; remove `placement:`"):
                asked(**wanted)
        return
    with pytest.raises(StartError, match=r"within leaf: Karpenter creates the nodes of p5, and their leaf is unknown"):
        asked(within="leaf")
    assert asked(within="leaf", wait="10m").near
    if gang != "volcano":  # by tier, and the zone has none here
        assert asked(within="zone").near


def test_a_queue_that_nobody_keeps_is_refused() -> None:
    for where, run in ((place("none", scheduler={"queue": "research"}), {}), (place("none"), {"queue": "research"})):
        with pytest.raises(StartError, match="queue research: `queue:` requires a gang scheduler; set"):
            target(job("command", where, run=run))


def test_a_server_under_volcano_is_in_its_queue_whoever_makes_its_pod_group() -> None:
    documents = manifests(target(job("serve", place("volcano", nodes=1))))
    for metadata in (documents[0]["metadata"], pod_of(documents)["metadata"]):
        assert metadata["annotations"]["scheduling.volcano.sh/queue-name"] == "research"


def test_a_server_takes_a_share_of_a_node_and_is_closed_unless_it_listens_for_others() -> None:
    wanted = job("serve", place("none", nodes=1), layout={"tp": 2})
    launch = draft(wanted, LAPTOP / "llm").launch
    two = replace(draft(wanted, LAPTOP / "llm"), launch=replace(launch, ranks_per_node=2))
    documents = manifests(target_of(two, LAPTOP / "llm", submission="x"))
    requests = container_of(documents)["resources"]["requests"]
    assert requests["nvidia.com/gpu"] == "2"
    assert int(requests["cpu"]) == int(192 * 0.9 / 4)
    assert [each["kind"] for each in documents] == ["LeaderWorkerSet", "ConfigMap", "NetworkPolicy"]
    assert "readinessProbe" not in container_of(documents)
    serve = {"host": "0.0.0.0", "initialize": "random", "api_keys": "KEYS"}
    opened = manifests(target(job("serve", place("none", nodes=1), serve=serve)))
    assert [each["kind"] for each in opened] == ["LeaderWorkerSet", "ConfigMap", "Service", "NetworkPolicy"]
    assert opened[-1]["spec"]["ingress"][1]["ports"] == [{"port": 29400}, {"port": 8000}]
    assert container_of(opened)["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_topology_by_name_reaches_every_scheduler_in_its_own_words() -> None:
    def emitted(gang: str, **placement: str) -> list[dict[str, Any]]:
        return manifests(target(job("pretrain", place(gang), placement=placement), SHARED))

    must, may = {"within": "leaf"}, {"within": "leaf", "wait": "10m"}
    assert pod_of(emitted("kueue", **must))["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-required-topology": LEAF
    }
    assert pod_of(emitted("kueue", **may))["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": LEAF
    }
    plain = manifests(target(job("pretrain", place("kueue")), SHARED))
    assert pod_of(plain)["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}
    kai = emitted("kai", **must)[0]["metadata"]["annotations"]
    assert (kai["kai.scheduler/topology"], kai["kai.scheduler/topology-required-placement"]) == ("efa", LEAF)
    assert emitted("volcano", **must)[0]["spec"]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 1}
    assert emitted("volcano", **may)[0]["spec"]["networkTopology"]["mode"] == "soft"
    affinity = pod_of(emitted("none", **must))["spec"]["affinity"]["podAffinity"]
    assert affinity["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == LEAF
    wish = pod_of(emitted("none", **may))["spec"]["affinity"]["podAffinity"]
    assert wish["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"]["topologyKey"] == LEAF


def test_restarts_are_bounded_and_a_fatal_run_is_not_tried_again() -> None:
    run = {"restarts": 3, "time_limit": "1h"}
    for gang in ("none", "kueue", "kai"):
        owner = manifests(target(job("pretrain", place(gang), run=run), SHARED))[0]
        spec = owner["spec"] if gang == "none" else owner["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
        assert "activeDeadlineSeconds" not in spec, "it would count the time in a queue"
        assert spec["template"]["spec"]["activeDeadlineSeconds"] == 3600
        rules = spec["podFailurePolicy"]["rules"]
        assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
            ("FailJob", [77]),
            ("Ignore", [75]),
            ("Ignore", None),
        ]
    volcano = manifests(target(job("pretrain", place("volcano"), run=run), SHARED))[0]["spec"]
    assert volcano["maxRetry"] == 3
    assert volcano["policies"][0] == {"exitCode": 77, "action": "TerminateJob"}
    environment = {each["name"]: each.get("value") for each in container_of([{"spec": volcano}])["env"]}
    assert environment["CRATON_STOP_AFTER"] == "3000", "a checkpoint is made save_before the time limit"


def test_a_server_has_no_time_limit_for_it_would_be_started_again_for_ever() -> None:
    where = place("none", nodes=1)
    with pytest.raises(StartError, match=r"run\.time_limit: Kubernetes restarts a server whenever it exits"):
        target(job("serve", where, run={"time_limit": "1h"}))
    made = container_of(manifests(target(job("serve", where))))
    assert "CRATON_STOP_AFTER" not in {each["name"] for each in made["env"]}


def test_without_restarts_a_volcano_job_ends_with_its_first_failure() -> None:
    spec = manifests(target(job("pretrain", place("volcano"), run={"restarts": 0}), SHARED))[0]["spec"]
    assert spec["maxRetry"] > 0, "0 is read as Volcano's own default"
    actions = {str(each.get("exitCode") or each.get("event")): each["action"] for each in spec["policies"]}
    assert list(actions.items()) == [
        ("77", "TerminateJob"),
        ("75", "RestartPod"),
        ("PodEvicted", "RestartPod"),
        ("PodFailed", "TerminateJob"),
        ("TaskCompleted", "CompleteJob"),
    ]


@pytest.mark.parametrize(
    ("kind", "key", "document"),
    [
        ("pretrain", "model", {"model": "mine.models:tiny"}),
        ("pretrain", "objective", {"objective": "mine.losses:focal"}),
        ("pretrain", "data.source", {"data": {"source": "mine.data:stream", "sequence": 8192}}),
    ],
)
def test_functions_in_a_folder_that_no_pod_sees_are_refused(
    tmp_path: Path, kind: str, key: str, document: dict[str, Any]
) -> None:
    def made(folder: Path, shared: str = "/fsx") -> KubernetesTarget:
        wanted = job(kind, cluster(storage={"shared": {"path": shared, "claim": "fsx"}}), **document)
        if isinstance(wanted.data.path, str):
            wanted = wanted.model_copy(update={"data": wanted.data.model_copy(update={"path": f"{shared}/tokens"})})
        drafted = draft(wanted, LAPTOP / "llm")
        launch = replace(drafted.launch, env={**drafted.launch.env, "CRATON_JOB_FOLDER": str(folder)})
        return target_of(replace(drafted, launch=launch), LAPTOP / "llm", submission="0123456789abcdef")

    made(tmp_path)  # not there: in the image
    (tmp_path / "mine").mkdir()
    with pytest.raises(
        StartError, match=rf"{key}: mine\.\w+:\w+ is in {tmp_path}, which is not visible in the pods; keep"
    ):
        made(tmp_path)
    made(tmp_path, shared=str(tmp_path.parent))


def test_spares_and_elastic_jobs_ask_for_more_than_they_need_to_start() -> None:
    spared = job("pretrain", place("volcano", nodes=5), recover={"spares": 1})
    assert (target(spared).num_pods, target(spared).gang_pods) == (6, 5)
    elastic = target(job("command", place("volcano", nodes="2..4")))
    assert (elastic.num_pods, elastic.gang_pods) == (4, 2)
    assert manifests(elastic)[0]["spec"]["minAvailable"] == 2


def test_values_of_secrets_are_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for gang, kind in itertools.product(GANGS, ("pretrain", "command", "serve")):
        nodes = 1 if kind == "serve" else 4
        made = target(
            job(kind, place(gang, nodes=nodes), run={"secrets": ["HF_TOKEN", "OTHER"]}), shell_variables={"HF_TOKEN"}
        )
        documents = manifests(made)
        assert SECRET not in to_yaml(documents)
        assert SECRET not in json.dumps(documents)
        [volume] = [each for each in pod_of(documents)["spec"]["volumes"] if each["name"] == "secrets"]
        assert [each["secret"] for each in volume["projected"]["sources"]] == [
            {"name": "llm-secrets", "items": [{"key": "HF_TOKEN", "path": "HF_TOKEN"}]},
            {"name": "craton-secrets", "items": [{"key": "OTHER", "path": "OTHER"}]},
        ]
        [mount] = [each for each in container_of(documents)["volumeMounts"] if each["name"] == "secrets"]
        assert mount == {"name": "secrets", "mountPath": "/etc/craton/secrets", "readOnly": True}
        assert {"HF_TOKEN", "OTHER"}.isdisjoint(each["name"] for each in container_of(documents)["env"])
        secret = next(each for each in documents if each["kind"] == "Secret")
        assert {"data", "stringData"}.isdisjoint(secret)


HOSTILE = [
    "$(HF_TOKEN)",
    "$HOME",
    "`id`",
    "a'b\"c",
    "x\ny: z",
    "--- \n!!python/object:x",
    "{{ .Values }}",
    "\u2028",
    "$$",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_of_the_job_file_stays_a_text(value: str) -> None:
    documents = manifests(target(job("command", place("none"), run={"env": {"A": value}, "secrets": ["HF_TOKEN"]})))
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents
    emitted = next(each["value"] for each in container_of(documents)["env"] if each["name"] == "A")
    assert expanded(emitted) == value
    assert container_of(documents)["command"][:3] == ["python3", "-m", "craton.orchestration.kubernetes.pod"]


def expanded(text: str) -> str:
    """What a container sees: Kubernetes' own rule, with every variable set to something else."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda match: "$" if match[1] == "$" else "EXPANDED", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": {"namespace": "a b; rm"}}, "run.namespace is 'a b; rm'"),
        ({"run": {"queue": "q\nx: y"}}, "run.queue is"),
        ({"run": {"priority": "high!"}}, "run.priority is"),
        ({"run": {"image": "img; curl"}}, "image is 'img; curl'"),
        ({"run": {"exclude": ["n1,n2"]}}, "run.exclude is"),
        ({"run": {"copies": 3}}, "run.copies needs Slurm's job arrays"),
        ({"data": {"path": "/home/ada/tokens", "sequence": 8192}}, "/home/ada/tokens is not visible in the pods"),
        ({"checkpoint": {"tiers": [{"to": "/elsewhere"}]}}, "/elsewhere/llm is not visible"),
        (
            {"train": {"global_batch_sequences": 128, "evaluate": {"every_steps": 9, "suite": "/home/ada/own.yaml"}}},
            "train.evaluate.suite: /home/ada/own.yaml is not visible in the pods; keep suites and their problems below",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_with_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=re.escape(message)):
        target(job("pretrain", place("kueue"), **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler": {"kind": "kubernetes"}}, "a pod needs an image"),
        ({"scheduler": {"kind": "kubernetes", "image": "a", "gang": "kueue"}}, "kueue admits jobs by queue"),
        (
            {"scheduler": {"kind": "kubernetes", "image": "a", "gang": "kai", "queue": "q"}},
            "KAI needs the name of a Topology",
        ),
        ({"levels": {"leaf": {"nodes": 2}}}, "the cluster file has no label for it"),
        ({"levels": {"leaf": {"label": "a b"}}}, "levels.leaf.label is 'a b'"),
        (
            {"levels": {"leaf": {"label": LEAF}}, "scheduler": {"kind": "kubernetes", "image": "a", "gang": "volcano"}},
            "Volcano identifies levels by tier",
        ),
        ({"storage": {}}, "4 pods need shared storage"),
        ({"storage": {"shared": {"path": "/fsx:x"}}}, "storage.shared.path is '/fsx:x'"),
        ({"storage": {"shared": {"path": "/fsx", "claim": "My Claim"}}}, "storage.shared.claim is 'My Claim'"),
        ({"runs": "/elsewhere/runs"}, "is not below the shared storage /fsx"),
    ],
)
def test_a_cluster_file_that_cannot_be_used_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=re.escape(message)):
        target(job("command", {**cluster(), **change}, placement={"within": "leaf"}))


def test_the_run_directory_is_where_all_pods_see_it() -> None:
    shared = target(job("pretrain", place("none")), SHARED)
    assert (shared.directory, shared.files, shared.user) == ("/fsx/runs/llm", {}, (1000, 1000))
    laptop = target(job("pretrain", place("none")), LAPTOP)
    assert (laptop.directory, laptop.user) == ("/fsx/runs/llm", None)
    assert set(laptop.files) == {"job.yaml", "launch.json"}
    stated = target(job("pretrain", cluster(runs="/fsx/team/runs")), LAPTOP)
    assert stated.directory == "/fsx/team/runs/llm"
    bucket = target(job("pretrain", cluster(runs="s3://bucket/runs")), LAPTOP)
    assert bucket.directory == "/fsx/runs/llm"
    alone = target(job("command", {**cluster(nodes=1), "storage": {}}), LAPTOP)
    assert (alone.directory, alone.is_scratch) == ("/craton/runs/llm", True)
    assert {"name": "scratch", "emptyDir": {}} in pod_of(manifests(alone))["spec"]["volumes"]


def test_a_node_s_own_storage_is_a_host_path_and_only_where_it_is_used() -> None:
    where = cluster(storage={"shared": {"path": "/fsx"}, "nvme": {"path": "/scratch"}})
    volumes = pod_of(manifests(target(job("pretrain", where), SHARED)))["spec"]["volumes"]
    assert volumes[2:] == [{"name": "shared", "hostPath": {"path": "/fsx", "type": "Directory"}}]
    used = job("pretrain", where, checkpoint={"tiers": [{"to": "nvme", "every": "5m"}]})
    assert [each["name"] for each in pod_of(manifests(target(used, SHARED)))["spec"]["volumes"]] == [
        "shm",
        "run-nodes",
        "shared",
        "nvme",
    ]


def test_a_job_for_this_machine_runs_as_pods_without_gpus() -> None:
    wanted = job("command", "local x 1", run={"image": "craton:1"})
    documents = manifests(target(wanted))
    assert [problem for document in documents for problem in problems(document)] == []
    assert container_of(documents)["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}}
    assert "affinity" not in pod_of(documents)["spec"]


def test_names_are_ones_that_kubernetes_takes_and_never_meet() -> None:
    assert object_name("llama-8b") == "llama-8b"
    given = [
        "Llama_8B.v2",
        "llama_8b.v2",
        "llama-8b.v2",
        "8b",
        "run-8b",
        "a" * 63,
        "a" * 62 + "b",
        "A",
        "a",
        "x.-_y",
        "0",
    ]
    names = [object_name(each) for each in given]
    assert len(set(names)) == len(given)
    for name in names:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
        assert len(name) <= MAX_LETTERS
    wanted = job("command", place("kueue"), name="Llama_8B.v2")
    documents = manifests(target(wanted))
    assert documents[0]["metadata"]["annotations"]["craton/run"] == "Llama_8B.v2"
    assert pod_of(documents)["metadata"]["labels"]["craton/run"] == "Llama_8B.v2", "metrics have the run's own name"
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in documents} == {names[0]}
    assert container_of(documents)["command"][-1] == "/fsx/runs/Llama_8B.v2"


def test_files_too_large_for_a_config_map_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.orchestration.kubernetes.target.MAX_FILE_BYTES", 100)
    with pytest.raises(StartError, match="exceed the 100 bytes of a ConfigMap; start it on"):
        target(job("command", place("none")), LAPTOP)
    target(job("command", place("none")), SHARED)
