"""Slurm's words of 22.05 and of the versions after it come to the same data; odd ones to nothing, never to a guess."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from craton.orchestration.errors import SchedulerError
from craton.orchestration.slurm import tools
from craton.orchestration.slurm.allocation import allocate, switch_paths
from craton.orchestration.slurm.checks import failed_hosts
from craton.orchestration.slurm.records import (
    JobRecord,
    jobs_of_json,
    jobs_of_text,
    moment_of,
    nodes_of_text,
    partitions_of_text,
    reservations_of_text,
    seconds_of,
    switches_of_text,
)
from craton.orchestration.slurm.step import SlurmStep
from craton.telemetry import RunDirectory

SAMPLES = Path(__file__).with_name("slurm_samples")


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def jobs(version: str) -> dict[str, JobRecord]:
    return {job.id: job for job in jobs_of_json(json.loads(sample(f"squeue-{version}.json")))}


def test_both_generations_of_json_tell_the_same() -> None:
    old, new = jobs("22.05"), jobs("24.05")
    assert new.pop("7").state == "COMPLETING", "cleaning up comes first of several states"
    assert new["3"].switches == 1
    assert new["3"].switch_wait_seconds == 600
    new["3"] = replace(new["3"], switches=0, switch_wait_seconds=None)  # which 22.05 does not print
    assert new == old


def test_what_squeue_tells() -> None:
    found = jobs("22.05")
    assert {number: job.state for number, job in found.items()} == {
        **{"1": "RUNNING", "2": "RUNNING", "3": "PENDING", "4": "PENDING", "5": "PENDING", "6": "PENDING"}
    }
    assert (found["1"].nodes, found["1"].num_nodes, found["1"].time_limit_seconds) == ("g[1-4]", 4, 1800)
    assert found["4"].reason == "Dependency"
    assert found["4"].dependency == "afterok:1(unfulfilled)"
    assert found["4"].time_limit_seconds is None
    assert [found["5"].has_task(number) for number in (0, 1, 50, 51)] == [False, True, True, False]


def test_scontrol_tells_more_of_the_same_jobs() -> None:
    told = {job.id: job for job in jobs_of_text(sample("scontrol-job-22.05.txt"))}
    listed = jobs("22.05")
    assert set(told) == set(listed)
    for number, job in told.items():
        assert (job.state, job.partition, job.num_nodes, job.nodes, job.priority) == (
            listed[number].state,
            listed[number].partition,
            listed[number].num_nodes,
            listed[number].nodes,
            listed[number].priority,
        )
    assert told["3"].name == "with = sign", "a name is not taken for a key"
    assert (told["3"].switches, told["3"].switch_wait_seconds) == (1, 600)
    assert told["5"].has_task(50)


def test_segments_of_a_job() -> None:
    (told,) = jobs_of_text("JobId=9 JobName=x\n   JobState=PENDING\n   SegmentSize=4 SpreadSegments=Yes\n")
    (listed,) = jobs_of_json({"jobs": [{"job_id": 9, "job_state": ["PENDING"], "name": "x", "segment_size": 4}]})
    assert told == listed
    assert told.segment_nodes == 4


def test_nodes_with_their_reasons() -> None:
    nodes = {node.name: node for node in nodes_of_text(sample("scontrol-node-22.05.txt"))}
    assert len(nodes) == 8
    assert nodes["g8"].reason == "hc: ecc row remap"
    assert nodes["g8"].is_away
    assert nodes["g7"].reason == "no answer"
    assert nodes["g7"].is_away
    assert nodes["g6"].is_free
    assert not nodes["g1"].is_free
    assert not nodes["g1"].is_away
    assert nodes["g1"].address == "127.0.1.1"
    assert "train" in nodes["g1"].partitions


def test_a_node_that_does_not_answer_is_away() -> None:
    (node,) = nodes_of_text("NodeName=x Arch=x86_64\n   State=IDLE*+CLOUD ThreadsPerCore=1\n")
    assert node.is_away
    assert node.address == "x", "a node without an address is called by its name"


def test_switches_partitions_and_reservations() -> None:
    switches = switches_of_text(sample("scontrol-topology-22.05.txt"))
    assert switch_paths(switches)["g6"] == ("spine", "leaf2")
    blocks = switches_of_text(sample("scontrol-topology-block.txt"))
    halves = {"block1": range(1, 5), "block2": range(5, 9)}
    assert switch_paths(blocks) == {f"g{node}": (name,) for name, nodes in halves.items() for node in nodes}
    partitions = {each.name: each for each in partitions_of_text(sample("scontrol-partition-22.05.txt"))}
    assert (partitions["short"].max_seconds, partitions["short"].max_nodes) == (300, 4)
    assert partitions["train"].max_seconds is None
    assert partitions["closed"].state == "DOWN"
    (reservation,) = reservations_of_text(sample("scontrol-reservation-22.05.txt"))
    assert (reservation.name, reservation.nodes, reservation.users) == ("maint", "g6", "root")
    assert reservation.start is not None
    assert reservation.end == reservation.start + 3600


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("03:04", 184),
        ("10", 600),
        ("2-12", 216000),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_moments() -> None:
    assert moment_of("Unknown") is None
    assert moment_of("N/A") is None
    then = moment_of("2026-11-15T14:05:00")
    assert then is not None
    assert time.strftime("%H:%M", time.localtime(then)) == "14:05"


@pytest.mark.parametrize(
    "document", [{}, {"jobs": None}, {"jobs": ["x"]}, {"jobs": [{}]}, {"jobs": [{"job_id": {"set": False}}]}]
)
def test_odd_answers_are_not_fatal(document: dict[str, object]) -> None:
    for job in jobs_of_json(document):
        assert job.state == ""
        assert job.start is None


def test_ranks_are_neighbours_where_hosts_are() -> None:
    switches = switches_of_text(sample("scontrol-topology-22.05.txt"))
    nodes = nodes_of_text(sample("scontrol-node-22.05.txt"))
    names = [f"node-{number}" for number in range(4)]
    found = allocate("9", 1, names, ["g7", "g2", "g5", "g1"], nodes, switches)
    assert [(node.name, node.host) for node in found.nodes] == [
        ("node-0", "g1"),
        ("node-1", "g2"),
        ("node-2", "g5"),
        ("node-3", "g7"),
    ]
    assert found.leaves == {"node-0": "leaf1", "node-1": "leaf1", "node-2": "leaf2", "node-3": "leaf2"}
    assert found.nodes[3].address == "127.0.1.7"


# -- tools that are not there, are slow, or say no -------------------------------------------------------------------


def stand_in(folder: Path, name: str, script: str) -> None:
    """A tool of that name that is found first."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tool_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_fifty_jobs_are_one_question(tool_folder: Path) -> None:
    answer = tool_folder / "answer.json"
    answer.write_text(json.dumps({"jobs": [{"job_id": number, "job_state": "RUNNING"} for number in range(1, 101)]}))
    stand_in(tool_folder, "squeue", f'echo "$@" >> {tool_folder}/asked\ncat {answer}')
    found = tools.read_jobs(str(number) for number in range(1, 51))
    assert [job.id for job in found] == [str(number) for number in range(1, 51)], "only those that were asked for"
    assert len((tool_folder / "asked").read_text().splitlines()) == 1


def test_a_slurm_without_json_is_asked_in_words(tool_folder: Path) -> None:
    stand_in(tool_folder, "squeue", "echo 'squeue: unrecognized option --json' >&2; exit 1")
    stand_in(tool_folder, "scontrol", f"cat {SAMPLES}/scontrol-job-22.05.txt")
    assert [job.id for job in tools.read_jobs(["3", "4"])] == ["3", "4"]


def test_a_job_that_slurm_has_forgotten_is_no_error(tool_folder: Path) -> None:
    stand_in(tool_folder, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert tools.read_jobs(["812"]) == []


# 22.05.8 without a controller, as it prints it: exit code 0.
UNANSWERED = '{"errors": [{"description": "Failed while looking for jobs", "error": "Unspecified error"}], "jobs": []}'


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'squeue: error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "connect failure"),
        ("exec sleep 5", "did not respond"),
        ("echo '<html>'", "invalid JSON"),
        (f"echo '{UNANSWERED}'", "Failed while looking for jobs"),
    ],
)
def test_a_controller_that_cannot_be_asked(
    tool_folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    stand_in(tool_folder, "squeue", script)
    ask = tools.ask
    monkeypatch.setattr(tools, "ask", lambda *given: ask(*given, seconds=0.3))
    with pytest.raises(SchedulerError, match=words):
        tools.read_jobs(["1"])


def test_slurm_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="squeue is not installed here"):
        tools.read_jobs(["1"])


def test_a_shell_inside_an_allocation_does_not_tell_the_tools_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    told = {name for name in tools.own_environment() if name.startswith(("SBATCH", "SLURM", "SQUEUE"))}
    assert told == {"SLURM_CONF"}


def test_a_node_whose_preflight_fails_is_named_with_what_failed(tool_folder: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "checked")
    healthy = [{"severity": "ok", "what": "gpu_count"}, {"severity": "warn", "what": "hugepages"}]
    broken = [{"severity": "fail", "what": "gpu_count", "evidence": "7 of 8 GPUs"}]
    for host, findings in {"g1": healthy, "g2": broken}.items():
        (tool_folder / f"{host}.report").write_text(json.dumps({"findings": findings, "nodes": [{"node": host}]}))
    # It leaves a report for each host in the folder that `--output=FOLDER/%t.json` names.
    leave_reports = (
        'for word; do case "$word" in --output=*) out="${word#--output=}";; esac; done\n'
        f'for task in 1 2; do cp {tool_folder}/g$task.report "$(dirname "$out")/$task.json"; done'
    )
    stand_in(tool_folder, "srun", leave_reports)
    step, hosts = SlurmStep(run.path, "python"), ["g1", "g2", "g3"]
    assert failed_hosts(step, hosts, run) == {"g2": "gpu_count: 7 of 8 GPUs"}
    stand_in(tool_folder, "srun", f"{leave_reports}\nexec sleep 60")
    assert failed_hosts(step, hosts, run, seconds=1.0) == {
        "g2": "gpu_count: 7 of 8 GPUs",
        "g3": "pre-flight did not end within 1 s",
    }


def test_a_preflight_that_hangs_is_ended_on_its_nodes(
    tool_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its step would keep the agents waiting; that of the batch script is left alone."""
    run = RunDirectory.create(tmp_path, "checked")
    stand_in(tool_folder, "srun", f"trap 'echo INT >> {tool_folder}/told' INT\nwhile :; do sleep 0.05; done")
    stand_in(tool_folder, "squeue", f'echo "$@" >> {tool_folder}/asked\nprintf "812.0\\n812.batch\\n812.extern\\n"')
    stand_in(tool_folder, "scancel", f'echo "$@" >> {tool_folder}/cancelled')
    assert failed_hosts(SlurmStep(run.path, "python"), ["g1", "g2"], run, seconds=0.3, job="812") == {}
    assert "pre-flight did not end on any node" in capfd.readouterr().err
    assert (tool_folder / "told").read_text().split() == ["INT", "INT"]
    assert (tool_folder / "cancelled").read_text().split() == ["--quiet", "812.0"]
    assert "--jobs=812" in (tool_folder / "asked").read_text()


def test_jobs_of_a_user_are_asked_for_in_words(tool_folder: Path) -> None:
    stand_in(
        tool_folder,
        "squeue",
        f'echo "$@" >> {tool_folder}/asked\nprintf "812 RUNNING craton:a:01\\n813_[1-2] PENDING (null)\\n9 FAILED \\n"',
    )
    jobs = tools.read_jobs_of([1000, 0, 1000])
    assert [(job.id, job.state, job.comment) for job in jobs] == [
        ("812", "RUNNING", "craton:a:01"),
        ("813_[1-2]", "PENDING", "(null)"),
        ("9", "FAILED", ""),
    ]
    assert "--user=0,1000 " in (tool_folder / "asked").read_text()


def test_a_preflight_that_cannot_run_stops_nobody(tool_folder: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "checked")
    stand_in(tool_folder, "srun", "exit 1")
    assert failed_hosts(SlurmStep(run.path, "python"), ["g1"], run) == {}
    assert subprocess.run(["srun"], check=False).returncode == 1
