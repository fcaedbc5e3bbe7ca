"""A server that hangs is ended by its agent and comes back; one that has nothing to do is left alone."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hung_rank import IDLE_REPORTS
from live_server import make_model, serving, wait_until

from craton.agent import free_port, newest_generation
from craton.job import parse_job
from craton.orchestration import draft_run, kill_run, living_agents, start_run
from craton.telemetry import RunDirectory

pytestmark = pytest.mark.xdist_group("whole server")


@pytest.fixture(scope="module", autouse=True)
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    """Begun before the first test, so that what it waits for happens beside that."""
    root = tmp_path_factory.mktemp("runs")
    command = shlex.join([sys.executable, str(Path(__file__).with_name("hung_rank.py"))])
    job = parse_job(f"name: hung\nkind: command\ncommand: {command}\ncluster: local x 1\n")
    run = start_run(draft_run(job, root / "hung", port=free_port()), root)
    yield run
    if living_agents(run):
        kill_run(run)


@pytest.mark.slow
def test_a_server_that_is_stopped_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "little"
    folder.mkdir()
    make_model(folder, 1)
    prompt = [5, 6, 7, 8]
    with serving(folder, tmp_path, "stopped") as server:
        expected = server.complete(prompt)
        first = server.rank_pids()[0]
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: server.rank_pids()[0] != first, "the agent starts another rank")
        wait_until(server.is_ready, "the server is back")
        assert server.complete(prompt) == expected
        newest = newest_generation(server.run)
        assert newest is not None
        assert newest.reason.startswith("rank 0 is stopped by a signal")


def test_a_step_that_never_returns_is_ended_and_an_idle_engine_is_not(hung: RunDirectory) -> None:
    wait_until(lambda: hung.has("DONE") or hung.has("FATAL"), "its second life ends well")
    log = hung.log_path(0).read_text()
    assert hung.has("DONE"), log
    newest = newest_generation(hung)
    assert newest is not None
    assert newest.number == 1, f"it was ended once, and not while it had nothing to do: {newest.reason}"
    assert newest.reason.startswith("rank 0 hangs in productive")
    assert f"asked after {IDLE_REPORTS} reports" in log
