"""`ps`, `why` and `top` say what is wrong with the disk of a run, and what that has cost once the run has ended."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from mounting import bind_read_only
from run_verbs import Verbs
from waiting import wait_until

from craton.agent import Launch, write_launch
from craton.orchestration import living_agents
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.node import Heartbeat, NodeState, process_start, write_heartbeat

TROUBLE = "the file system of /fsx/runs/words is full: 0 B are free; remove files or enlarge it; the run goes on"
COST = "3 lines of the run's records were dropped while its disk accepted none"


@pytest.mark.parametrize(("state", "told"), [("running", TROUBLE), ("failed", COST)])
def test_ps_why_and_top_say_what_is_full_or_was(verbs: Verbs, state: NodeState, told: str) -> None:
    run = RunDirectory.create(verbs.root, "words")
    verbs.job(nodes=1).rename(run.job_path)
    write_launch(run, Launch(generation=0, nodes=["node-0"], ranks_per_node=1, command=["true"]))
    if state == "failed":
        run.mark("FATAL", "rank 0 on node-0 was killed by SIGKILL")
    with subprocess.Popen(["sleep", "600"]) as agent:
        try:
            host, started = socket.gethostname(), process_start(agent.pid)
            beat = Heartbeat(0, state, agent.pid, 0, "", host, started, trouble=TROUBLE, missing_lines=3)
            write_heartbeat(run, "node-0", beat)
            check_verbs(verbs, told)
        finally:
            agent.kill()


def check_verbs(verbs: Verbs, told: str) -> None:
    assert f"words: {told}" in verbs("ps").stdout
    assert verbs.json("ps")[0]["storage"] == told
    assert told in verbs("why", "words").stdout.replace("\n", " ")
    assert verbs.json("top", "words")["storage"] == told


def test_stop_now_ends_a_run_whose_disk_is_full(
    verbs: Verbs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is set without its text, for which there is no room."""
    monkeypatch.setenv("CRATON_RUNS", str(small_disk / "runs"))
    assert verbs("run", verbs.job(nodes=1, STEPS=100_000), "--detach").returncode == 0
    run = RunDirectory(small_disk / "runs" / "count")
    wait_until(lambda: summarize(run).step >= 1, "it runs")
    with open(small_disk / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    stopped = verbs("stop", "count", "--now")
    assert stopped.returncode == 0, stopped.stderr
    assert run.has("STOP")
    assert not living_agents(run)


def test_stop_leaves_a_run_whose_directory_is_read_only_and_stop_now_ends_it(
    verbs: Verbs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(small_disk / "runs"))
    assert verbs("run", verbs.job(nodes=1, STEPS=100_000), "--detach").returncode == 0
    run = RunDirectory(small_disk / "runs" / "count")
    wait_until(lambda: summarize(run).step >= 1, "it runs")
    bind_read_only(run.path)
    try:
        refused = verbs("stop", "count")
        assert refused.returncode == 2
        assert f"count cannot be stopped: {run.path} is read-only" in refused.stderr.replace("\n", " ")
        assert len(living_agents(run)) == 1
        ended = verbs("stop", "count", "--now")
        assert ended.returncode == 0, ended.stderr
        assert "count was killed, but `craton ps` shows it as lost" in ended.stdout.replace("\n", " ")
        assert not living_agents(run)
    finally:
        subprocess.run(["umount", "--lazy", run.path], check=True)
