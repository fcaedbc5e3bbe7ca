"""`validate` and `plan` of jobs with members: every combination is checked, and the sums are those of the members."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from craton.cli import main
from craton.cli.views.member_plans import member_plans_json, plan_members
from craton.job import parse_job

BASE = """\
kind: pretrain
model: {layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 512}
data: {sequence: 64}
train: {global_batch_sequences: 8, steps: 10}
cluster: p5.48xlarge x 1
"""


class Command:
    """Runs a command in this process; returns what it prints, as an error if it ends with another code than 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        self.monkeypatch.setattr(sys, "argv", ["craton", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = self.capsys.readouterr()
        assert int(ended.value.code or 0) == code, output.err
        return output.err if code else output.out


@pytest.fixture
def craton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_a_sweep_is_validated_and_planned_as_a_whole(tmp_path: Path, craton: Command) -> None:
    file = tmp_path / "swept.yaml"
    file.write_text(f"{BASE}sweep: {{train.learning_rate: [1e-3, 3e-3], model.layers: [2, 4], parallel: 2}}")
    assert craton("validate", file).rstrip().endswith("sweep of 4 members")
    table = craton("plan", file)
    assert "learning_rate-0.003" in table
    assert "4 members, 2 at a time: together" in table
    assert not re.search(r"\d ?…  ", table), "names are cut, not numbers"
    assert "GPU hours, $" in table
    planned = json.loads(craton("plan", file, "--json"))
    assert planned["gpu_hours"] == pytest.approx(sum(member["gpu_hours"] for member in planned["members"]))
    assert planned["cost_dollars"] == pytest.approx(sum(member["cost_dollars"] for member in planned["members"]))
    assert planned["members"][0]["step_seconds"] < planned["members"][1]["step_seconds"]
    refused = craton("plan", file, "--html", str(tmp_path / "page.html"), code=2)
    assert "--html applies to a single job, and swept is a sweep" in refused
    assert "--deadline applies to a single job" in craton("plan", file, "--deadline", "3d", code=2)


def test_a_layout_that_one_combination_does_not_fit_is_refused(tmp_path: Path, craton: Command) -> None:
    file = tmp_path / "swept.yaml"
    file.write_text(f"{BASE}sweep: {{layout.tp: [1, 2, 3]}}")
    refused = craton("validate", file, code=2)
    assert "swept.yaml:6: layout needs a multiple of 3 ranks" in refused
    assert refused.rstrip().endswith("(member tp-3)")


def test_both_jobs_are_validated_and_planned(tmp_path: Path, craton: Command) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "next.yaml"
    file.write_text(BASE.replace(BASE.splitlines()[1], "model: {job: base.yaml}"))
    assert craton("validate", file).rstrip().endswith("weights of base")
    table = craton("plan", file)
    assert "base (weights)" in table
    assert "next  FITS" in table
    planned = json.loads(craton("plan", file, "--json"))
    assert [member["role"] for member in planned["members"]] == ["weights"]
    assert planned["step_seconds"] == planned["members"][0]["step_seconds"]


def test_members_that_differ_in_no_planned_key_share_a_plan() -> None:
    plans = plan_members(parse_job(f"{BASE}sweep: {{train.seed: {list(range(200))}}}"))
    assert len(plans) == 200
    assert len({id(item.plan) for item in plans}) == 1
    assert member_plans_json(plans)["gpu_hours"] > 0
