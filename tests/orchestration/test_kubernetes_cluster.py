"""A real cluster, where KUBECONFIG names one: the same client, the same manifests, and pods that run.

The API server alone is enough for what is only sent. Pods need an image with Craton in it (CRATON_TEST_IMAGE), which
may be any that the cluster can pull; CRATON_TEST_NAMESPACE is where they are made, else that of the context.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_jobs import cluster, job, target
from waiting import wait_until

from craton.job import parse_job
from craton.orchestration import RunStateError, Standing
from craton.orchestration.draft import draft_run
from craton.orchestration.errors import SchedulerError
from craton.orchestration.kubernetes import KubernetesBackend
from craton.orchestration.kubernetes.api import Connection, KubernetesApiError, ask
from craton.orchestration.kubernetes.emitters import manifests
from craton.orchestration.start import start_run
from craton.telemetry import RunDirectory

pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG"), reason="KUBECONFIG is not set: no Kubernetes cluster to test against"
)
needs_pods = pytest.mark.skipif(
    not os.environ.get("CRATON_TEST_IMAGE"),
    reason="CRATON_TEST_IMAGE is not set: no image with Craton in it, that pods could run",
)
NAMESPACE = os.environ.get("CRATON_TEST_NAMESPACE", "")
SECONDS = 120.0  # an image may have to be pulled

COUNTING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("token has", len(os.environ["HF_TOKEN"]), "letters", flush=True)
for step in range(int(os.environ["STEPS"])):
    print("step", step, flush=True)
    time.sleep(0.2)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("gang", ["none", "kueue", "kai", "volcano"])
@pytest.mark.parametrize("kind", ["pretrain", "command", "serve"])
def test_the_api_server_takes_what_is_emitted(gang: str, kind: str) -> None:
    scheduler = {"gang": gang, "namespace": NAMESPACE or None, **({"queue": "research"} if gang != "none" else {})}
    if gang in ("kueue", "kai"):
        scheduler["topology"] = "efa"
    place = cluster(nodes=1 if kind == "serve" else 4, scheduler=scheduler)
    limit = {} if kind == "serve" else {"time_limit": "1d"}
    wanted = job(kind, place, placement={"within": "leaf"}, run={"secrets": ["HF_TOKEN"], **limit})
    documents = manifests(target(wanted, shell_variables={"HF_TOKEN"}))

    async def rehearse(connection: Connection) -> None:
        for document in documents:
            content = yaml.safe_dump(document)  # JSON would do too; this is what a user sees
            await connection._ask(
                "POST",
                document,
                params={"fieldValidation": "Strict", "dryRun": "All"},
                content=content,
                headers={"Content-Type": "application/yaml"},
            )

    try:
        ask(rehearse)
    except KubernetesApiError as error:
        if error.status == 404:
            pytest.skip(f"this cluster does not have the kinds of {gang}: {error}")
        raise


def test_the_api_server_refuses_an_unknown_field() -> None:
    [owner, *_] = manifests(target(job("command", cluster(scheduler={"namespace": NAMESPACE or None}))))
    owner["spec"]["paralelism"] = 4
    with pytest.raises(SchedulerError, match=r'unknown field "spec\.paralelism"'):
        ask(lambda connection: connection.create(owner))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDirectory]]:
    """`runs(steps=…, code=…)` hands over a run; what is left of all of them is removed."""
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_TOKEN", "hf_12345")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "count.py").write_text(COUNTING)
    started: list[RunDirectory] = []

    def start(steps: int, code: int = 0) -> RunDirectory:
        name = f"craton-test-{os.getpid()}-{len(started)}"
        run: dict[str, Any] = {
            "image": os.environ["CRATON_TEST_IMAGE"],
            "env": {"STEPS": steps, "CODE": code},
            "secrets": ["HF_TOKEN"],
            **({"namespace": NAMESPACE} if NAMESPACE else {}),
        }
        document = {
            "name": name,
            "kind": "command",
            "command": ["python3", "count.py"],
            "cluster": "local x 1",
            "run": run,
        }
        wanted = parse_job(yaml.safe_dump({**document, "recover": {"tries": 0}}), folder=folder)
        draft = draft_run(wanted, tmp_path / "runs" / name, on="kubernetes", job_folder=folder)
        started.append(start_run(draft, tmp_path / "runs"))
        return started[-1]

    yield start
    for run in started:
        with contextlib.suppress(RunStateError):  # gone already
            KubernetesBackend().kill(run)


def wait_for(run: RunDirectory, condition: Callable[[Standing], bool]) -> Standing:
    def look() -> Standing:
        return KubernetesBackend().look([run])[run.name]

    def wanted() -> Standing | None:
        standing = look()
        return standing if condition(standing) else None

    found = wait_until(wanted, look, SECONDS, look_seconds=0.5)
    assert found is not None
    return found


@needs_pods
def test_a_run_is_made_watched_and_ends(runs: Callable[..., RunDirectory]) -> None:
    run = runs(steps=5)
    running = wait_for(run, lambda standing: standing.condition in ("running", "ended"))
    assert running.job == f"Job/{run.name}"
    ended = wait_for(run, lambda standing: standing.condition == "ended")
    assert ended.reason in ("CompletionsReached", "Complete"), ended
    lines = [line for _, line in KubernetesBackend().logs(run)]
    assert "[rank 0] token has 8 letters" in lines
    assert "[rank 0] step 4" in lines


@needs_pods
def test_a_run_that_cannot_go_on_is_not_tried_again(runs: Callable[..., RunDirectory]) -> None:
    run = runs(steps=1, code=3)
    ended = wait_for(run, lambda standing: standing.condition == "ended")
    assert ended.reason == "PodFailurePolicy", ended


@needs_pods
def test_a_lost_pod_is_made_again_and_a_stop_ends_it(runs: Callable[..., RunDirectory]) -> None:
    run = runs(steps=100_000)
    wait_for(run, lambda standing: standing.condition == "running")
    selector = f"app.kubernetes.io/instance={run.name}"

    def pods() -> list[dict[str, Any]]:
        return ask(
            lambda connection: connection.list("v1", "Pod", NAMESPACE or connection.namespace, labelSelector=selector)
        )

    [first] = pods()
    ask(lambda connection: connection.delete_pods(first["metadata"]["namespace"], selector, 1))

    def is_replaced() -> bool:
        others = [each for each in pods() if each["metadata"]["uid"] != first["metadata"]["uid"]]
        return any(each["status"]["phase"] == "Running" for each in others)

    wait_until(is_replaced, "another pod", SECONDS, look_seconds=0.5)
    KubernetesBackend().stop(run)
    wait_for(run, lambda standing: standing.condition == "ended")
    wait_until(lambda: not pods(), "its pods leave", SECONDS, look_seconds=0.5)
