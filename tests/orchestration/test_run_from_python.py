"""`from craton import load_job, run` does what `craton run` does, also when a start is broken off."""

from __future__ import annotations

from pathlib import Path

import pytest
from counting import counting_job, wait_for_state
from craton.orchestration.start.python import run
from typer.testing import CliRunner

from craton.agent import read_launch
from craton.cli.app import app
from craton.job import dump_job, load_job
from craton.orchestration import RunStateError
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.errors import SchedulerError
from craton.orchestration.slurm import SlurmBackend
from craton.orchestration.start import copies
from craton.telemetry import RunDirectory, RunExistsError, list_runs


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


def on_slurm(folder: Path, copies: int) -> Path:
    """A job for a cluster whose file says where runs are kept."""
    path = folder / "jobs" / "kept.yaml"
    path.parent.mkdir()
    path.write_text(
        f"name: kept\nkind: command\ncommand: ['true']\nrun: {{copies: {copies}}}\n"
        "cluster:\n  name: lab\n  instance: local\n  nodes: 1\n"
        f"  scheduler: {{kind: slurm}}\n  runs: {folder}/fsx/runs\n  storage: {{shared: {{path: {folder}/fsx}}}}\n"
    )
    return path


@pytest.mark.parametrize("by_command", [True, False])
@pytest.mark.parametrize(
    ("error", "num_copies", "names"),
    [
        (RunStateError("sbatch did not answer"), 1, ["kept"]),
        (KeyboardInterrupt(), 1, ["kept"]),
        (KeyboardInterrupt(), 2, ["kept-1", "kept-2"]),
        (SchedulerError("sbatch: invalid partition"), 1, []),
    ],
)
def test_a_run_that_slurm_may_have_is_seen_wherever_it_is_kept(
    error: BaseException,
    num_copies: int,
    names: list[str],
    by_command: bool,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its start was broken off, and so nobody was told where it lies."""

    def submit(draft: object, run: RunDirectory, *_: object) -> Submission:
        if names:
            write_submission(run, Submission("slurm", "", {"nonce": "one"}))
        raise error

    monkeypatch.setattr(SlurmBackend, "check", lambda *_: None)
    monkeypatch.setattr(SlurmBackend, "submit", staticmethod(submit))
    monkeypatch.setattr(copies, "submit_array", submit)
    path = on_slurm(tmp_path, num_copies)
    if by_command:
        assert CliRunner().invoke(app, ["run", str(path), "--yes"]).exit_code != 0
    else:
        with pytest.raises(type(error)):
            run(load_job(path))
    assert sorted(each.name for each in list_runs(root)) == names
    assert sorted(each.name for each in list_runs(tmp_path / "fsx" / "runs")) == names
