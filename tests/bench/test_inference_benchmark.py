"""Predictions of served models on published rows: holdouts, foreign rows, hostile rows."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from craton.bench import bench_inference, inference_json, is_inference_file, median_error
from craton.planning.calibration import CaseFileError
from craton.planning.fitting import Prediction
from craton.planning.serving.engine_fitting import (
    load_serving_cases,
    predict_served,
    read_serving_rows,
    serving_corpus,
    serving_corpus_fit,
)

CORPUS = Path(__file__).parents[2] / "data" / "inference_results.json"
ROWS = {row["id"]: row for row in json.loads(CORPUS.read_text(encoding="utf-8"))["cases"]}


def known_row(metric: str = "output_tokens_per_s_per_gpu") -> dict[str, Any]:
    return next(json.loads(json.dumps(row)) for row in ROWS.values() if metric in row["metrics"])


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"cases": list(rows)}), encoding="utf-8")
    return path


def test_every_row_is_a_case_or_is_skipped_with_a_reason() -> None:
    cases, skipped = load_serving_cases(CORPUS)
    assert {case.id for case in cases} | {entry.id for entry in skipped} == set(ROWS)
    assert not {case.id for case in cases} & {entry.id for entry in skipped}
    consistent = [entry for entry in skipped if "contradicts itself" not in entry.reason]
    contradictory = len(skipped) - len(consistent)
    assert len(consistent) <= 0.1 * (len(ROWS) - contradictory)
    assert all(entry.reason for entry in skipped)


def test_rows_outside_the_shipped_file_are_not_fitted(tmp_path: Path) -> None:
    row = known_row()
    honest = bench_inference(write(tmp_path, {**row, "id": "mine"})).results[0]
    tripled = {**row, "id": "mine", "metrics": {key: 3.0 * value for key, value in row["metrics"].items()}}
    wrong = bench_inference(write(tmp_path, tripled)).results[0]
    assert wrong.predicted == honest.predicted
    assert wrong.case.measured == pytest.approx(3.0 * honest.case.measured)


def test_a_held_out_row_is_predicted_without_its_own_measurement(tmp_path: Path) -> None:
    """The same id with another measurement gives the same prediction: its group is not in the fit."""
    row = known_row("tpot_ms")
    before = bench_inference(write(tmp_path, row))
    after = bench_inference(write(tmp_path, {**row, "metrics": {"tpot_ms": 2.0 * row["metrics"]["tpot_ms"]}}))
    held = next(result for result in before.results if result.case.metric == "tpot_seconds")
    assert after.results[0].predicted == pytest.approx(held.predicted)


def test_json_has_a_line_for_each_metric(tmp_path: Path) -> None:
    row = known_row("tpot_ms")
    document = json.loads(json.dumps(inference_json(bench_inference(write(tmp_path, row), "none"))))
    assert {case["metric"] for case in document["cases"]} == {"tpot_seconds", "ttft_seconds"}
    for case in document["cases"]:
        assert case["low"] < case["predicted"] < case["high"]
        assert case["error"] == pytest.approx(case["predicted"] / case["measured"] - 1.0)
    assert document["summary"]["holdout"] == "none"


def test_shipped_rows_in_sample_are_close() -> None:
    """A wrong unit or a broken term moves the median far beyond these bounds."""
    results = bench_inference(CORPUS, "none").results
    assert len(results) >= 780
    assert median_error(results, "tpot_seconds") < 0.10
    assert median_error(results, "tokens_per_second_per_gpu") < 0.10
    assert median_error(results, "ttft_seconds") < 0.30


def test_small_models_of_engines_with_large_ones_in_the_corpus_answer_at_once() -> None:
    """No constant is fitted to these rows: 28 to 52 ms, where one fixed time for all models of an engine says 130."""
    results = bench_inference(CORPUS.with_name("outside_servers.json")).results
    small = [r for r in results if r.case.metric == "ttft_seconds" and r.case.engine in ("sglang", "trtllm")]
    small = [r for r in small if not r.case.shape.is_moe and r.case.load.concurrency == 4.0]
    assert len(small) == 3
    assert all(0.5 < result.predicted / result.case.measured < 2.0 for result in small)
    assert all(result.inside for result in small)
    assert median_error(results, "tpot_seconds") < 0.15


def test_layers_of_linear_attention_are_known() -> None:
    shape = next(case.shape for case in serving_corpus() if case.shape.name == "Qwen3.5-397B-A17B")
    assert shape.linear_layers == shape.sliding_layers == 45


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": None},
        {"hardware": {"gpu": "abacus", "count": 1}},
        {"hardware": {"gpu": "H100 SXM 80GB", "count": -4}},
        {"hardware": {"gpu": "H100 SXM 80GB", "count": 10**30}},
        {"hardware": 7},
        {"model": {"name": "unheard of"}},
        {"model": []},
        {"precision": {"weights": "papyrus"}},
        {"precision": "fp8"},
        {"parallelism": {"tp": 5, "pp": 1, "ep": 1, "attention_dp": 1}},
        {"parallelism": {"mode": "disagg"}},
        {"parallelism": {"tp": True}},
        {"workload": {}},
        {"workload": {"isl": float("nan"), "osl": 1, "concurrency": 1}},
        {"workload": {"isl": "many", "osl": 10, "concurrency": 1}},
        {"workload": {"isl": 1000, "osl": 10, "concurrency": -1}},
        {"workload": {"isl": 1e300, "osl": 10, "concurrency": 1}},
        {"workload": {"isl": 1000, "osl": 1e300, "concurrency": 1}},
        {"workload": {"isl": 1e-300, "osl": 10, "concurrency": 1}},
        {"workload": {"isl": 1000, "osl": 10, "concurrency": 1e300}},
        {"metrics": {}},
        {"metrics": {"output_tokens_per_s_per_gpu": 0}},
        {"metrics": {"output_tokens_per_s_per_gpu": "fast"}},
        {"metrics": {"tpot_ms": math.inf}},
        {"metrics": []},
        {"source": "hearsay"},
        {"engine": 3},
    ],
)
def test_hostile_rows_are_skipped(tmp_path: Path, change: dict[str, Any]) -> None:
    cases, skipped = load_serving_cases(write(tmp_path, {**known_row(), **change}))
    assert not cases
    assert len(skipped) == 1
    assert skipped[0].reason


def test_a_prediction_that_is_no_number_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inference = "craton.bench.inference"
    monkeypatch.setattr(f"{inference}.serving_corpus_fit", lambda: None)
    monkeypatch.setattr(f"{inference}.predict_served", lambda _, cases: [Prediction(math.nan, 0.1) for _ in cases])
    bench = bench_inference(write(tmp_path, {**known_row(), "id": "mine"}), "none")
    assert not bench.results
    assert {entry.id for entry in bench.skipped} == {"mine"}
    assert "is not a finite number" in bench.skipped[0].reason


def test_mutated_rows_are_cases_with_a_prediction_or_are_skipped() -> None:
    """Random fields of random rows take values of other types and sizes; a fixed seed."""
    values: list[Any] = [None, 0, -1, 3, 7, 1e9, 1e-9, 1e30, math.nan, math.inf, "", "8", True, [], {}, [1, 2], 2**70]
    values += ["fp4", "closed loop", "decode only", "prefill only", "max throughput", {"a": 1}]
    chooser = random.Random(0)
    rows = list(ROWS.values())
    mutated = []
    for _ in range(200):
        row = json.loads(json.dumps(chooser.choice(rows)))
        for _ in range(chooser.randint(1, 3)):
            place, key = row, chooser.choice(list(row))
            while isinstance(place[key], dict) and place[key] and chooser.random() < 0.85:
                place = place[key]
                key = chooser.choice(list(place))
            place[key] = chooser.choice(values)
        mutated.append(row)
    cases, skipped = read_serving_rows(mutated)
    assert len(skipped) > 20
    predictions = predict_served(serving_corpus_fit(), cases)
    assert len(cases) > 100
    assert all(0.0 < prediction.low < prediction.seconds < prediction.high for prediction in predictions)


def test_rows_that_are_not_objects_are_skipped(tmp_path: Path) -> None:
    cases, skipped = load_serving_cases(write(tmp_path, known_row(), 7, None, "row", []))
    assert len(cases) == 1
    assert len(skipped) == 4


def test_a_file_has_training_or_inference_rows(tmp_path: Path) -> None:
    assert is_inference_file(CORPUS)
    assert not is_inference_file(CORPUS.with_name("training_results.json"))
    assert is_inference_file(write(tmp_path, known_row(), None, 7, {})), "malformed rows do not decide"
    with pytest.raises(CaseFileError, match="one file for each"):
        is_inference_file(write(tmp_path, known_row(), {"id": "run", "framework": "NeMo", "seq_len": 4096}))


def test_a_prefill_pool_counts_its_first_tokens() -> None:
    row = next(row for row in ROWS.values() if "input_tokens_per_s_per_gpu" in row["metrics"])
    case = next(case for case in serving_corpus() if case.id == row["id"])
    assert case.measured == pytest.approx(row["metrics"]["input_tokens_per_s_per_gpu"] / row["workload"]["isl"])
