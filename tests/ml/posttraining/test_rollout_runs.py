"""Whole runs of modes overlap and separate: real processes that die, servers that restart, damaged files.

In each of them every prompt index is trained exactly once, on tokens that are not older than the bound.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from openai_like_server import openai_like_server
from rollout_runs import check_journal, events, metrics, rollout_job, running, wait_for_end, wait_for_step
from waiting import wait_until

from craton.agent.processes import free_port
from craton.api import Run
from craton.job import parse_job
from craton.orchestration import living_agents
from craton.orchestration.draft import draft_run
from craton.orchestration.errors import StartError
from craton.orchestration.start import kill_run
from craton.telemetry import RunDirectory
from craton.telemetry.members import member_addresses

STEPS = 8
OVERLAP = "mode: overlap, staleness: 2"


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_rollouts_overlap_with_training_on_two_ranks_that_die(tmp_path: Path) -> None:
    chaos = 'chaos: ["kill rank=1@step=3", "kill rank=0@step=6"]'
    job = rollout_job(tmp_path, "overlapped", OVERLAP, STEPS, chaos, nodes=2)
    with running(job) as run:
        wait_for_end(run)
        check_journal(run, STEPS)
        assert len(events(run, "recovered")) == 2
        recorded = {line["step"]: line for line in metrics(run) if "run_staleness" in line}
        assert STEPS in recorded
        assert max(line["run_max_staleness"] for line in recorded.values()) <= 2
        assert max(line["run_staleness"] for line in recorded.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_that_was_killed_resumes_from_its_journal(tmp_path: Path, damaged: bool) -> None:
    """All processes die at once; with a flipped byte in the newest entry it is generated again."""
    job = rollout_job(tmp_path, "killed", OVERLAP, 20)
    with running(job) as run:
        wait_for_step(run, 5)
        kill_run(run)
        wait_until(lambda: not living_agents(run), "its agents end")
        steps = sorted(int(path.name.partition("-")[2]) for path in (run.path / "journal").glob("step-*"))
        newest = run.path / "journal" / f"step-{steps[-1]}"
        before = {step: (run.path / "journal" / f"step-{step}").read_bytes() for step in steps}
        if damaged:
            data = bytearray(newest.read_bytes())
            data[len(data) // 3] ^= 8
            newest.write_bytes(data)
        Run(run).resume()
        wait_for_end(run)
        check_journal(run, 20)
        for step in steps if not damaged else steps[:-1]:
            same = (run.path / "journal" / f"step-{step}").read_bytes() == before[step]
            assert same, f"step {step} was trained on other samples"
        assert bool(events(run, "journal_damaged")) == damaged


@pytest.mark.slow
def test_rollout_servers_may_die(tmp_path: Path) -> None:
    """Of two servers one is killed, then the other: generation goes on, with the weights of the trainer."""
    job = rollout_job(tmp_path, "separated", "mode: separate, workers: 2, staleness: 2", 200)
    with running(job) as run:
        wait_for_step(run, 2)
        assert set(member_addresses(run)) == {"rollout-0", "rollout-1"}
        for number, after in ((0, 60), (1, 80)):
            server = RunDirectory(run.path / "members" / f"rollout-{number}")
            wait_until(lambda server=server: events(server, "fork_server_ready"), "its fork server is ready")
            killed = engine_pid(server)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda server=server, killed=killed: engine_pid(server) != killed, "it is replaced")
            command = Path(f"/proc/{engine_pid(server)}/cmdline").read_bytes()
            assert b"craton.ml.fork_server" in command, "forked, not started"
            wait_for_step(run, after)
        wait_for_end(run)
        check_journal(run, 200)
        assert events(run, "rollout_server_lost")
        assert not [line for line in events(run, "generation_started") if line.get("reached")], "no rank restarted"


@pytest.mark.slow
def test_an_endpoint_of_ours_keeps_its_weights(tmp_path: Path) -> None:
    port = free_port()
    server = parse_job(
        "name: other\nkind: serve\n"
        "model: {name: adder, layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, vocab: 259, tied_embeddings: true}\n"
        f"cluster: local\nserve: {{port: {port}, precision: fp32, max_length: 16, initialize: random, seed: 4}}\n"
    )
    with running(server) as served:
        from craton.orchestration.server import ServerWatch, server_of

        wait_until(lambda: ServerWatch(server_of(served)).is_ready(), "the server is ready", 600)
        rollout = f'mode: separate, staleness: 2, endpoint: {{url: "http://127.0.0.1:{port}"}}'
        job = rollout_job(tmp_path, "foreign", rollout, 6)
        with running(job) as run:
            wait_for_end(run)
            check_journal(run, 6, staleness=None)
            (warning,) = events(run, "foreign_weights")
            assert "keeps its own weights" in warning["reason"]
            ages = [line["run_staleness"] for line in metrics(run) if "run_staleness" in line]
            assert ages == list(range(6)), "counted from the start"


def test_an_endpoint_without_log_probabilities_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with openai_like_server() as server:
        url = server.url
        job = rollout_job(tmp_path, "refused", f'mode: separate, endpoint: {{url: "{url}"}}')
        with pytest.raises(StartError) as raised:
            draft_run(job, tmp_path / "runs" / job.name, job_folder=tmp_path)
    message = str(raised.value)
    assert f"rollout.endpoint: {url} does not give token ids, logprobs" in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_an_endpoint_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    job = rollout_job(tmp_path, "unreachable", f'mode: separate, endpoint: {{url: "{url}"}}')
    with pytest.raises(StartError, match=r"rollout\.endpoint: .*127\.0\.0\.1"):
        draft_run(job, tmp_path / "runs" / job.name, job_folder=tmp_path)


def test_separate_rollouts_have_a_server_each(tmp_path: Path) -> None:
    rollout = "mode: separate, workers: 2, layout: {tp: 1}"
    job = rollout_job(tmp_path, "planned", rollout)
    draft = draft_run(job, tmp_path / "runs" / job.name, job_folder=tmp_path, is_dry=True)
    assert draft.members is not None
    assert [(item.name, item.gate) for item in draft.members.spec.members] == [
        ("rollout-0", "ready"),
        ("rollout-1", "ready"),
    ]
    servers = [member.serve for member in draft.members.jobs.values()]
    assert all(serve is not None and serve.admin and serve.max_length == 16 for serve in servers)
    assert len({serve.port for serve in servers if serve is not None}) == 2
    assert {"jobs/rollout-0.yaml", "jobs/rollout-1.yaml", "members.json"} <= set(draft.files())


def engine_pid(member: RunDirectory) -> int:
    return int(events(member, "rank_started")[-1]["pid"])
