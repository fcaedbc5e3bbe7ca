"""`craton bench plan`: the table, the JSON, and its mistakes."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from craton.bench import planner
from craton.cli import main
from craton.planning.calibration import corpus, row_of
from craton.planning.calibration.published_rows import corpus_path
from craton.planning.fitting import Fit
from craton.planning.step import TRAINING_STEP

ROWS: list[dict[str, Any]] = json.loads(Path(corpus_path()).read_text(encoding="utf-8"))["cases"]
FAMILIES = ("torchtitan", "nanotron")


class Command:
    """Runs the command in this process, as the console script does, with two families for a corpus."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.cases = folder / "cases.json"
        known = tuple(case for case in corpus() if case.family in FAMILIES)
        monkeypatch.setattr(planner, "corpus", lambda: known)
        monkeypatch.setattr(planner, "corpus_fit", cache(lambda: Fit(TRAINING_STEP, [row_of(case) for case in known])))
        monkeypatch.setenv("COLUMNS", "120")
        wanted = [case.id for case in known if case.family == "torchtitan"][:4]
        wanted += [case.id for case in known if case.family == "nanotron"][:9]
        self.rows = [copy.deepcopy(row) for row in ROWS if row["id"] in wanted]
        self.cases.write_text(json.dumps(self.rows))

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["craton", "bench", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output = self.capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_the_table(command: Command) -> None:
    command.rows[0]["hardware"]["gpu"] = "TPU v5p"
    command.cases.write_text(json.dumps(command.rows))
    code, output, errors = command(command.cases)
    assert (code, errors) == (0, "")
    for word in ("12 predictions", "leave one group out", "median", "p90", "bias", "torchtitan", "nanotron", "bf16"):
        assert word in output
    assert "skipped 1:" in output
    assert f"{command.rows[0]['id']}: GPU TPU v5p is not in the catalog" in output


def test_json_is_one_document(command: Command) -> None:
    code, output, errors = command(command.cases, "--json")
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    document = json.loads(output)
    assert {"cases", "skipped", "summary"} == set(document)
    assert {case["id"] for case in document["cases"]} == {row["id"] for row in command.rows}
    assert document["summary"]["holdout"] == "group"


@pytest.mark.parametrize(
    ("holdout", "words"),
    [("family", "leave one family out"), ("gpu", "leave one GPU out"), ("none", "in sample")],
)
def test_other_holdouts(command: Command, holdout: str, words: str) -> None:
    code, output, _ = command(command.cases, "--holdout", holdout)
    assert code == 0
    assert words in output


def test_rows_handed_to_calibrate(command: Command) -> None:
    code, output, _ = command(command.cases, "--holdout", "family", "--given", 5)
    assert code == 0
    assert "5 of its runs given" in output


def test_a_file_of_which_nothing_can_be_predicted_still_prints(command: Command) -> None:
    for row in command.rows:
        row["measured"] = row["derived"] = None
    command.cases.write_text(json.dumps(command.rows))
    code, output, _ = command(command.cases)
    assert code == 0
    assert "skipped 13:" in output
    code, output, _ = command(command.cases, "--json")
    assert (code, json.loads(output)["cases"]) == (0, [])


BAD: dict[str, list[str]] = {
    "an unknown holdout": ["--holdout", "row"],
    "given without a family": ["--given", "3"],
    "a negative number given": ["--holdout", "family", "--given", "-1"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(command: Command, case: str) -> None:
    code, output, errors = command(command.cases, *BAD[case], "--json")
    assert code == 2
    assert errors.startswith("error: --")
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "kind: pretrain\n", '{"cases": 3}'])
def test_bad_files(command: Command, text: str) -> None:
    command.cases.write_text(text)
    code, output, errors = command(command.cases, "--json")
    assert code == 2
    assert errors.startswith(f"error: {command.cases}")
    assert errors.count("\n") == 1
    assert json.loads(output)["problems"]


def test_a_missing_file_and_a_folder(command: Command, tmp_path: Path) -> None:
    assert command(tmp_path / "nothing.json")[0] == 2
    assert command(tmp_path)[0] == 2


@pytest.mark.parametrize("arguments", [[], ["cases.json", "--nope"], ["cases.json", "--given", "many"]], ids=str)
def test_wrong_usage_with_json_is_json_too(command: Command, arguments: list[str]) -> None:
    code, output, errors = command(*arguments, "--json")
    assert code == 2
    assert errors
    assert json.loads(output)["error"]
