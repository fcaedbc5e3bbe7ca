"""`craton run`: what a user sees from the job file to the outcome, and what no mistake can start."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from run_verbs import Verbs, in_a_terminal

from craton.agent import Launch
from craton.api import Run
from craton.cli.run import confirm, follow, print_plan
from craton.job import load_job, parse_job
from craton.orchestration import living_agents
from craton.orchestration.draft import Draft, draft_run
from craton.telemetry import RunDirectory, summarize

PRICED = """\
kind: pretrain
model: {layers: 2, hidden: 64, ffn_hidden: 128, heads: 2, vocab: 512, name: tiny}
data: {path: text.txt, tokenizer: "bpe:300", sequence: 64}
train: {global_batch_sequences: 8, steps: 10, precision: fp32}
cluster: local x 2
price: {dollars_per_hour: 3.5}
"""


def test_a_run_to_its_end_tells_how_it_went(verbs: Verbs) -> None:
    result = verbs("run", verbs.job(STEPS=10))
    assert result.returncode == 0, result.stderr
    for words in ("count  command · local x 2", "2 ranks on 2 nodes", "step 10", "loss 1.0", "count is done in"):
        assert words in result.stdout
    assert (verbs.root / "count" / "job.yaml").is_file()
    assert "checkpoint of step 10" in result.stdout


def test_a_run_that_fails_exits_1_with_the_rank_and_its_last_words(verbs: Verbs) -> None:
    result = verbs("run", verbs.job(STEPS=1000, FAIL_RANK=1))
    assert result.returncode == 1
    for words in (
        "count failed",
        "rank 1 on node-1 exited with code 1",
        "the reward function broke",
        "runs/count/logs",
    ):
        assert words in result.stdout


def test_json_is_one_object_with_the_outcome(verbs: Verbs) -> None:
    outcome = verbs.json("run", verbs.job(STEPS=4))
    assert (outcome["name"], outcome["state"], outcome["step"], outcome["checkpoint_step"]) == ("count", "done", 4, 4)
    failed = verbs.json("run", verbs.job(STEPS=4, FAIL_RANK=0), "--name", "bad", code=1)
    assert failed["state"] == "failed"
    assert "the reward function broke" in failed["message"]


def test_a_second_run_of_the_same_name_is_refused(verbs: Verbs) -> None:
    assert verbs("run", verbs.job(STEPS=1)).returncode == 0
    before = (verbs.root / "count" / "job.yaml").stat().st_mtime_ns
    result = verbs("run", verbs.job(STEPS=2))
    assert result.returncode == 2
    assert "craton resume count" in result.stderr
    assert "--name count-2" in result.stderr
    assert (verbs.root / "count" / "job.yaml").stat().st_mtime_ns == before
    assert verbs("run", verbs.job(STEPS=1), "--name", "count-2").returncode == 0


def test_dry_run_prints_what_it_would_write_and_start_and_does_neither(verbs: Verbs) -> None:
    job = verbs.job(STEPS=7)
    result = verbs("run", job, "--dry-run")
    assert result.returncode == 0
    assert "STEPS: '7'" in result.stdout
    assert f"-m craton.agent {verbs.root}/count --node 1" in result.stdout
    assert not verbs.root.exists()
    draft = verbs.json("run", job, "--dry-run")
    written = verbs.folder / "written.yaml"
    written.write_text(draft["files"]["job.yaml"])
    assert load_job(written) == load_job(job)
    assert json.loads(draft["files"]["launch.json"])["nodes"] == ["node-0", "node-1"]
    assert len(draft["commands"]) == 2


def test_detach_returns_while_the_run_goes_on(verbs: Verbs) -> None:
    result = verbs("run", verbs.job(STEPS=100_000), "--detach")
    assert result.returncode == 0
    assert "craton logs count -f" in result.stdout
    verbs.wait_for_step(2)
    assert len(living_agents(verbs.run())) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "slurm"], "sbatch"),
        (["--on", "moon"], "local, slurm, kubernetes"),
        (["--name", "two words"], "error: --name: 'two words' is not a name; use up to 63 letters"),
        (["--stop-at", "soon"], "such as 120, or a share such as 60%"),
        (["--stop-at", "5"], "has no steps"),
    ],
)
def test_a_wrong_option_starts_nothing(verbs: Verbs, arguments: list[str], words: str) -> None:
    result = verbs("run", verbs.job(), *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(verbs.root.glob("*/launch.json"))


def test_a_wrong_job_file_starts_nothing(verbs: Verbs) -> None:
    job = verbs.job()
    job.write_text(job.read_text().replace("command:", "comand:"))
    result = verbs("run", job)
    assert result.returncode == 2
    assert "count.yaml:2" in result.stderr
    assert not verbs.root.exists()


def test_a_root_that_cannot_be_written_is_one_line(verbs: Verbs) -> None:
    verbs.root.write_text("a file")
    result = verbs("run", verbs.job())
    assert result.returncode == 2
    assert "set CRATON_RUNS to a writable folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_money_is_not_spent_without_a_yes(verbs: Verbs) -> None:
    job = verbs.folder / "priced.yaml"
    job.write_text(PRICED)
    (verbs.folder / "text.txt").write_text("words\n")
    result = verbs("run", job)
    assert result.returncode == 2
    assert "cost" in result.stdout
    assert "--yes" in result.stderr
    code, screen = in_a_terminal(verbs, ["run", str(job)], when="Start it for about $", send=b"n\n")
    assert code == 130
    assert "$" in screen
    assert not (verbs.root / "priced").exists()


def test_the_question_about_money_is_seen_where_stdout_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "kind: command\ncommand: x\ncluster: p5.48xlarge x 2\nprice: {dollars_per_hour: 10}\n"
    draft = draft_run(parse_job(text), Path("/runs/priced"), on="slurm")
    answers = io.StringIO("n\n")
    monkeypatch.setattr(answers, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(typer.Abort):
        confirm(draft, yes=False)
    output = capsys.readouterr()
    assert "Start it for about $20.00 per hour?" in output.err
    assert output.err.endswith("not started\n")
    assert not output.out.strip()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "$20.00 per hour"),
        ("run: {time_limit: 4h}\n", "$20.00 per hour, at most $80.00 in each start of 4h"),
        ("run: {time_limit: 4h, restarts: 0}\n", "per hour, at most $80.00 in its time limit of 4h"),
        ("recover: {spares: 1}\n", "$30.00 per hour, spares included"),
        ("run: {time_limit: 4h, copies: 3}\n", "$60.00 per hour for 3 copies, at most $240 in each start"),
    ],
)
def test_the_cost_of_a_command_is_shown_whether_it_is_asked_for_or_not(more: str, says: str) -> None:
    text = "kind: command\ncommand: x\ncluster: p5.48xlarge x 2\nprice: {dollars_per_hour: 10}\n"
    out = io.StringIO()
    print_plan(draft_run(parse_job(text + more), Path("/runs/priced"), on="slurm"), Console(file=out, width=200))
    (line,) = (line for line in out.getvalue().splitlines() if line.startswith("cost"))
    assert says in line


def test_what_is_said_of_a_run_left_alone_fits_its_kind_and_its_place() -> None:
    def said(kind: str, on: str) -> str:
        job = parse_job(kind)
        draft = Draft(job, None, Launch(0, ["node-0"], 1, ["x"]), on=on)
        out = io.StringIO()
        follow(Run(RunDirectory("/runs/none")), draft, Console(file=out, width=200), detach=True, as_json=False)
        return out.getvalue()

    command = "name: none\nkind: command\ncommand: x\ncluster: local\n"
    training = f"name: none\n{PRICED}"
    assert "none runs in the background: " in said(command, "local")
    assert "`craton stop none` stops it\n" in said(command, "local")
    assert "none starts once its nodes are allocated: " in said(command, "slurm")
    assert "stops it with a checkpoint" in said(training, "local")


def test_ctrl_c_leaves_the_view_and_not_the_run(verbs: Verbs) -> None:
    job = verbs.job(STEPS=100_000)
    code, screen = in_a_terminal(verbs, ["run", str(job)], when="tokens/s", send=b"\x03")
    assert code == 130
    assert "left the view; count continues" in screen
    assert "craton stop count" in screen
    reached = summarize(verbs.run()).step
    verbs.wait_for_step(reached + 2)
    assert len(living_agents(verbs.run())) == 2


def test_the_view_shows_progress_and_loss(verbs: Verbs) -> None:
    code, screen = in_a_terminal(verbs, ["run", str(verbs.job(STEPS=60))])
    assert code == 0
    for words in ("count · running · 2 ranks", "step 60", "loss", "measured", "count is done"):
        assert words in screen
    assert "▁" in screen


def test_the_quickstart_is_a_job_that_runs_here() -> None:
    job = load_job(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    assert job.cluster.is_local
    assert job.steps is not None
    for ranks in (1, 2, 4):
        assert job.global_batch_sequences % ranks == 0
