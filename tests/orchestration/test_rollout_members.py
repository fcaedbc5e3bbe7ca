"""A trainer and its rollout servers as one job of a scheduler: a Slurm job with a step for each server, a JobSet with a
slot for each. Slurm is real. No cluster is available for Kubernetes: the test starts the pods of the JobSet as
processes, with the commands, variables and secrets that the objects give them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_schemas import problems
from kubernetes_standin import StandIn
from member_runs import check_nothing_is_left, kill_member, manager_log, member, states, status, wait_for_members_in
from rollout_runs import check_journal, events, metrics, rollout_job
from slurm_lab import SlurmLab
from slurm_runs import SLURM_SECONDS, hosts_of, last_words
from waiting import PATIENCE_SECONDS, wait_until

from craton import run as start_run_of
from craton.agent.processes import free_port
from craton.api import Run, preview
from craton.job import Job
from craton.orchestration.backend import read_submission
from craton.orchestration.draft.members import rollout_servers
from craton.orchestration.errors import StartError
from craton.orchestration.kubernetes import KubernetesBackend
from craton.orchestration.kubernetes.members import slot_targets
from craton.orchestration.slurm import sbatch_script
from craton.telemetry import summarize

KEY = "a-key-that-only-the-servers-take"
SEPARATE = "mode: separate, staleness: 2"
STEPS = 40


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", KEY)
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rollout_servers, "FIRST_PORT", free_port())  # several tests may run side by side


def trained(run: Run) -> int:
    return max((line["step"] for line in metrics(run.directory) if "run_reward" in line), default=0)


def check_key_is_secret(folder: Path) -> None:
    """Only the addresses of members, which no other user can read, have it."""
    holders = [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert [(path.name, path.stat().st_mode & 0o077) for path in holders] in ([], [("addresses.json", 0)])


def test_servers_of_a_run_whose_nodes_share_a_gpu_are_planned(root: Path, tmp_path: Path) -> None:
    job = rollout_job(tmp_path, "shared", SEPARATE, nodes=2)
    servers = rollout_servers.rollout_servers(job.with_shared_gpus(), "local")
    assert [server.run.share_gpus for server in servers.values()] == [False]


# -- Slurm ------------------------------------------------------------------------------------------------------------


def test_one_batch_job_has_the_nodes_of_trainer_and_rollout_servers(root: Path, tmp_path: Path) -> None:
    job = rollout_job(tmp_path, "planned", f"{SEPARATE}, workers: 2", nodes=2)
    start = preview(job, on="slurm")
    script = sbatch_script(start.draft, start.run)
    assert "#SBATCH --nodes=4\n" in script
    assert start.draft.members is not None
    servers = [server.serve for server in start.draft.members.jobs.values()]
    assert [(serve.host, serve.api_keys) for serve in servers if serve] == [("0.0.0.0", "ROLLOUT_KEY")] * 2
    assert "# from the environment of the submitting shell: ROLLOUT_KEY" in script
    assert KEY not in script + "".join(start.draft.files().values())


def test_servers_on_other_nodes_need_a_key(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_KEY")
    with pytest.raises(StartError, match=r"rollout\.mode separate .* need an API key: run `export ROLLOUT_KEY="):
        preview(rollout_job(tmp_path, "open", SEPARATE), on="slurm")


@pytest.mark.slow
def test_slurm_trains_with_a_server_that_is_killed_and_a_run_that_is_stopped(
    root: Path, slurm: SlurmLab, tmp_path: Path
) -> None:
    """The only server is killed, so no step is possible before another takes its place. Then the run is stopped and
    resumed in a new job."""
    run = start_run_of(rollout_job(tmp_path, "rollouts", SEPARATE, STEPS, "run: {on: slurm}"))
    wait_until(lambda: trained(run) >= 2, lambda: f"{manager_log(run)}{last_words(run.directory)}", SLURM_SECONDS)
    server = member(run, "rollout-0")
    assert slurm("squeue", "--noheader", "--format=%D").split() == ["2"], "one job has the nodes of both"
    assert read_submission(server.directory).job == read_submission(run.directory).job
    assert not set(hosts_of(run.directory).values()) & set(hosts_of(server.directory).values())
    check_key_is_secret(run.path)
    members = run.summary().members
    assert members is not None
    assert members.node_seconds > 0, "on a node of its own"

    kill_member(run, "rollout-0")
    at_kill = trained(run)
    wait_until(lambda: status(run).members["rollout-0"].restarts == 1, lambda: manager_log(run), SLURM_SECONDS)
    wait_until(lambda: trained(run) > at_kill + 3, lambda: manager_log(run), SLURM_SECONDS)
    assert events(run.directory, "rollout_server_lost")
    assert summarize(run.directory).generation == 0, "no rank of the trainer began again"

    assert run.stop().state == "stopped"
    assert states(run) == {"rollout-0": "stopped"}
    wait_until(lambda: not slurm("squeue", "--noheader"), lambda: slurm("squeue"))
    check_nothing_is_left(run.path)

    run.resume()
    summary = run.wait()
    assert summary.state == "done", f"{summary}{last_words(run.directory)}"
    check_journal(run.directory, STEPS)
    wait_until(lambda: not slurm("squeue", "--noheader"), lambda: slurm("squeue"))
    check_nothing_is_left(run.path)
    check_key_is_secret(run.path)


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def on_kubernetes(folder: Path, workers: int, steps: int = 8, gang: str = "volcano", nodes: int = 1) -> Job:
    """A job whose files are on the shared storage of a cluster of machines like this one."""
    queue = {"queue": "research"} if gang != "none" else {}
    place = {
        "name": "lab",
        "instance": "local",
        "nodes": nodes,
        "storage": {"shared": {"path": str(folder), "claim": "fsx"}},
        "scheduler": {"kind": "kubernetes", "image": "example.com/train:1", "gang": gang, **queue},
    }
    (folder / "lab.yaml").write_text(yaml.safe_dump(place))
    more = "run: {on: kubernetes}"
    return rollout_job(folder, "rollouts", f"{SEPARATE}, workers: {workers}", steps, more, nodes, "lab.yaml")


@pytest.mark.parametrize("gang", ["kueue", "volcano"])
def test_one_jobset_has_the_pods_of_trainer_and_rollout_servers(root: Path, tmp_path: Path, gang: str) -> None:
    start = preview(on_kubernetes(tmp_path, workers=2, gang=gang, nodes=2), on="kubernetes")
    text = KubernetesBackend().files(start.draft, start.run)["kubernetes.yaml"]
    documents = list(yaml.safe_load_all(text))
    assert [problem for document in documents for problem in problems(document)] == []
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    jobs = {item["name"]: item for item in jobset["spec"]["replicatedJobs"]}
    sizes = {name: (item["replicas"], item["template"]["spec"]["parallelism"]) for name, item in jobs.items()}
    assert sizes == {"node": (1, 2), "slot0": (2, 1)}
    assert all(secret_keys(item) == {"ROLLOUT_KEY"} for item in jobs.values()), "the manager asks with it"
    assert KEY not in text
    if gang == "volcano":
        (group,) = [document for document in documents if document["kind"] == "PodGroup"]
        assert group["spec"]["minMember"] == 2 + 2


Pods = Callable[[StandIn], list["subprocess.Popen[bytes]"]]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Start what the controllers of a cluster would start for the JobSet that it was given, all on this machine."""
    started: list[subprocess.Popen[bytes]] = []

    def start(server: StandIn) -> list[subprocess.Popen[bytes]]:
        (jobset,), (secret,) = server.of("jobsets"), server.of("secrets")
        for item in jobset["spec"]["replicatedJobs"]:
            folder = tmp_path / f"secrets-{item['name']}"
            folder.mkdir()
            for name in secret_keys(item):
                (folder / name).write_bytes(b64decode(secret["data"][name]))
            for number in range(item["replicas"]):
                indices = range(item["template"]["spec"]["completions"])
                started.extend(start_pod(item, number, index, folder, tmp_path) for index in indices)
        return started

    yield start
    for pod in started:
        if pod.poll() is None:
            pod.terminate()
            pod.wait(PATIENCE_SECONDS)
    check_nothing_is_left(tmp_path / "runs")


def start_pod(item: dict[str, Any], number: int, index: int, secrets: Path, folder: Path) -> subprocess.Popen[bytes]:
    (container,) = item["template"]["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    ours = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    environment = {
        **given,
        **ours,
        "CRATON_ADDRESS": "127.0.0.1",
        "CRATON_METRICS_PORT": "0",
        "CRATON_SECRETS": str(secrets),
        "CRATON_SLOT_NUMBER": str(number),
        "JOB_COMPLETION_INDEX": str(index),
    }
    assert container["command"][0] == "python3"
    with open(folder / f"pod-{item['name']}-{number}-{index}.log", "ab") as log:
        command = [sys.executable, *container["command"][1:]]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def secret_keys(item: dict[str, Any]) -> set[str]:
    """The variables that the pods of a replicated Job get from Secrets."""
    volumes = item["template"]["spec"]["template"]["spec"]["volumes"]
    sources = [source for volume in volumes if "projected" in volume for source in volume["projected"]["sources"]]
    return {entry["key"] for source in sources for entry in source["secret"]["items"]}


@pytest.mark.slow
def test_pods_of_a_jobset_train_with_their_rollout_servers(
    tmp_path: Path, root: Path, server: StandIn, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_targets, "METRICS_PORT", 0)  # one for each pod, which share this machine
    run = start_run_of(on_kubernetes(tmp_path, workers=2))
    monkeypatch.delenv("ROLLOUT_KEY")
    first, *slots = pods(server)
    assert len(slots) == 2
    wait_for_members_in(run, **{"rollout-0": "ready", "rollout-1": "ready"})
    assert first.wait(SLURM_SECONDS) == 0, last_words(run.directory)
    assert [slot.wait(PATIENCE_SECONDS) for slot in slots] == [0, 0]
    check_journal(run.directory, 8)
    check_key_is_secret(run.path)
