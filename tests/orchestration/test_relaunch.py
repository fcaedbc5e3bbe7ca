"""A run goes on although launch.json, job.yaml or its secret is torn, empty or gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counting import counting_job, start, wait_for_state
from waiting import wait_until

from craton.agent import LaunchError, LaunchSchemaError, read_launch
from craton.job import SchemaError
from craton.orchestration import RunStateError
from craton.orchestration.start import kill_run, stop_run
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, summarize


def stopped_run(root: Path) -> RunDirectory:
    run = start(root, counting_job(STEPS=100_000))
    wait_until(lambda: summarize(run).step >= 2)
    stop_run(run)
    wait_for_state(run, "stopped")
    wait_for_agents(run)
    return run


def test_a_run_is_resumed_from_a_torn_an_empty_and_a_missing_launch_file(root: Path) -> None:
    run = stopped_run(root)
    before, text = read_launch(run), run.launch_path.read_text()
    for torn in (text[:200], "", None):
        run.launch_path.unlink()
        if torn is not None:
            run.launch_path.write_text(torn)
        assert summarize(run).state == "stopped", "a torn launch.json changes nothing about a run that ended"
        draft = draft_resume(run, resumed_job(run))
        assert f"{run.launch_path} was damaged or missing: rebuilt from job.yaml, generations and events" in draft.note
        assert "unknown" not in draft.note
        assert draft.launch.generation == before.generation + 1
        assert (draft.launch.nodes, draft.launch.env) == (before.nodes, before.env)
    step = summarize(run).step
    resume_run(run, draft)
    wait_until(lambda: summarize(run).step > step)
    assert json.loads(run.launch_path.read_text())["generation"] == 1
    run.launch_path.write_text("")
    kill_run(run)  # nor does it keep a run from being ended
    assert summarize(run).state == "stopped"


def test_an_empty_secret_and_a_torn_job_file_are_refused_with_the_remedy(root: Path) -> None:
    run = stopped_run(root)
    job, secret = run.job_path.read_text(), run.secret_path.read_bytes()
    for torn in (job[:40], "", None):
        run.job_path.unlink()
        if torn is not None:
            run.job_path.write_text(torn)
        with pytest.raises(RunStateError, match="copy the job file that count was started from to") as caught:
            resumed_job(run)
        assert "\n" not in str(caught.value)
    run.job_path.write_text(job)
    run.secret_path.write_bytes(b"")
    with pytest.raises(LaunchError, match=rf"{run.secret_path} has 0 characters.*remove it while the run is stopped"):
        draft_resume(run, resumed_job(run))
    run.secret_path.unlink()
    resume_run(run, draft_resume(run, resumed_job(run)))
    wait_until(run.secret_path.exists)
    assert len(run.secret_path.read_bytes()) == 64
    assert run.secret_path.read_bytes() != secret


def test_files_of_a_newer_craton_are_refused_and_stay_as_they_are(root: Path) -> None:
    run = stopped_run(root)
    job, launch = run.job_path.read_text(), run.launch_path.read_text()
    run.launch_path.write_text(newer := launch.replace('"schema": 1', '"schema": 2'))
    with pytest.raises(LaunchSchemaError, match="schema 2 is newer than schema 1"):
        draft_resume(run, resumed_job(run))
    assert run.launch_path.read_text() == newer
    run.job_path.write_text(job.replace("schema: 1", "schema: 2"))
    with pytest.raises(SchemaError, match="schema 2 is newer than schema 1") as caught:
        resumed_job(run)
    assert "damaged" not in str(caught.value)
