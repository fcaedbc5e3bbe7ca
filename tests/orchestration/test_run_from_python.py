"""`from craton import load_job, run` does what `craton run` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from counting import counting_job, wait_for_state

from craton import load_job, run
from craton.agent import read_launch
from craton.job import dump_job
from craton.telemetry import RunExistsError


def test_a_run_from_python(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "count.yaml"
    path.parent.mkdir()
    path.write_text(dump_job(counting_job(STEPS=3)))
    started = run(load_job(path), "counted")
    summary = wait_for_state(started, "done", "failed", "lost")
    assert (started.path, summary.state, summary.step, summary.ranks) == (root / "counted", "done", 3, 2)
    assert read_launch(started).env["CRATON_JOB_FOLDER"] == str(path.parent), "functions beside the job file are found"
    with pytest.raises(RunExistsError, match="`--name counted-2` starts another"):
        run(load_job(path), "counted")
