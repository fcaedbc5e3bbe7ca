"""`craton plan`: what it prints, what `--json` promises, and that every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from craton.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = """\
kind: pretrain
model: llama-3.2-1b
data: {sequence: 4096}
train: {global_batch_sequences: 32, tokens: 10B}
cluster: p5.48xlarge x 1
"""
PROMISED = {
    "layout",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "phases",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "memory_limit_bytes",
    "goodput",
    "cost_dollars",
    "bottleneck",
    "alternatives",
}


class Command:
    """Runs the command in this process, as the console script does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.job = folder / "job.yaml"
        self.job.write_text(JOB)
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["craton", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output = self.capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    def json(self, *arguments: object) -> dict[str, Any]:
        code, output, errors = self(*arguments, "--json")
        assert (code, errors) == (0, "")
        assert output.count("\n") == 1
        document = json.loads(output)
        assert isinstance(document, dict)
        return document


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_the_table_says_what_a_user_asks(plan: Command) -> None:
    code, output, errors = plan(plan.job)
    assert (code, errors) == (0, "")
    for word in ("job", "fits", "p5.48xlarge x 1", "layout", "step", "tokens/s", "MFU", "cost", "goodput", "Memory"):
        assert word in output
    assert "Traceback" not in output
    assert max(len(line) for line in output.splitlines()) <= 100


def test_json_has_every_promised_key_and_the_same_numbers(plan: Command) -> None:
    document = plan.json(plan.job)
    assert set(document) >= PROMISED
    assert document["step_seconds_low"] < document["step_seconds"] < document["step_seconds_high"]
    assert sum(document["phases"].values()) == pytest.approx(document["step_seconds"])
    assert document["memory_bytes"] <= document["memory_limit_bytes"]
    assert document["tokens_per_second"] * document["step_seconds"] == pytest.approx(32 * 4096)
    assert 0 < document["mfu"] < 1
    assert 0 < document["goodput"] <= 1
    assert document["cost_dollars"] > 0


def test_a_report_is_written_and_named(plan: Command, tmp_path: Path) -> None:
    page = tmp_path / "new folder" / "report.html"
    code, output, _ = plan(plan.job, "--html", page)
    assert code == 0
    assert "report.html" in output.replace("\n", "")
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_a_search_over_clusters(plan: Command) -> None:
    document = plan.json(plan.job, "--instances", "p5,p5en", "--gpus", "8,16", "--by", "time")
    assert len(document["front"]) == 4
    assert document["cluster"]["name"].endswith("x 2")
    code, output, _ = plan(plan.job, "--instances", "p5.48xlarge", "--gpus", "8..16", "--deadline", "30d")
    assert code == 0
    assert "p5.48xlarge x 2" in output


def test_by_cost_and_by_gpus_and_a_budget(plan: Command) -> None:
    cost = plan.json(plan.job, "--instances", "p5,p6-b200", "--gpus", "8", "--by", "cost")
    gpus = plan.json(plan.job, "--instances", "p5", "--gpus", "8..16", "--by", "gpus", "--budget", "2M")
    assert cost["cost_dollars"] == pytest.approx(min(entry["cost_dollars"] for entry in cost["front"]))
    assert gpus["cluster"]["num_gpus"] == 8


BAD_ARGUMENTS: dict[str, list[str]] = {
    "by speed": ["--instances", "p5", "--by", "speed"],
    "by without instances": ["--by", "time"],
    "gpus without instances": ["--gpus", "64"],
    "deadline without instances": ["--deadline", "14d"],
    "budget without instances": ["--budget", "2M"],
    "gpus that are a word": ["--instances", "p5", "--gpus", "many"],
    "gpus that go down": ["--instances", "p5", "--gpus", "64..8"],
    "no gpus": ["--instances", "p5", "--gpus", "0"],
    "negative gpus": ["--instances", "p5", "--gpus", "-8"],
    "half a range": ["--instances", "p5", "--gpus", "8.."],
    "two ranges": ["--instances", "p5", "--gpus", "8..16..32"],
    "gpus with a comma too many": ["--instances", "p5", "--gpus", "8,,16"],
    "gpus that are no nodes": ["--instances", "p5", "--gpus", "12"],
    "an unknown instance": ["--instances", "p55", "--gpus", "8"],
    "only commas": ["--instances", ",", "--gpus", "8"],
    "a deadline that is a word": ["--instances", "p5", "--gpus", "8", "--deadline", "soon"],
    "a deadline without a unit": ["--instances", "p5", "--gpus", "8", "--deadline", "d"],
    "a negative deadline": ["--instances", "p5", "--gpus", "8", "--deadline", "-3d"],
    "a deadline too soon": ["--instances", "p5", "--gpus", "8", "--deadline", "1s"],
    "a budget that is a word": ["--instances", "p5", "--gpus", "8", "--budget", "much"],
    "a budget too small": ["--instances", "p5", "--gpus", "8", "--budget", "1"],
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_one_clear_line_and_exit_code_2(plan: Command, case: str) -> None:
    code, output, errors = plan(plan.job, *BAD_ARGUMENTS[case], "--json")
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors


@pytest.mark.parametrize("arguments", [[], ["--nope"], ["job.yaml", "--nope"], ["a.yaml", "b.yaml"]], ids=str)
def test_wrong_usage_with_json_is_json_too(plan: Command, arguments: list[str]) -> None:
    code, output, errors = plan(*arguments, "--json")
    assert code == 2
    assert errors
    assert json.loads(output)["error"]


BAD_JOBS = {
    "kind command": "kind: command\ncommand: ls\ncluster: p5.48xlarge x 1\n",
    "a server on two nodes": "kind: serve\nmodel: llama-3.1-8b\ncluster: p5.48xlarge x 2\n",
    "a model that is a function": JOB.replace("llama-3.2-1b", "my.models:build"),
    "no end": JOB.replace(", tokens: 10B", ""),
    "an unknown stack": JOB + "software: torchtitn\n",
    "a profile that is not there": JOB + "software: ./profile.json\n",
    "a layout that does not divide": JOB + "layout: {tp: 3}\n",
    "a layout that is impossible": JOB + "layout: {fsdp: 1, pp: 8, vpp: 8}\n",
    "an unknown instance": JOB.replace("p5.48xlarge", "p5.84xlarge"),
    "nothing divides": JOB.replace("32", "7").replace("x 1", "x 1000"),
    "empty": "",
    "not YAML": "kind: [",
}


@pytest.mark.parametrize("case", BAD_JOBS)
def test_a_bad_job_is_one_clear_line_and_exit_code_2(plan: Command, case: str) -> None:
    plan.job.write_text(BAD_JOBS[case])
    code, output, errors = plan(plan.job, "--json")
    assert code == 2
    assert errors.startswith(f"error: {plan.job}:")
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors


def test_a_torn_profile_is_a_bad_input(plan: Command) -> None:
    (plan.job.parent / "profile.json").write_text("{")
    plan.job.write_text(JOB + "software: profile.json\n")
    code, _, errors = plan(plan.job)
    assert code == 2
    assert "profile.json" in errors


def test_a_job_that_does_not_fit_is_still_an_answer(plan: Command) -> None:
    plan.job.write_text(JOB.replace("llama-3.2-1b", "llama-3.1-405b"))
    code, output, _ = plan(plan.job)
    assert code == 0
    assert "does not fit" in output


def test_a_report_that_cannot_be_written_fails_without_a_traceback(plan: Command, tmp_path: Path) -> None:
    code, output, errors = plan(plan.job, "--html", tmp_path, "--json")
    assert code in (1, 2)
    assert errors.startswith("error: ")
    assert json.loads(output)["error"]


WORDS = [
    "--instances",
    "--gpus",
    "--by",
    "--deadline",
    "--budget",
    "p5",
    "8",
    "8..8",
    "cost",
    "1d",
    "",
    "-1",
    "nan",
    "🙂",
]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(arguments=st.lists(st.sampled_from(WORDS), max_size=5))
def test_no_arguments_make_a_traceback(plan: Command, arguments: list[str]) -> None:
    plan.job.write_text("kind: command\ncommand: ls\ncluster: p5.48xlarge x 1\n")
    code, _, errors = plan(plan.job, *arguments)
    assert code == 2
    assert errors
    assert "Traceback" not in errors


SERVER = "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n"


def test_a_server_is_planned_too(plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plan.job.write_text(SERVER)
    monkeypatch.setenv("COLUMNS", "80")
    code, output, errors = plan(plan.job)
    assert (code, errors) == (0, "")
    for words in ("FITS", "KV cache", "one request", "together", "tokens/s", "roofline"):
        assert words in output
    assert max(len(line) for line in output.splitlines()) <= 80
    found = plan.json(plan.job)
    assert (found["kind"], found["tp"], found["fits"]) == ("serve", 1, True)
    assert found["best_tokens_per_second"] > found["single_tokens_per_second"] > 100


@pytest.mark.parametrize("option", [["--trace"], ["--deadline", "3d"], ["--budget", "2M"]])
def test_what_is_only_for_training_is_said(plan: Command, option: list[str]) -> None:
    plan.job.write_text(SERVER)
    code, _, errors = plan(plan.job, *option)
    assert code == 2
    assert errors.startswith(f"error: {option[0]} applies to training jobs only; ")
    assert errors.count("\n") == 1
