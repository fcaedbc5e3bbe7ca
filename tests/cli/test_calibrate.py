"""`craton calibrate`: what it writes and prints, and that every bad file is one line and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from craton.cli import main
from craton.job import load_job
from craton.planning import plan as plan_job
from craton.planning.calibration import corpus
from craton.planning.calibration.profiles import load_profile
from craton.planning.calibration.published_rows import corpus_path

ROWS: dict[str, dict[str, Any]] = {
    row["id"]: row for row in json.loads(Path(corpus_path()).read_text(encoding="utf-8"))["cases"]
}
A100_ROWS = [ROWS[case.id] for case in corpus() if (case.family, case.machine.gpu) == ("torchtitan", "A100-80-SXM")]
JOB = """\
kind: pretrain
model: llama-3.1-8b
data: {sequence: 8192}
train: {global_batch_sequences: 32, steps: 1000}
cluster: p5.48xlarge x 2
"""
RUNS: list[dict[str, Any]] = [
    {"job": "job.yaml", "step_seconds": 2.4, "layout": {"fsdp": 16}},
    {"job": "job.yaml", "step_seconds": [9.0, 2.6, 2.6], "layout": {"fsdp": 8, "tp": 2}},
    {"job": "job.yaml", "step_seconds": 3.1, "layout": {"fsdp": 16, "recompute": "full"}, "name": "recomputed"},
]


class Command:
    """Runs the command in this process and in a folder of its own, as the console script does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capsys, self.folder = monkeypatch, capsys, folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "120")
        (folder / "job.yaml").write_text(JOB)
        self.write(RUNS)

    def write(self, document: object, name: str = "runs.json") -> None:
        (self.folder / name).write_text(document if isinstance(document, str) else json.dumps(document))

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["craton", "calibrate", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        output = self.capsys.readouterr()
        return code, output.out, output.err


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_a_profile_is_written_and_used(calibrate: Command) -> None:
    code, output, errors = calibrate("runs.json", "--out", "team/ours.json")
    assert (code, errors) == (0, "")
    for word in (
        "3 runs on H100-SXM",
        "recomputed",
        "measured",
        "before",
        "after",
        "gemm_efficiency",
        "not identifiable",
    ):
        assert word in output
    assert "software: team/ours.json" in output
    profile = load_profile("team/ours.json")
    assert (profile.name, profile.gpu, profile.rows, profile.calibrated) == ("ours", "H100-SXM", 3, True)
    Path("job.yaml").write_text(JOB + "layout: {fsdp: 16}\nsoftware: team/ours.json\n")
    answer = plan_job(load_job("job.yaml"))
    assert answer.calibrated
    assert answer.step_seconds == pytest.approx(2.4, rel=0.1)


def test_json_is_one_document(calibrate: Command) -> None:
    code, output, errors = calibrate("runs.json", "--json")
    assert (code, errors) == (0, "")
    document = json.loads(output)
    assert document["profile"] == "profile.json"
    assert Path("profile.json").is_file()
    assert [run["measured"] for run in document["runs"]] == [2.4, 2.6, 3.1]
    for run in document["runs"]:
        assert abs(run["after"] / run["measured"] - 1) < abs(run["before"] / run["measured"] - 1)
    assert set(document["identified"]).isdisjoint(document["unidentified"])
    assert document["pinned"] == []


def test_published_rows_and_another_start(calibrate: Command) -> None:
    calibrate.write({"cases": A100_ROWS[:4]})
    code, output, _ = calibrate("runs.json", "--software", "torchtitan", "--json")
    assert code == 0
    assert len(json.loads(output)["runs"]) == 4
    assert load_profile("profile.json").gpu == "A100-80-SXM"


def test_pins(calibrate: Command) -> None:
    calibrate.write({"constants": {"attention_efficiency": 0.5}}, "pins.json")
    code, output, _ = calibrate("runs.json", "--pin", "pins.json", "--json")
    assert code == 0
    assert json.loads(output)["pinned"] == ["attention_efficiency"]
    assert "pinned" in calibrate("runs.json", "--pin", "pins.json")[1]


BAD: dict[str, tuple[object, list[str]]] = {
    "not JSON": ("{", []),
    "no runs": ([], []),
    "two runs": (RUNS[:2], []),
    "two cards": ([*A100_ROWS[:2], *RUNS], []),
    "a layout with an unknown key": ([{**RUNS[0], "layout": {"fsdpp": 16}}] * 3, []),
    "a layout that is a word": ([{**RUNS[0], "layout": "auto"}] * 3, []),
    "a step that never ends": ([{**RUNS[0], "step_seconds": float("inf")}] * 3, []),
    "a row with half a micro-batch": ([{**A100_ROWS[0], "micro_batch": 0.5}] * 3, []),
    "an unknown start": (RUNS, ["--software", "torchtitn"]),
    "a start that is not there": (RUNS, ["--software", "nothing.json"]),
    "pins that are not there": (RUNS, ["--pin", "nothing.json"]),
    "pins of an unknown constant": (RUNS, ["--pin", "bad.json"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(calibrate: Command, case: str) -> None:
    document, arguments = BAD[case]
    calibrate.write(document)
    calibrate.write({"constants": {"luck": 1.0}}, "bad.json")
    code, output, errors = calibrate("runs.json", *arguments, "--json")
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors
    assert not Path("profile.json").exists()


def test_a_missing_file(calibrate: Command) -> None:
    code, _, errors = calibrate("nothing.json")
    assert (code, errors) == (2, "error: nothing.json: no such file\n")


def test_a_profile_that_cannot_be_written_fails_without_a_traceback(calibrate: Command) -> None:
    """It is known before the fit."""
    calibrate.monkeypatch.delattr("craton.planning.calibration.fit_profile.calibrate_from")
    for out, message in ((".", "--out .: is a folder; name a file, e.g. profile.json"), ("job.yaml/a.json", "another")):
        code, output, errors = calibrate("runs.json", "--out", out, "--json")
        assert code == 2
        assert errors.startswith(f"error: --out {out}")
        assert message in errors
        assert json.loads(output)["error"]


@pytest.mark.parametrize("arguments", [[], ["runs.json", "--nope"]], ids=str)
def test_wrong_usage_with_json_is_json_too(calibrate: Command, arguments: list[str]) -> None:
    code, output, errors = calibrate(*arguments, "--json")
    assert code == 2
    assert errors
    assert json.loads(output)["error"]
