"""`craton plan --eval` and `--accuracy`: what they print, what `--json` has, and that a mistake is one line."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from craton.ml.serving.text import Vocabulary
from tests.cli.test_plan import Command, plan

sys.path.append(str(Path(__file__).parents[1] / "ml" / "evaluation"))
from tiny_models import opened, write_model, write_suite

__all__ = ["plan"]  # the fixture

KNOWN = "pass_at: {1: 0.317, 8: 0.629}\nmajority_at: {8: 0.458}\nproblems: 1991\nsamples: 64\ncompletion_tokens: 400\n"
FEW = ("--strategy", "{kind: vote, n: 16, stop: 0.95}", "--strategy", "best_of:8:exact")


@pytest.fixture
def known(tmp_path: Path) -> Path:
    file = tmp_path / "known.yaml"
    file.write_text(KNOWN)
    return file


def test_the_tables_say_what_a_user_asks(plan: Command, known: Path) -> None:
    code, output, errors = plan("--eval", known, "--price", "0.1,0.5", "--budget", "$0.01", *FEW)
    assert (code, errors) == (0, "")
    assert re.search(r"best +vote, stop 0.95, n 16: \d+% predicted \(\d+–\d+%\), .* tokens, \$\d", output)
    assert re.search(r"best of n, exact +8 +\d+%", output)
    for word in ("1,991 problems", "$0.01 per problem", "80% interval", "measured", "KV cache", "$ per 1k solved"):
        assert word in output
    assert max(len(line) for line in output.splitlines()) <= 100


def test_json_has_every_row_with_its_interval(plan: Command, known: Path) -> None:
    document = plan.json("--eval", known, "--price", "0.1,0.5", *FEW)
    names = ["one sample", "vote, stop 0.95", "best of n, exact", "best of n", "full vote"]
    assert [row["name"] for row in document["rows"]] == names
    assert [row["measured"] is not None for row in document["rows"]] == [True, False, False, True, True]
    vote = document["rows"][1]
    assert vote["predicted"]["low"] < vote["predicted"]["accuracy"] < vote["predicted"]["high"]
    assert vote["dollars_per_solved"][0] == pytest.approx(vote["price"]["dollars"] / vote["accuracy"])
    assert vote["usage"]["completion_tokens"] < 16 * 400
    assert document["best"]["name"] == "vote, stop 0.95"


def test_a_server_job_gives_latency_and_kv_cache(plan: Command, known: Path, tmp_path: Path) -> None:
    job = tmp_path / "serve.yaml"
    job.write_text("kind: serve\nmodel: llama-3.2-1b\nserve: {initialize: random}\ncluster: p5.48xlarge x 1\n")
    document = plan.json(job, "--eval", known, "--budget", "10s", *FEW)
    for row in document["rows"]:
        assert row["price"]["latency_seconds"] > 0
        assert row["price"]["kv_bytes"] > 0
        assert row["price"]["problems_per_hour"] * row["price"]["dollars"] == pytest.approx(
            document["rows"][0]["price"]["problems_per_hour"] * document["rows"][0]["price"]["dollars"]
        )


def test_accuracies_on_the_command_line_and_a_report(plan: Command, tmp_path: Path) -> None:
    page = tmp_path / "new folder" / "plan.html"
    code, output, _ = plan("--accuracy", "1:0.55,4:0.7", "--tokens", "300,800", "--html", page, *FEW)
    assert code == 0
    assert "500 problems are assumed" in output
    assert "IN,OUT per million tokens" in " ".join(output.split())
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert json.dumps(plan.json("--accuracy", "1:0.55", *FEW)).count("NaN") == 0


def test_a_suite_is_planned_from_its_own_prompts(
    plan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    code, output, _ = plan("--eval", "arithmetic", "--price", "0.1,0.5", "--budget", "$0.0001")
    assert code == 0
    shown = " ".join(output.split())
    for words in (
        "500 problems, no accuracy",
        "prompts of 11 to 13 tokens, estimated: one token for 3 bytes",
        "completions at the suite's max_tokens of 32, an upper bound",
        "$0.0001 per problem",
        "no accuracy is known, so no strategy is best",
    ):
        assert words in shown
    assert "predicted" not in output.partition("Cost")[0]
    given = plan.json("--eval", "arithmetic", "--accuracy", "1:0.3,4:0.5", "--price", "0.1,0.5")
    assert (given["known"]["num_problems"], given["lengths"]["completion_tokens"]) == (500, 32)
    assert given["best"]["dollars_per_solved"][0] > 0


def test_a_suite_is_planned_with_the_tokenizer_of_its_server(
    plan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    suite = write_suite(tmp_path, problems=12, rest="strategies: [vote:6]\n")
    job = tmp_path / "serve.yaml"
    job.write_text(f"kind: serve\nmodel: {write_model(tmp_path / 'tiny')}\ncluster: p5.48xlarge x 1\n")
    vocabulary = Vocabulary(tmp_path / "tiny" / "model")
    tokens = [len(vocabulary.encode(f"What is {number}?", with_special_tokens=True)) for number in range(12)]
    found = plan.json(job, "--eval", suite, "--accuracy", "1:0.5")
    assert found["lengths"] == {"prompt_tokens": sum(tokens) / 12, "completion_tokens": 6}
    assert found["lengths_source"].startswith(f"prompts of {min(tokens)} to {max(tokens)} tokens, by the tokenizer of ")
    assert ("vote, stop 0.88", 6) in [(row["name"], row["n"]) for row in found["rows"]]
    assert all(row["price"]["latency_seconds"] > 0 for row in found["rows"])
    plan.monkeypatch.setenv("COLUMNS", "80")
    table = plan(job, "--eval", suite, "--accuracy", "1:0.5")[1].partition("Cost")[2]
    assert "…" not in table
    assert "$ per 1k solved" in table


def test_a_suite_is_planned_from_its_newest_evaluation(
    plan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    model, suite = write_model(tmp_path / "tiny"), write_suite(tmp_path, problems=20, samples=2)
    vote = {"kind": "vote", "n": 4, "answer": "text", "stop": "off"}
    asyncio.run(opened(tmp_path / "runs" / "measured", model, suite, strategies=[vote]).run())
    plan.capsys.readouterr()
    found = plan.json("--eval", suite, "--price", "0.1,0.5")
    assert found["title"] == "bytes: 20 problems, accuracy of model on bytes in run measured"
    entries = json.loads((tmp_path / "runs" / "measured" / "evaluation.json").read_text())["strategies"]
    rows = {(row["name"], row["n"]): row for row in found["rows"]}
    for entry, row in zip(entries, (rows["one sample", 1], rows["full vote", 4]), strict=True):
        assert row["measured"]["accuracy"] == entry["accuracy"]
        assert row["measured"]["tokens_per_problem"] == pytest.approx(row["usage"]["tokens"], rel=0.1)
    assert rows["full vote", 4]["predicted"] is not None


BAD_ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "JOB is missing"),
    "both": (["--eval", "KNOWN", "--accuracy", "1:0.5"], "remove one of them, or give a suite"),
    "a suite that is misspelt": (["--eval", "arithmetics", "--accuracy", "1:0.5"], "did you mean 'arithmetic'?"),
    "a suite of no file": (["--eval", "no-such.yaml"], "no such suite, run or file"),
    "a suite whose data is missing": (["--eval", "SUITE"], "rows.jsonl does not exist"),
    "accuracy that is no share of a suite": (["--eval", "code", "--accuracy", "1:3"], "3.0 at 1 is not a share"),
    "no such file": (["--eval", "no-such-file"], "no such suite, run or file; name a suite, a run of `craton eval`"),
    "accuracy of words": (["--accuracy", "good"], "'good' is not SAMPLES:SHARE"),
    "accuracy beyond 1": (["--accuracy", "1:55"], "55.0 at 1 is not a share"),
    "accuracy of no samples": (["--accuracy", "0:0.5"], "0 is not a whole number"),
    "accuracy that falls": (["--accuracy", "1:0.6,4:0.5"], "falls with more samples"),
    "tokens of one number": (["--accuracy", "1:0.5", "--tokens", "300"], "--tokens '300' is not two numbers"),
    "price of words": (["--accuracy", "1:0.5", "--price", "a,b"], "--price 'a,b' is not two numbers"),
    "a negative price": (["--accuracy", "1:0.5", "--price", "1,-2"], "is not two numbers"),
    "a budget without tokens": (["--accuracy", "1:0.5", "--budget", "$1"], "--budget needs the tokens"),
    "a bad budget": (["--accuracy", "1:0.5", "--budget", "much", "--tokens", "1,2"], "is not an amount per problem"),
    "no such strategy": (["--accuracy", "1:0.5", "--strategy", "vot:3"], "did you mean 'vote'?"),
    "half a mapping": (["--accuracy", "1:0.5", "--strategy", "{kind: vote"], "--strategy:1: is not YAML: expected"),
    "a vote of 1000": (["--accuracy", "1:0.5", "--strategy", "vote:1000"], "allowed: up to 128"),
    "a vote of none": (["--accuracy", "1:0.5", "--strategy", "vote:0"], "--strategy.n"),
    "an option of training": (
        ["--accuracy", "1:0.5", "--instances", "p5"],
        "--instances applies to training jobs only",
    ),
    "a price without accuracy": (["JOB", "--price", "1,2"], "--price requires --eval SUITE or --accuracy"),
    "a job that trains": (["JOB", "--accuracy", "1:0.5"], "does not serve"),
    "a job and a price": (["JOB", "--accuracy", "1:0.5", "--price", "1,2"], "remove one of them"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_one_clear_line_and_exit_code_2(
    plan: Command, case: str, known: Path, tmp_path: Path
) -> None:
    arguments, words = BAD_ARGUMENTS[case]
    suite = tmp_path / "suite.yaml"
    suite.write_text("data: {path: rows.jsonl}\nreward: exact\n")
    files = {"JOB": plan.job, "KNOWN": known, "SUITE": suite}
    code, output, errors = plan(*(files.get(word, word) for word in arguments), "--json")
    assert code == 2
    assert errors.startswith("error: ")
    assert words in errors
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors
