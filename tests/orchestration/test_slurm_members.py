"""Runs with members on a real Slurm: one batch job, whose members are further steps on its own nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from member_runs import (
    LONG,
    check_nothing_is_left,
    counting,
    kill_member,
    member,
    owned_report,
    states,
    status,
    wait_for_members_in,
)
from slurm_lab import SlurmLab
from slurm_runs import SLURM_SECONDS, events_of, hosts_of, last_words
from waiting import wait_until

from craton.api import Run
from craton.job import Job
from craton.orchestration.backend import read_submission
from craton.orchestration.slurm import warn
from craton.orchestration.watching import standing_of
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.members import MemberSpec, MembersSpec


def on_slurm(job: Job) -> Job:
    return job.model_copy(update={"run": job.run.model_copy(update={"on": "slurm"})})


def sweep(parallel: int, **jobs: Job) -> Run:
    spec = MembersSpec([MemberSpec(name, values={"train.seed": name}) for name in jobs], parallel, "sweep")
    return owned_report(on_slurm(counting("six")), spec, jobs)


def steps_of(slurm: SlurmLab, run: Run) -> dict[str, str]:
    """Name → ID of the steps of a run's job."""
    number = read_submission(run.directory).job
    listed = slurm("squeue", "--steps", f"--jobs={number}", "--noheader", "--format=%j %i").splitlines()
    return dict(line.split() for line in listed)


@pytest.mark.parametrize("num_members", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_sweep_is_one_job_whose_members_come_back(num_members: int, root: Path, slurm: SlurmLab) -> None:
    """Three members at a time: one is killed and comes back, one fails for good."""
    jobs = {f"seed-{number}": counting(f"seed-{number}", STEPS=4) for number in range(1, num_members + 1)}
    jobs["seed-1"] = counting("seed-1", STEPS=150, SAVE_EVERY=5)
    jobs["seed-3"] = counting("seed-3", FAIL_RANK=0)
    run = sweep(3, **jobs)
    killed = RunDirectory(run.path / "members" / "seed-1")
    wait_until(
        lambda: killed.path.exists() and summarize(killed).step > 10,
        lambda: f"{run.summary()}{last_words(run.directory)}",
        SLURM_SECONDS,
    )
    assert slurm("squeue", "--noheader", "--format=%D").split() == ["3"], "one job has the nodes of all"
    assert "seed-1" in steps_of(slurm, run)
    submission = read_submission(killed)
    assert submission.job == read_submission(run.directory).job
    assert submission.details["step"] == "seed-1"
    assert submission.details["nodes"] == hosts_of(killed)["node-0"]
    kill_member(run, "seed-1")
    summary = run.wait()
    assert summary.state == "done", f"{summary}{last_words(run.directory)}"
    rows = {row["name"]: row for row in json.loads((run.path / "sweep.json").read_text())["members"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        name: "failed" if name == "seed-3" else "done" for name in jobs
    }
    assert "exited with code 1" in rows["seed-3"]["message"]
    assert rows["seed-1"]["step"] == 150
    assert status(run).members["seed-1"].restarts == 1


@pytest.mark.slow
def test_stop_resume_and_a_warning_of_slurm_cover_all_members(root: Path, slurm: SlurmLab) -> None:
    run = sweep(0, a=counting("a", **LONG), b=counting("b", **LONG))
    wait_for_members_in(run, a="running", b="running")
    one, other = member(run, "a"), member(run, "b")
    assert hosts_of(one.directory) != hosts_of(other.directory)
    assert [standing_of(each.directory).condition for each in (run, one, other)] == ["running"] * 3
    wait_until(lambda: summarize(one.directory).step > 3)

    assert one.stop().state == "stopped"
    wait_for_members_in(run, a="stopped", b="running")
    one.resume()
    wait_for_members_in(run, a="running", b="running")

    first = read_submission(run.directory).job
    assert run.stop().state == "stopped"
    assert states(run) == {"a": "stopped", "b": "stopped"}
    check_nothing_is_left(run.path)
    saved = one.checkpoint()
    assert saved is not None
    run.resume()
    wait_for_members_in(run, a="running", b="running")
    assert read_submission(one.directory).job == read_submission(run.directory).job != first
    wait_until(lambda: summarize(one.directory).step > saved.step)

    warn(read_submission(run.directory).job)
    wait_until(lambda: len(events_of(run.directory, "allocated")) == 3, lambda: last_words(run.directory))
    wait_for_members_in(run, a="running", b="running")
    assert run.stop(now=True).state == "stopped"
    check_nothing_is_left(run.path)
    assert slurm("squeue", "--noheader") == ""


@pytest.mark.slow
def test_an_owner_waits_for_a_member_on_the_same_nodes(root: Path, slurm: SlurmLab) -> None:
    spec = MembersSpec([MemberSpec("base", gate="done")], purpose="weights")
    run = owned_report(on_slurm(counting("owner", 2, STEPS=5)), spec, {"base": counting("base", 2, STEPS=30)})
    wait_until(lambda: run.summary().message.startswith("waits for member base"), lambda: run.summary(), SLURM_SECONDS)
    summary = run.wait()
    assert summary.state == "done", f"{summary}{last_words(run.directory)}"
    assert set(hosts_of(member(run, "base").directory).values()) == set(hosts_of(run.directory).values())
    assert states(run) == {"base": "done"}
