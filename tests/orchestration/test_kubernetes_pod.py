"""The program of a pod, as the real process that it is: two of them on this machine are the nodes of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from counting import RANK
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Launch, newest_generation, next_number, read_launch, write_launch
from craton.job import parse_job
from craton.orchestration.draft import check_code, draft_run, find_code, keep_code
from craton.orchestration.kubernetes import pod as pod_program
from craton.orchestration.kubernetes.codepack import pack_code, unpack_code
from craton.orchestration.kubernetes.places import Places
from craton.orchestration.kubernetes.pod import (
    Pod,
    Signals,
    adapted,
    config_files,
    exit_code,
    follow,
    is_healthy,
    is_schedulers,
    prepare,
    read_secrets,
    spared_pods,
    stand_aside,
    take_over,
    verdict,
)
from craton.orchestration.kubernetes.podfile import POD_FILE, TimeLimit, submission_of, used_seconds
from craton.orchestration.kubernetes.pods import EXIT_AGAIN
from craton.orchestration.preflight import PreflightFinding
from craton.telemetry import RunDirectory, RunError, read_json, summarize
from craton.telemetry.files import read_lines
from craton.telemetry.node import Heartbeat, write_heartbeat

LAUNCH = Launch(0, ["node-0", "node-1"], 1, ["python3", "-m", "craton.ml.training", "/laptop/llm"])


def write_config_map(folder: Path, files: dict[str, str]) -> Path:
    """As the kubelet mounts one: links at the top, into a folder that a link of two dots names."""
    data = folder / "..2026_11_15"
    for name, text in files.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(text)
    (folder / "..data").symlink_to(data.name)
    for name in {name.partition("/")[0] for name in files}:
        (folder / name).symlink_to(Path("..data", name))
    return folder


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`pods(1)` starts the pod of that number; all are ended, with what they started, when the test is over."""
    started: list[subprocess.Popen[str]] = []

    def start(index: int, submission: str = "first", **more: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "JOB_COMPLETION_INDEX": str(index),
            "CRATON_SUBMISSION": submission,
            "CRATON_RUN_FILES": str(tmp_path / "config"),
            "CRATON_DRAFTED_AT": "/laptop/runs/count",
            "CRATON_ADDRESS": "127.0.0.1",
            "CRATON_FIRST_POD": "127.0.0.1",
            **more,
        }
        command = [sys.executable, "-m", "craton.orchestration.kubernetes.pod", str(tmp_path / "fsx" / "count")]
        with open(tmp_path / f"pod-{index}.log", "a") as log:
            pod = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True, start_new_session=True)
        started.append(pod)
        return pod

    yield start
    for pod in started:
        try:
            os.killpg(pod.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        pod.wait(PATIENCE_SECONDS)


def counting_files(steps: int, **more: object) -> dict[str, str]:
    text = (
        f"name: count\nkind: command\ncommand: [{sys.executable}, {RANK}]\ncluster: local x 2\nprogress: null\n"
        f"run: {{image: x, env: {{STEPS: '{steps}'}}}}\n"
    )
    draft = draft_run(parse_job(text, folder=RANK.parent), Path("/laptop/runs/count"), on="kubernetes")
    return replace(draft, launch=replace(draft.launch, workdir="", **more)).files()


def test_two_pods_make_the_run_work_in_it_and_end_with_it(
    tmp_path: Path, pods: Callable[..., subprocess.Popen[str]]
) -> None:
    write_config_map(tmp_path / "config", counting_files(5))
    places = Places(("spine", "leaf"), {"g1": ("spine", "leaf1"), "g2": ("spine", "leaf2")})
    (tmp_path / "nodes.json").write_text(places.to_text())
    more = {"CRATON_RUN_NODES": str(tmp_path / "nodes.json")}
    # The second pod is on the node that comes first in the network, so that the first ranks are its.
    second, first = pods(1, CRATON_HOST_NAME="g1", **more), pods(0, CRATON_HOST_NAME="g2", **more)
    assert (first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)) == (0, 0)
    run = RunDirectory(tmp_path / "fsx" / "count")
    assert run.has("DONE")
    assert summarize(run).step == 5
    assert "[rank 0] rank 0 leaves after step 5" in (tmp_path / "pod-1.log").read_text()
    assert "[rank 1] rank 1 leaves after step 5" in (tmp_path / "pod-0.log").read_text()
    assert "[rank 1]" not in (tmp_path / "pod-1.log").read_text()
    generation = newest_generation(run)
    assert generation is not None
    assert generation.nodes == ["node-1", "node-0"]
    assert read_launch(run).leaves == {"node-0": "leaf2", "node-1": "leaf1"}
    [placed] = [str(line["message"]) for line in read_lines(run.events_path("kubernetes"))[0]]
    assert placed.startswith("rank order: node-1 on g1, node-0 on g2; got 2 nodes on leaf1 x 1, leaf2 x 1")


EARLY = """
import os, runpy, signal, sys

LIGHT = {"craton", "craton.version", "craton.lazy", "craton.orchestration", "craton.orchestration.kubernetes",
         "craton.orchestration.kubernetes.pod"}

class Told:
    def find_spec(self, name, *_):
        if name.startswith("craton") and name not in LIGHT:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Told())
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the first process of a container has it
runpy.run_module("craton.orchestration.kubernetes.pod", run_name="__main__", alter_sys=True)
"""


def test_a_pod_that_is_told_to_end_while_it_loads_its_program_ends() -> None:
    """The kubelet's SIGTERM would be lost, and the pod be killed when its grace is over."""
    assert subprocess.run([sys.executable, "-c", EARLY, "/no/run"], check=False).returncode == EXIT_AGAIN


@pytest.mark.slow
def test_a_killed_pod_comes_back_and_a_drained_one_takes_all_along_and_they_go_on(
    tmp_path: Path, pods: Callable[..., subprocess.Popen[str]]
) -> None:
    write_config_map(tmp_path / "config", counting_files(100_000))
    run = RunDirectory(tmp_path / "fsx" / "count")
    first, second = pods(0, CRATON_HOST_NAME="g1"), pods(1)
    wait_until(lambda: run.looks_like_a_run() and summarize(run).step >= 2)
    assert read_json(run.path / "hosts" / "0.json")["host"] == "g1", "though nobody had to be put in order"

    os.killpg(second.pid, signal.SIGKILL)  # its node is gone, with all that ran there
    second.wait(PATIENCE_SECONDS)
    second = pods(1)
    wait_until(lambda: next_number(run) >= 2 and verdict(run) is None)
    wait_until(lambda: "starts after step" in run.log_path(1).read_text().rpartition("rank 1 of 2")[2])
    assert first.poll() is None, "the others live on"

    second.send_signal(signal.SIGTERM)  # its node is drained
    assert (first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)) == (75, 75)
    assert is_schedulers(run.marker_text("STOP"))
    saved = summarize(run).step
    second, first = pods(1), pods(0)
    wait_until(lambda: not run.has("STOP") and summarize(run).step > saved)

    run.mark("STOP", "craton stop")
    assert (first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)) == (0, 0)


def test_a_run_that_cannot_go_on_says_so_by_its_exit_code(
    tmp_path: Path, pods: Callable[..., subprocess.Popen[str]]
) -> None:
    write_config_map(tmp_path / "config", counting_files(5, tries=0, num_nodes=1, nodes=["node-0"]))
    secrets = write_config_map(tmp_path / "secrets", {"FAIL_RANK": "0"})  # which the rank finds in its environment
    assert pods(0, CRATON_SECRETS=str(secrets)).wait(PATIENCE_SECONDS) == 77
    run = RunDirectory(tmp_path / "fsx" / "count")
    assert "the reward function broke" in run.marker_text("FATAL")
    assert "the reward function broke" in (tmp_path / "pod-0.log").read_text()
    (tmp_path / "pod-0.log").unlink()
    assert pods(0).wait(PATIENCE_SECONDS) == 77, "a pod that is started all the same"
    assert "craton pod: the run has failed: " in (tmp_path / "pod-0.log").read_text()


def test_a_secret_that_no_variable_can_hold_is_refused_without_its_value(tmp_path: Path) -> None:
    folder = write_config_map(tmp_path / "secrets", {"TOKEN": "a'b$(id)\n", "OTHER": "hf_do_not_tell\0"})
    with pytest.raises(RunError, match="the secret OTHER holds a zero byte") as refused:
        read_secrets(folder)
    assert "hf_do_not_tell" not in str(refused.value)
    (folder / "OTHER").unlink()
    assert read_secrets(folder) == {"TOKEN": "a'b$(id)\n"}


def told(tmp_path: Path, index: int = 0, submission: str = "first", launch: Launch = LAUNCH, **more: object) -> Pod:
    config = tmp_path / f"config-{submission}"
    if not config.exists():
        files = {"job.yaml": "name: llm\n", "plans/2.json": "{}", "launch.json": json.dumps(asdict(launch))}
        write_config_map(config, files)
    environment = {
        "VC_TASK_INDEX": str(index),
        "CRATON_SUBMISSION": submission,
        "CRATON_RUN_FILES": str(config),
        "CRATON_DRAFTED_AT": "/laptop/llm",
        "CRATON_FIRST_POD": "llm-node-0.llm",
        "CRATON_METRICS_PORT": "29400",
        "CRATON_GIVE_UP_SECONDS": "3600",
    }
    return replace(Pod.of(RunDirectory(tmp_path / "fsx" / "llm"), environment), **more)


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_pod_makes_the_run_for_its_own_image(tmp_path: Path, signals: Signals) -> None:
    launch = replace(
        LAUNCH, workdir="/laptop/llm/code", nursery=["python3", "-m", "craton.ml.fork_server", "/laptop/llm"]
    )
    pod = told(tmp_path, launch=launch)
    assert prepare(pod, signals) is None
    made = read_launch(pod.run)
    assert made.command == [sys.executable, "-m", "craton.ml.training", str(pod.run.path)]
    assert made.nursery == [sys.executable, "-m", "craton.ml.fork_server", str(pod.run.path)]
    assert made.workdir == str(pod.run.path / "code")
    assert (made.master_address, made.metrics_port, made.give_up_seconds) == ("llm-node-0.llm", 29400, 3600.0)
    assert (pod.run.path / "plans" / "2.json").read_text() == "{}"
    own = ["/usr/bin/env", "-m", "train", "/laptop/llm"]
    assert adapted(replace(launch, command=own), pod.run, pod).command == own, "a user's command is not touched"
    assert prepare(pod, signals) is None, "and again after its own death"
    pod.run.mark("DONE")
    assert prepare(pod, signals) == 0, "nothing is left to do"


def test_another_run_of_the_same_name_is_left_alone_and_a_resume_takes_it_over(
    tmp_path: Path, signals: Signals
) -> None:
    first = told(tmp_path)
    prepare(first, signals)
    first.run.mark("FATAL", "broke")
    with pytest.raises(RunError, match="is another run of this name; `craton resume llm` resumes it"):
        prepare(told(tmp_path, submission="other"), signals)
    assert first.run.has("FATAL")
    assert prepare(first, signals) == 77
    resumed = told(tmp_path, submission="resumed", launch=replace(LAUNCH, generation=1))
    assert prepare(resumed, signals) is None
    assert not first.run.has("FATAL")
    assert read_launch(first.run).generation == 1


def test_what_the_scheduler_stopped_begins_again_when_all_have_left(tmp_path: Path, signals: Signals) -> None:
    pod = told(tmp_path)
    take_over(pod)
    pod.run.mark("STOP", "SIGTERM to the agent of node-1")
    assert verdict(pod.run) == 75
    write_heartbeat(pod.run, "node-1", Heartbeat(0, "running", 1, 0))
    signals.received = signal.SIGTERM
    assert prepare(pod, signals) == 75, "node-1 still lives, and this pod is told to leave"
    assert pod.run.has("STOP")
    signals.received = None
    write_heartbeat(pod.run, "node-1", Heartbeat(0, "stopped", 1, 0))
    assert prepare(pod, signals) is None
    assert not pod.run.has("STOP")
    assert read_launch(pod.run).generation == 1
    pod.run.mark("STOP", "SIGTERM to the agent of node-1\ncraton stop")
    assert prepare(pod, signals) == 0, "the user's word counts"


def test_other_pods_wait_for_the_first_of_their_own_submission(tmp_path: Path, signals: Signals) -> None:
    first = told(tmp_path)
    take_over(first)
    signals.received = signal.SIGTERM
    assert follow(told(tmp_path, 1, submission="next"), signals) == 75
    assert follow(told(tmp_path, 1), signals) == 75, "the order of nodes is not decided yet"
    assert prepare(first, signals) is None
    assert follow(told(tmp_path, 1), signals) is None


def test_markers_are_exit_codes(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "llm")
    assert verdict(run) is None
    run.mark("STOP", "craton stop")
    assert verdict(run) == 0
    run.mark("FATAL", "no")
    assert verdict(run) == 77
    run.mark("DONE")
    assert verdict(run) == 0


def test_the_time_limit_counts_while_the_run_runs_and_not_while_it_waits(
    tmp_path: Path,
) -> None:
    pod = told(tmp_path)
    run = pod.run
    take_over(pod)
    with TimeLimit(run, pod.submission, 3600.0):
        pass
    assert 0 <= used_seconds(run) < 60
    (run.path / POD_FILE).write_text(json.dumps({"submission": "first", "used_seconds": 3000.0}))
    a_day_ago = (run.path / POD_FILE).stat().st_mtime - 86400  # preempted, and admitted again
    os.utime(run.path / POD_FILE, (a_day_ago, a_day_ago))
    with TimeLimit(run, pod.submission, 3600.0):
        pass
    assert not run.has("STOP")
    assert 3000 <= used_seconds(run) < 3060
    assert submission_of(run) == "first"
    with TimeLimit(run, pod.submission, 3000.0):
        wait_until(lambda: run.has("STOP"))
    assert run.marker_text("STOP").startswith("the time limit of the job")
    assert verdict(run) == 0, "which is no reason to start it again"
    take_over(told(tmp_path, submission="resumed", launch=replace(LAUNCH, generation=1)))
    assert used_seconds(run) == 0, "a resume has its own"
    with TimeLimit(run, "resumed", None):
        pass
    assert used_seconds(run) == 0
    began = time.monotonic() - 60
    with TimeLimit(run, "resumed", 50.0, since=began, is_first=False):  # Kubernetes ends each pod by its own start
        wait_until(lambda: run.has("STOP"))
    assert used_seconds(run) == 0, "which only the first pod keeps"


def test_what_was_used_is_kept_while_it_counts_for_a_pod_may_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craton.orchestration.kubernetes.podfile.KEEP_SECONDS", 0.02)
    pod = told(tmp_path)
    take_over(pod)
    with TimeLimit(pod.run, pod.submission, 3600.0):
        wait_until(lambda: used_seconds(pod.run) > 0.05)


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "LWS_WORKER_INDEX"])
def test_every_owner_numbers_its_pods_in_its_own_way(tmp_path: Path, name: str) -> None:
    assert Pod.of(RunDirectory(tmp_path), {name: "3"}).index == 3
    with pytest.raises(RunError, match="gives this pod's index"):
        Pod.of(RunDirectory(tmp_path), {name: ""})


def test_the_files_of_a_mounted_config_map_are_found_once(tmp_path: Path) -> None:
    folder = write_config_map(tmp_path / "config", {"job.yaml": "a", "plans/2.json": "b", "plans/4.json": "c"})
    assert config_files(folder) == ["job.yaml", "plans/2.json", "plans/4.json"]


def test_the_code_of_a_command_travels_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    (source / "train.py").write_text("print(1)\n")
    (source / "package" / "tool.sh").write_text("#!/bin/sh\n")
    (source / "package" / "tool.sh").chmod(0o755)
    (source / "link.py").symlink_to("train.py")
    job = parse_job("name: a\nkind: command\ncommand: [python, train.py]\ncluster: local x 1\n", folder=source)
    here, there = RunDirectory.create(tmp_path / "here", "a"), RunDirectory.create(tmp_path / "there", "a")
    assert pack_code(here.path) == b""
    found = find_code(job, tmp_path / "here")
    assert found is not None
    keep_code(found, here)
    packed = pack_code(here.path)
    assert packed == pack_code(here.path)
    (tmp_path / "code.tar.gz").write_bytes(packed)
    unpack_code(tmp_path / "code.tar.gz", there.path)
    assert (there.path / "code" / "link.py").read_text() == "print(1)\n"
    assert os.access(there.path / "code" / "package" / "tool.sh", os.X_OK)
    assert (there.path / "code.json").read_text() == (here.path / "code.json").read_text()


def test_code_is_unpacked_a_second_time_over_files_that_may_not_be_written(tmp_path: Path) -> None:
    there = RunDirectory.create(tmp_path / "there", "a")
    for turn, files in enumerate([{"train.py": "old", "gone.py": "old"}, {"train.py": "new"}]):
        source = tmp_path / f"source-{turn}"
        source.mkdir()
        for name, text in files.items():
            (source / name).write_text(text)
        (source / "link.py").symlink_to("train.py")
        job = parse_job("name: a\nkind: command\ncommand: [python, train.py]\ncluster: local x 1\n", folder=source)
        here = RunDirectory.create(tmp_path / f"here-{turn}", "a")
        found = find_code(job, here.path.parent)
        assert found is not None
        keep_code(found, here)
        archive = tmp_path / f"code-{turn}.tar.gz"
        archive.write_bytes(pack_code(here.path))
        unpack_code(archive, there.path)
        assert not os.stat(there.path / "code" / "train.py").st_mode & 0o222
    unpack_code(archive, there.path)
    assert sorted(path.name for path in (there.path / "code").iterdir()) == ["link.py", "train.py"]
    assert (there.path / "code" / "train.py").read_text() == "new"
    check_code(there)
    assert list(there.path.glob(".code*")) == []


def test_a_slow_pod_comes_back_when_the_others_have_gone_on_without_it(tmp_path: Path) -> None:
    pod = told(tmp_path)
    take_over(pod)
    began = read_launch(pod.run)
    assert exit_code(pod.run, began, 0, was_signalled=False) == 0
    assert exit_code(pod.run, began, 3, was_signalled=False) == 1
    assert exit_code(pod.run, began, 3, was_signalled=True) == 75
    # A drain ended its agent too, and the first pod has taken the marker of that away before it looked.
    write_launch(pod.run, replace(began, generation=began.generation + 1))
    assert exit_code(pod.run, began, 0, was_signalled=False) == 75
    assert exit_code(pod.run, began, 3, was_signalled=False) == 75
    pod.run.mark("FATAL", "broke")
    assert exit_code(pod.run, began, 3, was_signalled=False) == 77
    pod.run.mark("DONE")
    assert exit_code(pod.run, began, 0, was_signalled=False) == 0


@pytest.fixture
def unfit(monkeypatch: pytest.MonkeyPatch) -> list[PreflightFinding]:
    """What pre-flight finds in every pod."""
    found = [PreflightFinding("infrastructure", "gpu_count", "fail", "7 of 8 GPUs")]
    monkeypatch.setattr(pod_program, "preflight", lambda *told: found)
    return found


def test_an_unfit_pod_stands_aside_where_a_spare_can_do_its_work(
    tmp_path: Path, signals: Signals, unfit: list[PreflightFinding]
) -> None:
    launch = replace(LAUNCH, nodes=[f"node-{index}" for index in range(4)], num_nodes=3)
    first, second, third = (told(tmp_path, index, launch=launch) for index in (0, 1, 2))
    assert prepare(first, signals) is None
    assert not is_healthy(second)
    signals.received = signal.SIGTERM
    assert stand_aside(second, signals) == 75, "it waits, and does not count as one that failed"
    signals.received = None
    assert stand_aside(third, signals) == 1, "there is one spare only"
    second.run.mark("DONE")
    assert stand_aside(second, signals) == 0
    second.run.unmark("DONE")
    unfit.clear()
    assert is_healthy(second)
    assert spared_pods(second.run, launch) == [2], "the spare is free again"


def test_an_unfit_pod_looks_again_and_fails_where_all_are_needed(
    tmp_path: Path, signals: Signals, unfit: list[PreflightFinding], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = told(tmp_path)
    assert prepare(pod, signals) is None
    assert stand_aside(pod, signals) == 1, "there are no spares"
    write_launch(pod.run, replace(LAUNCH, min_nodes=1))
    monkeypatch.setattr(pod_program, "UNFIT_SECONDS", 0.0)
    assert stand_aside(pod, signals) is None
    monkeypatch.setattr(pod_program, "UNFIT_SECONDS", 60.0)
    monkeypatch.setattr(pod_program.time, "sleep", lambda seconds: write_launch(pod.run, replace(LAUNCH, generation=1)))
    assert stand_aside(pod, signals) == 75, "the others have gone on"


def test_a_run_directory_that_the_caller_made_is_adapted_in_place(tmp_path: Path, signals: Signals) -> None:
    run = RunDirectory.create(tmp_path / "fsx", "llm")
    write_launch(run, replace(LAUNCH, command=["python3", "-m", "craton.ml.training", str(run.path)]))
    pod = replace(told(tmp_path), files=None)
    assert prepare(pod, signals) is None
    assert read_launch(run).command[0] == sys.executable
