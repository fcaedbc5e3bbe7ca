"""`craton plan --trace`: the traced step beside the plan, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from craton.cli import main

JOB = """\
kind: pretrain
model: {layers: 6, hidden: 512, ffn_hidden: 1024, heads: 8, kv_heads: 4, vocab: 8192}
data: {sequence: 1024}
train: {global_batch_sequences: 64, tokens: 1B}
cluster: p5.48xlarge x 2
layout: {fsdp: 8, tp: 2}
"""


@pytest.fixture
def craton(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*options: str, trace: bool = True) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["craton", "plan", str(job), *(["--trace"] if trace else []), *options])
        with pytest.raises(SystemExit) as caught:
            main()
        output = capfd.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return run


@pytest.mark.slow
def test_json_holds_plan_trace_and_comparison(craton: Any) -> None:
    code, output, errors = craton("--json")
    assert (code, errors) == (0, "")
    document = json.loads(output)
    assert document["step_seconds"] > 0
    assert document["trace"]["world"] == 16
    (rank,) = document["trace"]["ranks"]
    assert {each["dimension"] for each in rank["collectives"]} == {"fsdp", "tp", "all"}
    assert document["comparison"]["agrees"] is True
    assert document["trace"]["findings"] == []


@pytest.mark.slow
def test_the_rank_that_is_asked_for_is_traced(craton: Any) -> None:
    code, output, errors = craton("--json", "--ranks", "8")
    assert (code, errors) == (0, "")
    document = json.loads(output)
    assert [rank["rank"] for rank in document["trace"]["ranks"]] == [8]
    assert [rank["rank"] for rank in document["comparison"]["ranks"]] == [8]


@pytest.mark.parametrize(
    ("ranks", "trace", "message"),
    [
        ("0,first", True, "--ranks '0,first' is not a list of ranks; write e.g. 0,8"),
        ("0,16", True, "--trace: rank 16 does not exist; fsdp 8 · tp 2"),
        ("-1", True, "--trace: rank -1 does not exist; fsdp 8 · tp 2"),
        ("0", False, "--ranks requires --trace, e.g. --trace --ranks 0,8"),
    ],
)
def test_ranks_that_cannot_be_traced(craton: Any, ranks: str, trace: bool, message: str) -> None:
    code, output, errors = craton(f"--ranks={ranks}", trace=trace)
    assert (code, output) == (2, "")
    assert message in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_the_report_shows_both_sides(craton: Any) -> None:
    code, output, errors = craton()
    assert (code, errors) == (0, "")
    report = output[output.index("Trace") :]
    for text in ("agrees with the plan", "rank 0 of 16", "all_gather over tp 2", "planned", "traced", "attention"):
        assert text in report


def test_without_torch_it_says_what_to_install(craton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.extras.find_spec", lambda name: None)
    code, _, errors = craton()
    assert code == 2
    assert "`craton plan --trace`, which runs the real training step, needs torch" in errors
    assert "[train]" in errors
