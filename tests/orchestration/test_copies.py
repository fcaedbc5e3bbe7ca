"""Copies of a job: one array on Slurm, a run each; what is refused leaves none of them."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from slurm_runs import chain_job

from craton.agent import read_launch
from craton.api import run
from craton.cli.run import confirm, print_draft, print_plan
from craton.job import load_job, parse_job
from craton.orchestration import RunStateError, StartError
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.draft import draft_run
from craton.orchestration.errors import SchedulerError
from craton.orchestration.slurm import ScriptOptions, SlurmBackend
from craton.orchestration.start import copies, runs, start_run, submit
from craton.orchestration.start.copies import start_copies
from craton.orchestration.start.runs import draft_resume, resumed_job
from craton.telemetry import RunDirectory, list_runs


def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm takes every array as its job 77."""

    def submit_array(_: object, run: RunDirectory, options: ScriptOptions) -> str:
        for number in range(1, options.copies + 1):
            copy = RunDirectory(run.path.with_name(run.name.removesuffix("1") + str(number)))
            write_submission(copy, Submission("slurm", f"77_{number}"))
        return "77"

    monkeypatch.setattr(copies, "submit_array", submit_array)
    monkeypatch.setattr(SlurmBackend, "check", lambda *_: None)


def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "check_not_running", lambda _: None)


def test_a_copy_that_is_resumed_knows_which_one_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(monkeypatch)
    job = chain_job("many", 1, run="copies: 3")
    second = start_copies(draft_run(job, root / job.name), root)[1]
    assert read_launch(second).env["CRATON_COPY"] == "2"
    assert load_job(second.job_path).run.copies == 1, "by itself it is one run, which is what a resume costs"
    ended(monkeypatch)
    draft = draft_resume(second, resumed_job(second))
    assert draft.launch.env["CRATON_COPY"] == "2"
    assert draft.launch.env["STEPS"] == "20"


def test_a_run_from_python_starts_all_copies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(monkeypatch)
    first = run(chain_job("many", 1, run="copies: 3"))
    assert first.name == "many-1"
    assert {each.name for each in list_runs(root)} == {"many-1", "many-2", "many-3"}
    with pytest.raises(StartError, match=r"run\.copies needs Slurm"):
        run(chain_job("other", 1, run="copies: 3"), on="local")
    assert len(list_runs(root)) == 3


def test_a_dry_run_prints_the_array(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = chain_job("many", 1, run="copies: 3")
    draft = draft_run(job, root / "many")
    print_draft(draft, root / "many", as_json=False)
    printed = capsys.readouterr().out
    assert "#SBATCH --array=1-3\n" in printed
    assert f'{root}/many-"$SLURM_ARRAY_TASK_ID"' in printed
    assert f"sbatch --parsable {root}/many-1/job.sbatch" in printed
    assert "for many-2 to many-3" in printed
    print_draft(draft, root / "many", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["run"] == str(root / "many-1")
    assert "--array=1-3" in document["files"]["job.sbatch"]
    assert json.loads(document["files"]["launch.json"])["env"]["CRATON_COPY"] == "1"
    assert not root.exists()
    with pytest.raises(StartError, match=r"run\.copies needs Slurm"):
        print_draft(draft_run(job, root / "many", on="local"), root / "many", as_json=True)


@pytest.mark.parametrize("error", [SchedulerError("refused"), OSError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["write_whole", "submit_array"])
def test_what_breaks_off_leaves_no_copy(
    at: str, error: BaseException, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(copies, at), []

    def breaks(*arguments: object) -> object:
        calls.append(arguments)
        if at == "submit_array" or len(calls) == 4:  # in the midst of the second
            raise error
        return original(*arguments)

    monkeypatch.setattr(copies, at, breaks)
    job = chain_job("many", 1, run="copies: 3")
    draft = draft_run(job, root / job.name)
    with pytest.raises(type(error)):
        start_copies(draft, root)
    assert list_runs(root) == []


def test_copies_that_slurm_may_have_are_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(_: object, run: RunDirectory, options: ScriptOptions) -> str:
        write_submission(run, Submission("slurm", "", {"nonce": "one"}))
        raise RunStateError("nobody answered")

    monkeypatch.setattr(copies, "submit_array", unanswered)
    job = chain_job("many", 1, run="copies: 3")
    with pytest.raises(RunStateError):
        start_copies(draft_run(job, root / job.name), root)
    assert len(list_runs(root)) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the disk is full")])
def test_a_start_that_breaks_off_leaves_no_run(
    error: BaseException, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise error

    monkeypatch.setattr(submit, "write_whole", breaks)
    job = parse_job("name: one\nkind: command\ncommand: ['true']\ncluster: local x 1\n")
    with pytest.raises(type(error)):
        start_run(draft_run(job, root / "one"), root)
    assert list_runs(root) == []


PRICED = """\
name: many
kind: pretrain
model: llama-3.1-8b
data: {path: /fsx/tokens, sequence: 8192}
train: {global_batch_tokens: 1M, steps: 1000}
cluster: p5.48xlarge x 2
run: {on: slurm, copies: COPIES}
"""
SERVED = """\
name: many
kind: serve
model: llama-3.1-8b
serve: {initialize: random}
cluster: p5.48xlarge x 1
run: {on: slurm, copies: COPIES}
"""


@pytest.mark.parametrize("text", [PRICED, SERVED])
def test_the_price_that_is_shown_and_asked_for_is_that_of_all_copies(text: str, root: Path) -> None:
    def price(copies: int) -> tuple[float, str]:
        draft = draft_run(parse_job(text.replace("COPIES", str(copies))), root / "many")
        out = StringIO()
        print_plan(draft, Console(file=out, width=300))
        (line,) = (line for line in out.getvalue().splitlines() if line.startswith("cost"))
        with pytest.raises(StartError, match="costs about") as asked:
            confirm(draft, yes=False)
        found = re.search(r"\$([0-9.,]+)(k?)", line)
        assert found is not None
        assert found[0] in str(asked.value), "what is shown is what is asked for"
        return float(found[1].replace(",", "")) * (1000 if found[2] else 1), line

    (one, alone), (four, together) = price(1), price(4)
    assert four == pytest.approx(4 * one, rel=0.01)
    assert ("copies" in alone, "for 4 copies" in together) == (False, True)
