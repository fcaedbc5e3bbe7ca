"""Runs begin, stop, break and go on, with real agents and ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from counting import counting_job, start, wait_for_state
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import read_launch
from craton.agent.coordination import avoid_node
from craton.job.layout import Layout
from craton.orchestration import RunStateError, StartError, living_agents, local
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.changes import resize as resizing
from craton.orchestration.changes import resize_run
from craton.orchestration.changes.resize import Resize, with_nodes
from craton.orchestration.draft import Size, draft_run
from craton.orchestration.errors import SchedulerError
from craton.orchestration.local import read_agents
from craton.orchestration.slurm import SlurmBackend
from craton.orchestration.start import kill_run, newest_checkpoint, runs, stop_run
from craton.orchestration.start.checks import check_name_is_free
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.watching import Follower, wait_for_agents
from craton.telemetry import Marker, RunDirectory, RunExistsError, summarize

LONG = {"STEPS": 100_000}


def resume(run: RunDirectory, cluster: str | None = None) -> None:
    resume_run(run, draft_resume(run, resumed_job(run, cluster)))


def test_a_run_ends_by_itself_and_leaves_its_story(root: Path) -> None:
    run = start(root, counting_job(STEPS=5))
    summary = wait_for_state(run, "done", "failed", "lost")
    assert (summary.state, summary.step, summary.ranks) == ("done", 5, 2)
    wait_for_agents(run)
    assert living_agents(run) == []
    assert "leaves after step 5" in run.log_path(1).read_text()
    saved = newest_checkpoint(run)
    assert saved is not None
    assert (saved.step, saved.tier) == (5, "shared")


def test_agents_have_a_session_of_their_own_and_no_terminal(root: Path) -> None:
    run = start(root, counting_job(**LONG))
    agents = read_agents(run)
    assert len(agents) == 2
    for agent in agents:
        assert os.getsid(agent.pid) == agent.pid != os.getsid(0)
        assert os.readlink(f"/proc/{agent.pid}/fd/0") == "/dev/null"


def test_a_name_is_taken_once(root: Path) -> None:
    run = start(root, counting_job(**LONG))
    with pytest.raises(RunExistsError, match=r"count is running .*`craton logs count -f` follows it, `--name count-2`"):
        check_name_is_free(root, "count")
    kill_run(run)
    (root / "count-2").mkdir()
    for attempt in (lambda: start(root, counting_job()), lambda: check_name_is_free(root, "count")):
        with pytest.raises(RunExistsError, match=r"`craton resume count` resumes it, `--name count-3` starts another"):
            attempt()


def test_a_stop_saves_and_a_resume_goes_on_there_on_other_ranks(root: Path) -> None:
    run = start(root, counting_job(**LONG))
    wait_until(lambda: summarize(run).step >= 2)
    stop_run(run)
    assert wait_for_state(run, "stopped", "failed", "lost").state == "stopped"
    wait_for_agents(run)
    saved = newest_checkpoint(run)
    assert saved is not None
    assert saved.step >= 2

    resume(run, "local x 3")
    wait_until(lambda: summarize(run).step > saved.step)
    summary = summarize(run)
    assert (summary.state, summary.generation, summary.ranks) == ("running", 1, 3)
    wait_until(lambda: f"of 3 starts after step {saved.step}" in run.log_path(2).read_text())


def test_a_run_that_runs_is_not_started_again(root: Path) -> None:
    run = start(root, counting_job(**LONG))
    with pytest.raises(RunStateError, match=r"count is running \(node-0, node-1\).*craton stop count"):
        resumed_job(run)


def test_what_does_not_run_cannot_be_stopped(root: Path) -> None:
    run = start(root, counting_job(STEPS=1))
    wait_for_state(run, "done")
    wait_for_agents(run)
    for stop in (stop_run, kill_run):
        with pytest.raises(RunStateError, match="count is already done: there is nothing to stop"):
            stop(run)
    with pytest.raises(RunStateError, match="count is done"):
        resume(run)


@pytest.mark.parametrize("error", [StartError("this machine failed pre-flight"), KeyboardInterrupt()])
@pytest.mark.parametrize("marker", ["STOP", "FATAL"])
def test_a_refused_resume_leaves_the_run_as_it_was(
    marker: Marker, error: BaseException, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pre-flight of this machine is the last that may refuse it: everything is written by then."""
    run = RunDirectory.create(root, "count")
    for name, text in draft_run(counting_job(), run.path).files().items():
        (run.path / name).write_text(text)
    run.mark(marker, "node-1: rank 3 ran out of luck")
    run.resize_path.write_text('{"nodes": 2}')
    avoid_node(run, "node-1", "ab12")
    run.chaos_folder.mkdir(exist_ok=True)
    order = run.chaos_folder / "1-1.json"
    order.write_text('{"faults": ["kill rank=1@step=40"]}')
    before = {path.name: path.read_text() for path in run.path.iterdir() if path.is_file()}

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(local, "check_local", refuse)
    with pytest.raises(type(error)):
        resume(run, "local x 3")
    after = {path.name: path.read_text() for path in run.path.iterdir() if path.is_file()}
    del after["launch.lock"]
    assert after == before, "with its marker and what the marker says"
    assert order.read_text() == '{"faults": ["kill rank=1@step=40"]}', "what was armed is armed still"
    monkeypatch.undo()


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_run_that_a_scheduler_may_have_is_not_marked_again(
    is_answered: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(root, "count")
    for name, text in draft_run(counting_job(), run.path, on="slurm").files().items():
        (run.path / name).write_text(text)
    write_submission(run, Submission("slurm", "7"))
    run.mark("STOP", "craton stop")

    def submit(*_: object) -> Submission:
        if not is_answered:
            write_submission(run, Submission("slurm", "", {"nonce": "next"}))
            raise RunStateError("nobody answered")
        raise SchedulerError("sbatch: invalid partition")

    monkeypatch.setattr(SlurmBackend, "submit", submit)
    monkeypatch.setattr(runs, "check_not_running", lambda _: None)
    with pytest.raises((RunStateError, SchedulerError)):
        resume(run)
    assert run.marker_text("STOP") == ("craton stop\n" if is_answered else ""), "a job that comes up must not stop"


def test_nodes_that_are_added_are_checked_before_anything_is_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(root, counting_job(**LONG))
    launch, checked = read_launch(run), []

    def refuse(*_: object, nodes: list[str]) -> None:
        checked.append(nodes)
        raise StartError("this machine failed pre-flight")

    monkeypatch.setattr(resizing, "check_local", refuse)
    wanted = Resize(Size(3, Layout(fsdp=3), None), with_nodes(launch, 3), before=2)
    with pytest.raises(StartError, match="failed pre-flight"):
        resize_run(run, wanted)
    assert checked == [["node-2"]]
    assert (run.resize_path.exists(), read_launch(run), len(living_agents(run))) == (False, launch, 2)


def test_a_killed_agent_takes_its_ranks_along_and_the_run_can_be_resumed(root: Path) -> None:
    run = start(root, counting_job(nodes=1, **LONG))
    follower = Follower(run)
    wait_until(lambda: follower.look().summary.step >= 2)
    os.kill(read_agents(run)[0].pid, signal.SIGKILL)
    wait_until(lambda: not living_agents(run))
    view = follower.look()
    assert view.summary.state == "lost"
    assert "gone" in view.summary.message
    wait_until(lambda: not ranks_of(run))
    resume(run)
    wait_until(lambda: follower.look().summary.state == "running")


def test_sigterm_to_one_agent_stops_the_whole_run_in_order(root: Path) -> None:
    run = start(root, counting_job(**LONG))
    wait_until(lambda: summarize(run).step >= 1)
    os.kill(read_agents(run)[1].pid, signal.SIGTERM)
    assert wait_for_state(run, "stopped", "failed", "lost").state == "stopped"
    assert newest_checkpoint(run) is not None


def test_a_kill_leaves_no_process_behind_and_says_stopped_at_once(root: Path) -> None:
    run = start(root, counting_job(CHILD=4321, **LONG))
    wait_until(lambda: summarize(run).step >= 1)
    kill_run(run)
    assert summarize(run).state == "stopped"
    wait_until(lambda: not ranks_of(run))
    assert not subprocess.run(["pgrep", "-f", "sleep 4321"], capture_output=True, text=True, check=False).stdout


def test_a_kill_finds_what_a_rank_left_behind(root: Path) -> None:
    run = start(root, counting_job(**LONG))
    wait_until(lambda: summarize(run).step >= 1)
    environment = {**os.environ, "CRATON_RUN": str(run.path)}
    with subprocess.Popen(["sleep", "4322"], env=environment, start_new_session=True) as orphan:
        kill_run(run)
        assert orphan.wait(PATIENCE_SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("module", ["agent", "ml.fork_server", "ml.nursery"])  # the last: of runs of earlier versions
def test_a_kill_finds_helpers_by_their_command(tmp_path: Path, module: str) -> None:
    path = tmp_path / "craton" / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True)
    for package in {tmp_path / "craton", path.parent}:
        (package / "__init__.py").touch()
    path.write_text("print('up', flush=True)\nimport time\ntime.sleep(3600)\n")
    run = RunDirectory(tmp_path / "runs" / "mine")
    command = [sys.executable, "-m", f"craton.{module}", str(run.path)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert local._families(run, ()) == [process.pid]
        finally:
            process.kill()


def test_a_rank_that_fails_fails_the_run_with_its_last_words(root: Path) -> None:
    run = start(root, counting_job(FAIL_RANK=1, **LONG))
    summary = wait_for_state(run, "failed", "done", "lost")
    assert summary.state == "failed"
    assert "rank 1 on node-1 exited with code 1" in summary.message
    assert "the reward function broke" in summary.message
    wait_for_agents(run)
    resume(run)
    assert not run.has("FATAL")


def test_an_agent_that_cannot_start_is_seen_at_once(root: Path) -> None:
    run = start(root, counting_job(STEPS=1))
    wait_for_state(run, "done")
    wait_for_agents(run)
    run.unmark("DONE")
    run.launch_path.write_text("{")
    (run.path / "heartbeat" / "node-0").unlink()
    view = Follower(run).look()
    assert view.summary.state == "lost"


def test_a_process_number_given_to_somebody_else_is_not_an_agent(root: Path) -> None:
    run = start(root, counting_job(STEPS=1))
    wait_for_state(run, "done")
    wait_for_agents(run)
    agents = json.loads((run.path / "agents.json").read_text())
    agents[0]["pid"] = os.getpid()
    (run.path / "agents.json").write_text(json.dumps(agents))
    assert living_agents(run) == []
    (run.path / "agents.json").write_text("[{")
    assert read_agents(run) == []


@pytest.mark.parametrize("place", ["file/runs", "file"])
def test_a_root_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="set CRATON_RUNS to a writable folder"):
        check_name_is_free(tmp_path / place, "count")


def ranks_of(run: RunDirectory) -> list[str]:
    """Processes whose environment names this run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"CRATON_RUN={run.path}\0".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found
