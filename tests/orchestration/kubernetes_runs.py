"""A stand-in for a cluster that runs can be handed to, and such runs with their pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_jobs import cluster, draft, job
from kubernetes_standin import StandIn

from craton.orchestration.backend import write_submission
from craton.orchestration.draft import Draft
from craton.orchestration.kubernetes import KubernetesBackend
from craton.telemetry import RunDirectory

SECRET = "hf_do_not_tell"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(standin.kubeconfig))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    yield standin
    standin.shutdown()
    standin.server_close()


def drafted(folder: Path, gang: str = "kueue", name: str = "llm", **more: Any) -> tuple[Draft, RunDirectory]:
    """A run whose files are written, as `craton run` leaves them to the backend."""
    scheduler = {"gang": gang, **({"queue": "research"} if gang in ("kueue", "kai") else {})}
    wanted = job("command", cluster(scheduler=scheduler, **more), name=name, run={"secrets": ["HF_TOKEN"]})
    root = folder / "runs"
    run = RunDirectory.create(root, name) if not (root / name).exists() else RunDirectory(root / name)
    made = draft(wanted, run.path)
    for file, text in {**made.files(), **KubernetesBackend().files(made, run)}.items():
        (run.path / file).write_text(text)
    return made, run


def submitted(folder: Path, **more: Any) -> RunDirectory:
    made, run = drafted(folder, **more)
    write_submission(run, KubernetesBackend().submit(made, run))
    return run


def add_pod(server: StandIn, run: str, index: int, phase: str = "Running", submission: str = "", **status: Any) -> None:
    labels = {"app.kubernetes.io/managed-by": "craton", "app.kubernetes.io/instance": run}
    spec: dict[str, Any] = {"nodeName": f"n{index}"} if phase == "Running" else {}
    spec["containers"] = [{"env": [{"name": "CRATON_SUBMISSION", "value": submission}]}]
    metadata = {"name": f"{run}-node-0-{index}-abcde", "labels": labels}
    server.put("v1", "pods", {"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}})
