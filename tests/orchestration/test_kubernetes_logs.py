"""Logs of the pods of a run, read from a stand-in for an API server: of all of them, followed, and by the verb."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from kubernetes_runs import add_pod, submitted
from kubernetes_standin import StandIn
from waiting import PATIENCE_SECONDS, wait_until

from craton.cli import main
from craton.orchestration import RunStateError
from craton.orchestration.kubernetes import KubernetesBackend
from craton.telemetry import RunDirectory


def followed(run: RunDirectory) -> tuple[list[tuple[str, str]], threading.Thread]:
    """The lines of its pods as they come, until the run has ended."""
    found: list[tuple[str, str]] = []
    reader = threading.Thread(target=lambda: found.extend(KubernetesBackend().logs(run, follow=True)), daemon=True)
    reader.start()
    return found, reader


def test_logs_of_all_pods(server: StandIn, tmp_path: Path) -> None:
    run = submitted(tmp_path)
    with pytest.raises(RunStateError, match="JobSet/llm has no pods; `craton ps` shows why"):
        list(KubernetesBackend().logs(run))
    for index in range(2):
        add_pod(server, "llm", index)
        server.logs[f"llm-node-0-{index}-abcde"] = [f"[rank {index}] step 1", f"[rank {index}] step 2"]
    add_pod(server, "llm", 2, "Pending")
    lines = sorted(KubernetesBackend().logs(run))
    assert lines == [(f"llm-node-0-{i}-abcde", f"[rank {i}] step {step}") for i in range(2) for step in (1, 2)]


def test_logs_are_followed_into_pods_that_come_later_and_past_one_that_cannot_be_read(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craton.orchestration.kubernetes.logs.LOOK_SECONDS", 0.02)
    run = submitted(tmp_path)
    add_pod(server, "llm", 0)
    add_pod(server, "llm", 1)
    server.logs["llm-node-0-1-abcde"] = ["[rank 1] step 1"]
    server.unreadable_logs = {"llm-node-0-0-abcde"}
    found, reader = followed(run)
    wait_until(lambda: len(found) == 2)
    [refused, read] = sorted(found)
    assert refused[1].startswith("its log cannot be read: Kubernetes refused: container node in pod")
    assert read == ("llm-node-0-1-abcde", "[rank 1] step 1")
    server.logs["llm-node-0-2-abcde"] = ["[rank 2] step 1"]
    add_pod(server, "llm", 2)
    wait_until(lambda: found[2:] == [("llm-node-0-2-abcde", "[rank 2] step 1")])
    add_pod(server, "llm", 1, containerStatuses=[{"name": "node", "restartCount": 1}])
    wait_until(lambda: found[3:] == [("llm-node-0-1-abcde", "[rank 1] step 1")])
    [owner] = server.of("jobsets")
    owner["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    reader.join(PATIENCE_SECONDS)
    assert not reader.is_alive()
    assert len(found) == 4


def test_following_waits_for_the_first_pod(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.orchestration.kubernetes.logs.LOOK_SECONDS", 0.02)
    run = submitted(tmp_path)
    server.requests.clear()
    found, reader = followed(run)
    wait_until(lambda: sum("/pods?" in line for line in list(server.requests)) >= 2)
    server.logs["llm-node-0-0-abcde"] = ["[rank 0] step 1"]
    add_pod(server, "llm", 0)
    [owner] = server.of("jobsets")
    owner["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    reader.join(PATIENCE_SECONDS)
    assert found == [("llm-node-0-0-abcde", "[rank 0] step 1")]


def test_craton_logs_reads_the_pods_of_a_run_whose_directory_is_not_here(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def logs(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["craton", "logs", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert not ended.value.code, output.err
        return sorted(output.out.splitlines())

    submitted(tmp_path)
    for index in range(2):
        add_pod(server, "llm", index)
        server.logs[f"llm-node-0-{index}-abcde"] = ["craton pod: begins", f"[rank {index}] step 1"]
    assert logs("llm") == ["rank-00000  step 1", "rank-00001  step 1"]
    assert logs("llm", "--rank", "1") == ["step 1"]
    assert logs("llm", "--agent") == [f"llm-node-0-{index}-abcde  craton pod: begins" for index in range(2)]

    shared = submitted(tmp_path, name="near", storage={"shared": {"path": str(tmp_path), "claim": "fsx"}})
    shared.log_path(0).parent.mkdir(exist_ok=True)
    shared.log_path(0).write_text("from the file\n")
    assert logs("near") == ["rank-00000  from the file"]
