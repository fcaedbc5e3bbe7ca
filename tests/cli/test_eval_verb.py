"""`craton eval` as a user has it: a real model folder, a real run whose process is killed, and a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from run_verbs import Verbs
from waiting import wait_until

from craton.cli.views.evaluation import write_page
from craton.cli.views.outcome import resumes_from
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_status

sys.path.append(str(Path(__file__).parents[1] / "ml" / "evaluation"))
sys.path.append(str(Path(__file__).parents[1] / "observability" / "web"))
from page_server import PageServer
from tiny_models import opened, write_model, write_suite

NUMBERS = ("accuracy", "low", "high", "pass_at", "majority_at", "num_scored")


def test_an_evaluation_is_a_run_with_results(verbs: Verbs, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    suite = write_suite(tmp_path, problems=12, samples=2)
    vote = "{kind: vote, n: 2, answer: text, stop: 'off'}"
    found = verbs.json("eval", model, suite, "--name", "first", "--strategy", vote)
    run = RunDirectory(verbs.root / "first")
    assert found["strategies"] == _evaluation(run)["strategies"]
    assert ([entry["words"] for entry in found["strategies"]], _num_lines(run)) == (["2 samples", "vote:2"], 24)
    planned = verbs.json("plan", "--eval", "first", "--strategy", vote, "--tokens", "10,5")
    votes = [row["measured"] for row in planned["rows"] if row["shape"]["kind"] == "vote" and row["n"] == 2]
    assert found["strategies"][1]["accuracy"] in [measured["accuracy"] for measured in votes if measured]
    last = found["strategies"][1]
    shown = f"first: suite accuracy {last['accuracy']:.2f} ({last['low']:.2f} to {last['high']:.2f})"
    assert shown in verbs("ps").stdout


@pytest.mark.slow
def test_an_evaluation_is_a_run_that_survives_a_kill(verbs: Verbs, tmp_path: Path) -> None:
    model, page = write_model(tmp_path / "tiny"), tmp_path / "page.html"
    suite = write_suite(tmp_path, problems=60, samples=2)
    asyncio.run(opened(verbs.root / "undisturbed", model, suite).run())
    verbs.capfd.readouterr()
    before = _evaluation(RunDirectory(verbs.root / "undisturbed"))["strategies"][0]
    run, killed = RunDirectory(verbs.root / "eval-model-bytes"), []

    def kill() -> None:
        wait_until(lambda: run.path.is_dir() and _num_lines(run) > 3)
        status = read_status(run, "node-0")
        assert status is not None
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        killed.append(_num_lines(run))

    killer = threading.Thread(target=kill)
    killer.start()
    found = verbs.json("eval", model, suite, "--concurrency", "4", "--against", "undisturbed", "--html", page)
    killer.join()
    assert 3 < killed[0] < 60
    assert _num_lines(run) == 60, "no problem is lost, none is evaluated twice"
    entry = found["strategies"][0]
    assert {name: entry[name] for name in NUMBERS} == {name: before[name] for name in NUMBERS}
    (comparison,) = found["comparison"]
    assert (comparison["num_problems"], comparison["p_value"]) == (60, 1.0)
    assert "Accuracy against tokens" in page.read_text(encoding="utf-8")
    listed = verbs("ps").stdout
    assert f"{run.name}: suite accuracy {before['accuracy']:.2f}" in listed
    assert "60/60" in listed


@pytest.mark.slow
def test_an_evaluation_that_lost_all_its_processes_is_shown_by_its_second_start(verbs: Verbs, tmp_path: Path) -> None:
    """All problems but one lose their verdicts between the starts: the second has done fewer than the first."""
    model, suite = write_model(tmp_path / "tiny"), write_suite(tmp_path, problems=40, samples=2)
    verbs.json("eval", model, suite, "--name", "twice", "--concurrency", "4", "--detach")
    run = RunDirectory(verbs.root / "twice")
    wait_until(lambda: _num_lines(run) > 8)
    status = read_status(run, "node-0")
    assert status is not None
    (agent,) = json.loads((run.path / "agents.json").read_text(encoding="utf-8"))
    for pid in (agent["pid"], status.ranks[0].pid):
        os.kill(pid, signal.SIGKILL)
    lines = [json.loads(line) for line in (run.path / "problems.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines[1:]:  # as if their verifier had failed
        line["samples"] = [{**sample, "is_right": None, "error": "down"} for sample in line["samples"]]
    (run.path / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    before = len(lines)
    page = PageServer(verbs.root)
    try:
        verbs.json("resume", "twice", "--detach")

        def steps() -> list[dict[str, Any]]:
            text = (run.path / "metrics" / "node-0.jsonl").read_text(encoding="utf-8")
            lines = map(json.loads, text.splitlines())
            return [line for line in lines if (line["generation"], line["rank"]) == (1, 0)]

        wait_until(steps)
        assert steps()[0]["step"] == 2, "one problem was done"
        wait_until(lambda: steps()[-1]["step"] == 40)
        (listed,) = verbs.json("ps")
        assert (listed["generation"], listed["step"], listed["steps"]) == (1, 40, 40)
        wait_until(lambda: verbs.json("ps")[0]["state"] == "done")
        _, _, shown = page.ask("GET", "/runs/twice")
        for words in ("<span>eval</span>", "generation 1", "40 / 40", 'data-state="done"'):
            assert words in shown
        assert '<span class="sub">eval' in page.ask("GET", "/")[2]
    finally:
        page.close()
    assert _num_lines(run) == before + 39
    assert _evaluation(run)["strategies"][0]["num_failures"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("arithmetics",), "did you mean 'arithmetic'?"),
        (("arithmetic", "--samples", "4", "--temperature", "0"), "4 samples at temperature 0 are all the same"),
        (("arithmetic", "--strategy", "vote:0"), "'0' is not a whole number from 1 to 1024"),
        (
            ("arithmetic", "--strategy", "vote:2", "--strategy", "best_of:2:math"),
            "eval.strategies[1].score: no verifier is called 'math'; allowed: logprobs, regex",
        ),
        (("arithmetic", "--html", "/dev/null/page.html"), "--html /dev/null/page.html: its folder cannot be made"),
        (("arithmetic", "--html", "/"), "--html / is a folder; give the name of a file"),
        (("arithmetic", "--price", "3"), "--price '3' is not IN,OUT"),
        (("arithmetic", "--price", "3,4"), "eval: price is that of an endpoint"),
        (("arithmetic", "--checkpoints", "first"), "--checkpoints 'first' is neither all nor a list of steps"),
        (
            ("arithmetic", "--checkpoints", "all"),
            "eval.checkpoints needs a run, and model is none; give the name or directory of a training run",
        ),
        (("arithmetic", "--key", "API_KEY"), "--key is for a server"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    verbs: Verbs, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": 259, "intermediate_size": 64}))
    result = verbs("eval", folder, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not verbs.root.exists() or not list(verbs.root.iterdir())


def test_an_evaluation_without_a_checkpoint_continues_from_its_problems(tmp_path: Path) -> None:
    opened(tmp_path / "run", None, write_suite(tmp_path, problems=1), endpoint={"url": "http://127.0.0.1:9"})
    assert resumes_from(RunDirectory(tmp_path / "run"), False) == ", from the problems that have no result yet"


def test_a_page_of_two_runs_names_each(tmp_path: Path) -> None:
    results = {"before": _result(0.25, pass_at={"1": 0.25, "2": 0.5}), "after": _result(0.75, pass_at={"1": 0.75})}
    sides = {"first": "after", "second": "before", "accuracies": [0.75, 0.25], "test": "mcnemar", "num_problems": 8}
    numbers = {"difference": 0.5, "low": 0.1, "high": 0.9, "p_value": 0.01, "num_better": 4, "num_worse": 0}
    write_page(tmp_path / "page.html", results, [{"words": "1 sample", **sides, **numbers}])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    for run, accuracy in (("before", "25%"), ("after", "75%")):
        (section,) = [part for part in text.split("<section") if f"Numbers of {run}: tiny" in part]
        assert f"best: 1 sample, {accuracy}" in section
    assert "1 sample: after 75% against before 25% on the same 8 problems" in text
    assert text.count("Among k of the 1 sample of before") == 1
    assert "Among k of the 1 sample of after" not in text


def _result(accuracy: float, **more: object) -> dict[str, object]:
    entry = {
        "words": "1 sample",
        "accuracy": accuracy,
        "low": accuracy - 0.1,
        "high": accuracy + 0.1,
        "num_scored": 8,
        "num_problems": 8,
        "num_failures": 0,
        "majority_at": {},
        "completion_tokens_per_problem": 12.0,
        "tokens_per_solved": 24.0,
        "seconds_per_solved": 0.5,
        "dollars_per_problem": 1e-6,
        "dollars_per_solved": 2e-6,
        **more,
    }
    return {"suite": "sums", "model": "tiny", "strategies": [entry]}


def _num_lines(run: RunDirectory) -> int:
    path = run.path / "problems.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _evaluation(run: RunDirectory) -> dict[str, list[dict[str, float]]]:
    document = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document
