"""`ps`, `logs`, `stop`, `resume`: runs of stand-in ranks from start to end, and every mistake one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from run_verbs import Verbs
from waiting import PATIENCE_SECONDS, wait_until

from craton.orchestration import living_agents
from craton.orchestration.local import read_agents
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, write_heartbeat

LONG = {"STEPS": 100_000}


def test_ps_lists_the_newest_first_with_state_and_step(verbs: Verbs) -> None:
    assert "craton run JOB" in verbs("ps").stdout
    assert verbs.json("ps") == []
    verbs("run", verbs.job(STEPS=3))
    verbs("run", verbs.job(STEPS=1000, FAIL_RANK=1), "--name", "bad")
    listed = verbs("ps")
    assert listed.returncode == 0
    for word in ("RUN", "STATE", "STEP", "ETA", "TOK/S", "vs PLAN", "GOODPUT", "$"):
        assert word in listed.stdout
    rows = [line.split()[:2] for line in listed.stdout.splitlines() if line.strip().startswith(("bad ", "count "))]
    assert rows == [["bad", "failed"], ["count", "done"]]
    assert "bad: rank 1 on node-1 exited with code 1" in listed.stdout
    assert [(run["name"], run["state"]) for run in verbs.json("ps")] == [("bad", "failed"), ("count", "done")]


@pytest.mark.slow
def test_a_broken_run_directory_hides_no_other(verbs: Verbs) -> None:
    verbs("run", verbs.job(nodes=1, STEPS=1))
    RunDirectory.create(verbs.root, "broken").launch_path.write_text('{"nodes": 5}')
    (verbs.root / "not-a-run").mkdir()
    listed = verbs("ps")
    assert listed.returncode == 0
    assert f"{verbs.root / 'broken'} cannot be read" in listed.stdout
    assert "count" in listed.stdout
    states = {run["name"]: run["state"] for run in verbs.json("ps")}
    assert states == {"count": "done", "broken": "unreadable"}
    silent = verbs("logs", "broken")
    assert (silent.returncode, silent.stdout) == (0, "")
    assert "broken has ended without logs" in silent.stderr


def test_a_run_whose_agents_could_not_start_says_what_they_said(verbs: Verbs) -> None:
    run = RunDirectory.create(verbs.root, "unpacked")
    (run.path / "logs" / "slurm-812.out").write_text("srun: unrecognized option '--container-image'\n")
    run.mark("FATAL", "no agent could start")
    told = verbs("logs", "unpacked")
    assert told.stdout == "slurm-812  srun: unrecognized option '--container-image'\n"
    assert "unpacked ended before any rank printed a line; these are the agents' logs:" in told.stderr


def test_ps_says_why_a_run_stopped_that_nobody_stopped(verbs: Verbs) -> None:
    for name, words in {"left": "saved and stopped; not requeued: …", "ended": "craton stop"}.items():
        run = RunDirectory.create(verbs.root, name)
        run.launch_path.write_text('{"nodes": ["node-0"], "ranks_per_node": 1}')
        write_heartbeat(run, "node-0", Heartbeat(0, "stopped", os.getpid(), 0))
        run.mark("STOP", f"{words}\nleaving for Slurm: the time limit is near")
    listed = verbs("ps").stdout
    assert "left: saved and stopped; not requeued: …\n" in listed
    assert "ended:" not in listed


def test_ps_does_not_ask_this_machine_for_a_server_of_another(verbs: Verbs) -> None:
    run = RunDirectory.create(verbs.root, "served")
    run.plan_path.write_text('{"kind": "serve"}')
    run.launch_path.write_text('{"nodes": ["node-0"], "ranks_per_node": 1}')
    run.job_path.write_text("kind: serve\nmodel: llama-3.1-8b\nserve: {initialize: random}\ncluster: local\n")
    write_heartbeat(run, "node-0", Heartbeat(0, "running", os.getpid(), 0, "10.1.2.3:7000", "far-node"))
    listed = verbs("ps")
    assert listed.returncode == 0
    assert "served: its server listens only on 127.0.0.1 of far-node and cannot be reached from here" in listed.stdout


def test_what_failed_says_why_and_how_to_go_on(verbs: Verbs) -> None:
    failed = verbs("run", verbs.job(nodes=1, STEPS=1000, FAIL_RANK=0))
    assert failed.returncode == 1
    assert "rank 0 on node-0 exited with code 1 (generation 0): the reward function broke" in failed.stdout
    assert "next: fix the cause (job file: runs/count/job.yaml), then run: craton resume count" in failed.stdout
    assert "count: rank 0 on node-0 exited with code 1 (generation 0): the reward" in verbs("ps").stdout


def test_logs_of_all_ranks_of_some_and_of_the_agents(verbs: Verbs) -> None:
    verbs("run", verbs.job(STEPS=3))
    both = verbs("logs", "count").stdout
    assert "rank-00000  rank 0 leaves after step 3" in both
    assert "rank-00001  rank 1 leaves after step 3" in both
    assert verbs("logs", "count", "--rank", "1").stdout.splitlines()[-1] == "rank 1 leaves after step 3"
    lines = [json.loads(line) for line in verbs("logs", "count", "--json").stdout.splitlines()]
    assert {line["source"] for line in lines} == {"rank-00000", "rank-00001"}
    assert verbs("logs", "count", "--agent").returncode == 0
    wrong = verbs("logs", "count", "--rank", "7")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "its ranks are 0 to 1" in wrong.stderr
    assert "0,7" in verbs("logs", "count", "--rank", "first").stderr
    assert "did you mean 'count'" in verbs("logs", "cuont").stderr


def test_following_ends_with_the_run(verbs: Verbs) -> None:
    verbs("run", verbs.job(STEPS=40), "--detach")
    followed = verbs("logs", "count", "-f")
    assert followed.returncode == 0
    assert "rank 0 leaves after step 40" in followed.stdout


@pytest.mark.slow
def test_ctrl_c_on_logs_leaves_the_run_alone(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    command = [sys.executable, "-m", "craton", "logs", "count", "-f"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "craton stop count" in errors
    assert len(living_agents(verbs.run())) == 2


def test_stop_tells_the_saved_step_and_resume_goes_on_from_it(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    verbs.wait_for_step(2)
    stopped = verbs("stop", "count")
    assert stopped.returncode == 0
    assert "checkpoint of step" in stopped.stdout
    assert "next: craton resume count" in stopped.stdout
    saved = verbs.json("ps")[0]["step"]
    resumed = verbs.json("resume", "count", "--cluster", "local x 1", "--detach")
    assert (resumed["generation"], resumed["ranks"]) == (1, 1)
    verbs.wait_for_step(saved + 1)
    assert f"of 1 starts after step {saved}" in verbs.run().log_path(0).read_text()
    assert verbs.json("stop", "count")["state"] == "stopped"


def test_stop_now_kills_and_says_what_is_left(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    verbs.wait_for_step(2)
    result = verbs("stop", "count", "--now")
    assert result.returncode == 0
    # An agent may see the marker and let its ranks save before it is killed itself.
    assert re.search("Craton does not know what its command saved|its newest checkpoint is step", result.stdout)
    assert "next: craton resume count\n" in result.stdout
    assert living_agents(verbs.run()) == []
    assert verbs.json("ps")[0]["state"] == "stopped"


def test_a_run_whose_agents_are_killed_can_be_resumed_at_once(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    verbs.wait_for_step(1)
    for agent in read_agents(verbs.run()):
        os.kill(agent.pid, signal.SIGKILL)
    wait_until(lambda: not living_agents(verbs.run()))
    resumed = verbs("resume", "count", "--detach")
    assert resumed.returncode == 0
    assert "the state its command saved" in resumed.stdout


@pytest.mark.parametrize("verb", ["stop", "resume", "logs", "export", "sample"])
def test_a_run_that_is_not_there_is_bad_input(verbs: Verbs, verb: str) -> None:
    more = {"export": ["folder"], "sample": ["--prompt", "def"]}.get(verb, [])
    result = verbs(verb, "nowhere", *more)
    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_wrong_verb_for_a_state_says_the_right_one(verbs: Verbs) -> None:
    verbs("run", verbs.job(**LONG), "--detach")
    running = verbs("resume", "count")
    assert running.returncode == 2
    assert "count is running" in running.stderr
    verbs("stop", "count", "--now")
    again = verbs("stop", "count")
    assert again.returncode == 0, "there is nothing left to do"
    assert re.fullmatch(
        r"count already stopped( after step \d+)?; Craton does not know what its command saved; `craton resume count` "
        r"continues it\n",
        again.stdout,
    )
    assert verbs.json("stop", "count", "--now")["state"] == "stopped"
    verbs.run().unmark("STOP")
    verbs.run().mark("FATAL", "rank 0 was killed")
    failed = verbs("stop", "count")
    assert failed.returncode == 1
    assert failed.stdout.startswith("count failed\nrank 0 was killed\n")
    assert verbs("resume", "count", "--cluster", "local x many").returncode == 2
    assert verbs("resume", "count", "--steps", "9").returncode == 2
