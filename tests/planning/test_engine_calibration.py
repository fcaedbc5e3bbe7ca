"""`craton calibrate` with measurements of a server: files of `craton bench serve --json` beside its job file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from craton.cli.app import app
from craton.infrastructure.catalog import gpu
from craton.job import parse_job
from craton.planning.serving.engine_fitting import (
    EngineCalibration,
    EngineCalibrationError,
    calibrate_engine,
    is_server_file,
    load_server_measurements,
    own_serving_cases,
    read_serving_rows,
    serving_corpus_path,
)
from craton.planning.serving.profile import find_engine_profile, load_engine_profile, save_engine_profile
from craton.planning.serving.search import plan_load

JOB = """
name: server
kind: serve
model: llama-3.1-8b
cluster: p5en.48xlarge x 1
layout: {tp: 1}
"""
# Concurrency, mean TPOT and output tokens/s of a server that is slower than the shipped profile of vllm.
LOADS = ((1, 0.0072, 137.0), (8, 0.0084, 930.0), (32, 0.0112, 2700.0), (128, 0.0235, 5100.0))


def level(concurrency: int, tpot: float, rate: float, trouble: str = "") -> dict[str, Any]:
    return {
        "load": f"closed, {concurrency}",
        "requests_per_second": None,
        "concurrency": concurrency,
        "trouble": trouble,
        "client_busy": 0.1,
        "summary": {
            "requests": 200,
            "answered": 200,
            "prompt_tokens": 200 * 1000,
            "output_tokens": 200 * 500,
            "output_tokens_per_second": rate,
            "ttft_seconds": {"mean": 0.08, "p50": 0.07, "p95": 0.1, "p99": 0.2},
            "tpot_seconds": {"mean": tpot, "p50": tpot, "p95": tpot, "p99": tpot},
        },
    }


CORPUS = json.loads(serving_corpus_path().read_text(encoding="utf-8"))["cases"]
SGLANG_ROW = next(row for row in CORPUS if row["engine"].get("name") == "sglang" and read_serving_rows([row])[0])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "serve.yaml").write_text(JOB, encoding="utf-8")
    (tmp_path / "bench.json").write_text(json.dumps({"levels": [level(*load) for load in LOADS]}), encoding="utf-8")
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [{"job": "serve.yaml", "bench": "bench.json"}]}), encoding="utf-8")
    return path


def test_a_calibrated_profile_predicts_the_server(runs: Path) -> None:
    cases = load_server_measurements(runs, "vllm")
    assert len(cases) == 3 * len(LOADS)
    result = calibrate_engine(find_engine_profile("vllm", cases[0].machine.gpu), cases)
    before, after = (
        sorted(
            abs(value / case.measured - 1.0)
            for case, value in zip(cases, values, strict=True)
            if case.metric != "ttft_seconds"
        )
        for values in (result.before, result.after)
    )
    assert after[len(after) // 2] < 0.05 < before[len(before) // 2]
    assert result.profile.deviations[0] < find_engine_profile("vllm", cases[0].machine.gpu).deviations[0] * 0.6


def test_the_command_writes_a_profile_that_can_be_loaded(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    answer = CliRunner().invoke(app, ["calibrate", str(runs), "--software", "vllm", "--out", str(out), "--json"])
    assert answer.exit_code == 0, answer.output
    assert len(json.loads(answer.output)["measurements"]) == 3 * len(LOADS)
    assert load_engine_profile(out).gpu == "H200-SXM"
    assert load_engine_profile(out).engine == "vllm"


def test_a_profile_of_another_engine_plans_with_its_keys(tmp_path: Path) -> None:
    profile = replace(find_engine_profile("sglang", gpu("H200-SXM")), source="3 measurements")
    save_engine_profile(profile, tmp_path / "profile.json")
    keys = "software: profile.json\nlayout: {tp: 8, ep: 8}\n"
    serve = "serve: {precision: fp8_block, replicas: 2, load: {rate: 2, input: 1024, output: 256}}\n"
    text = "kind: serve\nmodel: deepseek-v3\ncluster: p5en.48xlarge x 2\n"
    plan = plan_load(parse_job(text + keys + serve, folder=tmp_path))
    assert (plan.engine, plan.basis, plan.precision) == ("sglang", "3 measurements", "fp8_block")
    assert str(plan.chosen.layout) == "tp 8 · ep 8 · replicas 2"
    assert plan.warnings == []
    elsewhere = plan_load(parse_job(text.replace("p5en", "p6-b200") + keys + serve, folder=tmp_path))
    said = "profile.json was fitted to measurements on H200-SXM; its interval is not that of B200"
    assert elsewhere.warnings == [said]


def test_overloaded_levels_of_a_sweep_do_not_count(runs: Path, tmp_path: Path) -> None:
    bench = {"levels": [level(*LOADS[0]), level(*LOADS[1], trouble="backlog")]}
    (tmp_path / "bench.json").write_text(json.dumps(bench), encoding="utf-8")
    assert len(load_server_measurements(runs, "vllm")) == 3


def test_training_runs_are_not_measurements_of_a_server(tmp_path: Path, runs: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([{"job": "train.yaml", "step_seconds": 1.0}]), encoding="utf-8")
    assert not is_server_file(path)
    assert is_server_file(runs)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bench": "bench.json"}, "key job is missing"),
        ({"job": "serve.yaml", "bench": "missing.json"}, "cannot be read as JSON"),
        ({"job": "serve.yaml", "bench": {}}, "no levels"),
        ({"job": "serve.yaml", "bench": {"levels": [{"load": "closed"}]}}, "bench level 1: KeyError"),
        ({"job": "serve.yaml", "bench": {"levels": [level(1, 0.01, 1.0, "backlog")]}}, "no level"),
        ({"job": "serve.yaml", "bench": "bench.json", "gpu": "H100"}, "key 'gpu' is not known"),
        (SGLANG_ROW, r"run 1 is of sglang, and the profile to start from \(--software\) is of vllm; use one file"),
    ],
)
def test_a_wrong_entry_is_named(runs: Path, entry: dict[str, Any], message: str) -> None:
    runs.write_text(json.dumps([entry]), encoding="utf-8")
    with pytest.raises(EngineCalibrationError, match=message):
        load_server_measurements(runs, "vllm")


def test_too_few_measurements_are_refused(runs: Path) -> None:
    cases = load_server_measurements(runs, "vllm")
    with pytest.raises(EngineCalibrationError, match="at least 3"):
        calibrate_engine(find_engine_profile("vllm", cases[0].machine.gpu), cases[:2])


def test_measurements_that_cannot_be_are_refused_or_named(runs: Path) -> None:
    cases = load_server_measurements(runs, "vllm")
    start = find_engine_profile("vllm", cases[0].machine.gpu)
    tpot = next(case for case in cases if case.metric == "tpot_seconds")
    with pytest.raises(
        EngineCalibrationError, match=r"and again contradict each other: tpot_seconds 0\.0072 and 0\.72 of"
    ):
        calibrate_engine(start, [*cases, replace(tpot, id="again", measured=0.72)])
    others = [case for case in cases if case is not tpot]
    with pytest.raises(EngineCalibrationError, match=r"tpot_seconds 1e\+06 is not credible: vllm predicts 0\.0"):
        calibrate_engine(start, [*others, replace(tpot, measured=1e6)])
    measured = [case.measured for case in cases]
    after = [value * (0.3 if case is tpot else 1.9) for case, value in zip(cases, measured, strict=True)]
    warnings = EngineCalibration(start, cases, measured, after).warnings
    assert len(warnings) == 1
    assert "closed, 1: tpot_seconds is 3.3 times too low after the fit; it contradicts the others" in warnings[0]


def test_the_shipped_profile_predicts_our_own_server() -> None:
    """Its loads are in the fit; `benchmarks/own_server_accuracy.py` holds half of them back."""
    cases = own_serving_cases()
    shipped = calibrate_engine(find_engine_profile("craton", cases[0].machine.gpu), cases).before
    errors: dict[str, list[float]] = {}
    for case, value in zip(cases, shipped, strict=True):
        errors.setdefault(case.metric, []).append(abs(value / case.measured - 1.0))
    medians = {metric: median(found) for metric, found in errors.items()}
    assert sum(map(len, errors.values())) >= 25
    assert medians["tpot_seconds"] < 0.05, errors
    assert medians["tokens_per_second_per_gpu"] < 0.08, errors
    assert medians["ttft_seconds"] < 0.25, errors
    assert max(errors["tpot_seconds"]) < 0.15
