"""The benchmark of the planner: what it leaves out, what it counts, and that it is still as accurate as we say.

The whole leave-one-group-out table takes about a minute and is marked `slow`: `pytest -m slow`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from craton.bench import bench_json, bench_plan, summary
from craton.bench import planner as bench
from craton.bench.planner import GIVEN_SEEDS, Bench, CaseResult, decisions, family_median, statistics
from craton.job.layout import Layout
from craton.planning.calibration import Case, corpus, row_of
from craton.planning.calibration.published_rows import corpus_path
from craton.planning.fitting import Composition, Fit, FitRow, Prediction
from craton.planning.step import TRAINING_STEP, StepTerms

ROWS: list[dict[str, Any]] = json.loads(Path(corpus_path()).read_text(encoding="utf-8"))["cases"]
BY_ID = {row["id"]: row for row in ROWS}
SMALL_FAMILIES = ("torchtitan", "nanotron", "kempnerforge", "fms-fsdp")

WriteCases = Callable[..., Path]


@pytest.fixture
def write_cases(tmp_path: Path) -> WriteCases:
    def write(*rows: dict[str, Any]) -> Path:
        path = tmp_path / "cases.json"
        path.write_text(json.dumps({"cases": rows}))
        return path

    return write


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> tuple[Case, ...]:
    """Fits of four small families take milliseconds."""
    cases = tuple(case for case in corpus() if case.family in SMALL_FAMILIES)
    use_corpus(monkeypatch, cases)
    return cases


def use_corpus(monkeypatch: pytest.MonkeyPatch, cases: tuple[Case, ...]) -> None:
    monkeypatch.setattr(bench, "corpus", lambda: cases)
    monkeypatch.setattr(bench, "corpus_fit", cache(lambda: Fit(TRAINING_STEP, [row_of(case) for case in cases])))


def three_groups() -> list[str]:
    """Four rows each of the three largest groups of three families."""
    chosen: list[str] = []
    for family in SMALL_FAMILIES[:3]:
        groups: dict[Hashable, list[str]] = {}
        for case in corpus():
            if case.family == family:
                groups.setdefault(case.group, []).append(case.id)
        chosen += max(groups.values(), key=len)[:4]
    return chosen


# --- what is left out


class Spy:
    """Stands in for a fit and remembers what it was given."""

    def __init__(self, _: Composition[StepTerms], rows: Sequence[FitRow[StepTerms]]) -> None:
        self.rows = {id(row) for row in rows}

    def predict(self, *_: object) -> Prediction:
        return Prediction(1.0, 0.1)


@pytest.fixture
def predictions_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, list[Case]]]:
    """(case, the cases its constants were fitted to) of every prediction, without the fits."""
    by_row = {id(row_of(case)): case for case in corpus()}
    made: list[tuple[Case, list[Case]]] = []
    predict = bench._predict

    def remember(fit: Any, case: Case) -> Prediction:
        made.append((case, [by_row[row] for row in fit.rows]))
        return predict(fit, case)

    monkeypatch.setattr(bench, "Fit", Spy)
    monkeypatch.setattr(bench, "corpus_fit", lambda: Spy(TRAINING_STEP, [row_of(case) for case in corpus()]))
    monkeypatch.setattr(bench, "_predict", remember)
    return made


def test_leaving_a_group_out_leaves_the_group_and_repetitions_out(
    predictions_made: list[tuple[Case, list[Case]]],
) -> None:
    bench_plan(corpus_path(), "group")
    assert {case.id for case, _ in predictions_made} == {case.id for case in corpus()}
    for case, fitted in predictions_made:
        assert case.group not in {other.group for other in fitted}
        assert case.dup_group not in {other.dup_group for other in fitted}
        assert len(fitted) > 300  # and little else


SHARED: dict[str, Callable[[Case], Hashable]] = {
    "family": lambda case: case.family,
    "model": lambda case: replace(case.shape, name="", source="", vocab=1, head_dim=1, layers=1, tied_embeddings=True),
    "gpu": lambda case: case.machine.gpu,
    "release": lambda case: (case.family, case.release),
}


@pytest.mark.parametrize("holdout", SHARED)
def test_a_wider_holdout_leaves_out_all_that_share_its_key(
    predictions_made: list[tuple[Case, list[Case]]], holdout: Any
) -> None:
    bench_plan(corpus_path(), holdout)
    assert {case.id for case, _ in predictions_made} == {case.id for case in corpus()}
    for case, fitted in predictions_made:
        assert SHARED[holdout](case) not in {SHARED[holdout](other) for other in fitted}
        assert case.dup_group not in {other.dup_group for other in fitted}
        assert len(fitted) > 200


def test_a_wider_holdout_also_holds_for_runs_outside_the_corpus(
    predictions_made: list[tuple[Case, list[Case]]], write_cases: WriteCases
) -> None:
    known = BY_ID[three_groups()[0]]
    bench_plan(write_cases({**known, "id": "mine", "dup_group": "mine"}), "gpu")
    ((case, fitted),) = predictions_made
    assert case.machine.gpu not in {other.machine.gpu for other in fitted}


def test_a_run_that_was_handed_over_does_not_reach_its_own_prediction(
    small_corpus: tuple[Case, ...], write_cases: WriteCases
) -> None:
    """In draws that hand it to `calibrate` it is not predicted; in the others it is unknown."""
    names = [case.id for case in small_corpus if case.family == "nanotron"][:9]
    moved = names[3]
    predictions: list[dict[str, list[float]]] = []
    for factor in (1.0, 2.0):
        rows = [copy.deepcopy(BY_ID[name]) for name in names]
        row = next(row for row in rows if row["id"] == moved)
        seconds = next(case for case in small_corpus if case.id == moved).measured_step_seconds
        row["measured"], row["derived"] = {"step_time_s": factor * seconds}, {}
        found: dict[str, list[float]] = {name: [] for name in names}
        for entry in bench_plan(write_cases(*rows), "family", handed_runs=5).results:
            found[entry.case.id].append(entry.prediction.seconds)
        predictions.append(found)
    before, after = predictions
    assert before[moved] == after[moved]
    assert before != after
    assert all(len(found) <= len(GIVEN_SEEDS) for found in before.values())


def test_no_case_is_dropped_silently_when_rows_are_handed_over(
    small_corpus: tuple[Case, ...], write_cases: WriteCases
) -> None:
    """Too few runs of a family to hand any over: skipped with that reason, not forgotten."""
    names = [case.id for case in small_corpus if case.family == "nanotron"][:9]
    names += [case.id for case in small_corpus if case.family == "fms-fsdp"]
    result = bench_plan(write_cases(*(BY_ID[name] for name in names)), "family", handed_runs=5)
    named = {entry.case.id for entry in result.results} | {entry.id for entry in result.skipped}
    assert named == set(names)


def test_the_time_of_a_held_out_group_does_not_reach_its_own_prediction(
    small_corpus: tuple[Case, ...], write_cases: WriteCases, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = three_groups()
    held_out = next(case for case in small_corpus if case.id == names[0]).group
    path = write_cases(*(BY_ID[name] for name in names))
    before = {entry.case.id: entry.prediction for entry in bench_plan(path).results}
    doubled = tuple(
        replace(case, measured_step_seconds=2 * case.measured_step_seconds) if case.group == held_out else case
        for case in small_corpus
    )
    use_corpus(monkeypatch, doubled)
    after = {entry.case.id: entry.prediction for entry in bench_plan(path).results}
    assert [before[name] for name in names[:4]] == [after[name] for name in names[:4]]
    assert all(before[name] != after[name] for name in names[4:])


def test_repetitions_in_another_group_do_not_reach_a_prediction(
    small_corpus: tuple[Case, ...], write_cases: WriteCases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run published twice under two model names: neither copy may teach the other."""
    first = next(case for case in small_corpus if case.id == three_groups()[0])
    for factor in (1.0, 2.0):
        twin = replace(
            first,
            id="twin",
            shape=replace(first.shape, name="another name"),
            measured_step_seconds=factor * first.measured_step_seconds,
        )
        use_corpus(monkeypatch, (*small_corpus, twin))
        result = bench_plan(write_cases(BY_ID[first.id])).results[0].prediction
        if factor == 1.0:
            expected = result
    assert result == expected


def test_a_run_that_the_corpus_does_not_hold_is_predicted_with_all_of_it(
    predictions_made: list[tuple[Case, list[Case]]], write_cases: WriteCases
) -> None:
    known = BY_ID[three_groups()[0]]
    bench_plan(write_cases({**known, "id": "mine", "dup_group": "mine", "global_batch": 2 * known["global_batch"]}))
    ((case, fitted),) = predictions_made
    assert case.id == "mine"
    assert len(fitted) == len(corpus())


def test_a_repetition_of_a_published_run_is_predicted_without_that_run(
    predictions_made: list[tuple[Case, list[Case]]], write_cases: WriteCases
) -> None:
    known = BY_ID[three_groups()[0]]
    bench_plan(write_cases({**known, "id": "mine"}))
    ((_, fitted),) = predictions_made
    assert known["id"] not in {case.id for case in fitted}


def test_two_runs_with_one_name_are_two_runs(small_corpus: tuple[Case, ...], write_cases: WriteCases) -> None:
    known = BY_ID[three_groups()[0]]
    twice = {**known, "global_batch": 2 * known["global_batch"]}
    one, other = bench_plan(write_cases(known, twice)).results
    assert other.prediction.seconds > 1.5 * one.prediction.seconds


# --- what is printed


def test_json_has_the_promised_keys(small_corpus: tuple[Case, ...], write_cases: WriteCases) -> None:
    unknown = copy.deepcopy(BY_ID[three_groups()[0]])
    unknown["id"] = "on a TPU"
    unknown["hardware"]["gpu"] = "TPU v5p"
    names = three_groups()
    document = json.loads(json.dumps(bench_json(bench_plan(write_cases(*(BY_ID[name] for name in names), unknown)))))
    assert set(document) == {"cases", "skipped", "summary"}
    assert [case["id"] for case in document["cases"]] == names
    for case in document["cases"]:
        assert set(case) == {"id", "measured_step_seconds", "predicted_step_seconds", "low", "high", "error"}
        assert case["low"] < case["predicted_step_seconds"] < case["high"]
        assert case["error"] == pytest.approx(case["predicted_step_seconds"] / case["measured_step_seconds"] - 1)
    assert document["skipped"] == [{"id": "on a TPU", "reason": "GPU TPU v5p is not in the catalog"}]
    assert document["summary"]["all"]["n"] == 12
    assert set(document["summary"]["by"]) >= {"family", "hardware", "kind", "precision", "quality"}
    for view in document["summary"]["by"].values():
        assert sum(entry["n"] for entry in view.values()) == 12
        for entry in view.values():
            assert set(entry) == {"n", "median", "mean", "p90", "bias", "inside", "width"}


def test_a_small_file_is_quick_and_the_fits_use_the_shipped_runs(write_cases: WriteCases) -> None:
    result = bench_plan(write_cases(*(BY_ID[name] for name in three_groups())))
    assert [entry.case.id for entry in result.results] == three_groups()
    table = statistics(result.results)
    assert table is not None
    assert table.median < 0.25


def made_up(seconds: float, predicted: float, **changes: Any) -> CaseResult:
    case = replace(next(iter(corpus())), measured_step_seconds=seconds, **changes)
    return CaseResult(case, Prediction(predicted, 0.1))


def test_statistics_by_hand() -> None:
    table = statistics([made_up(10, 11), made_up(10, 8), made_up(10, 10), made_up(10, 14)])
    assert table is not None
    assert table.n == 4
    assert (table.median, table.mean) == pytest.approx((0.15, 0.175))
    assert table.bias == pytest.approx((0.1 - 0.2 + 0.0 + 0.4) / 4)
    assert table.p90 == pytest.approx(0.34)
    assert table.inside == 0.5  # 80% intervals reach a factor of 1.137
    assert table.width == pytest.approx(math.exp(2 * 1.2816 * 0.1))
    assert statistics([]) is None


def test_no_large_family_hides_a_small_one() -> None:
    large = [made_up(10, 10, family="large")] * 100
    small = [made_up(10, 15, family="small")]
    assert family_median([*large, *small]) == pytest.approx(0.25)
    assert family_median([]) is None


def test_a_decision_is_scored_by_the_measured_time_of_the_choice() -> None:
    layouts = [Layout(fsdp=256), Layout(fsdp=128, tp=2), Layout(fsdp=64, tp=4)]
    measured, predicted = (10.0, 12.0, 11.0), (9.0, 8.0, 10.0)
    results = [made_up(*pair, layout=layout) for *pair, layout in zip(measured, predicted, layouts, strict=True)]
    (choice,) = decisions(results)
    assert choice.layouts == 3
    assert choice.loss == pytest.approx(0.2)  # the planner takes the second, which measured 20% over the best
    assert decisions(results[:2]) == []
    assert decisions([results[0]] * 3) == []


def test_decisions_compare_seconds_a_token() -> None:
    layouts = [Layout(fsdp=256), Layout(fsdp=128, tp=2), Layout(fsdp=64, tp=4)]
    batch = corpus()[0].global_batch_sequences
    results = [
        made_up(10.0 * factor, 9.0 * factor * slower, layout=layout, global_batch_sequences=batch * factor)
        for factor, slower, layout in zip((4, 2, 1), (1.0, 1.1, 1.2), layouts, strict=True)
    ]
    (choice,) = decisions(results)
    assert choice.loss == pytest.approx(0.0)


def test_a_run_without_a_quality_is_not_counted_as_a_or_b() -> None:
    moe = next(case for case in corpus() if case.shape.is_moe)
    results = [CaseResult(replace(moe, quality=quality), Prediction(1.0, 0.1)) for quality in ("A", "B", "C", "")]
    counted = summary(Bench(results, [], "group", 0))["moe quality A and B"]
    assert counted["n"] == 2


def test_progress_counts_left_out_groups(small_corpus: tuple[Case, ...], write_cases: WriteCases) -> None:
    calls: list[tuple[int, int]] = []
    path = write_cases(*(BY_ID[name] for name in three_groups()))
    bench_plan(path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


# --- the bars of the project


@pytest.fixture(scope="module")
def strangers() -> dict[str, Any]:
    """Every published run, predicted without its publisher."""
    return summary(bench_plan(corpus_path(), "family"))


@pytest.mark.slow
def test_a_strangers_cluster_is_predicted_within_18_percent(strangers: dict[str, Any]) -> None:
    assert strangers["all"]["n"] == 479
    assert strangers["all"]["median"] <= 0.18
    assert strangers["dense quality A"]["median"] <= 0.13


@pytest.mark.slow
def test_80_percent_intervals_hold_72_to_92_percent_of_strangers(strangers: dict[str, Any]) -> None:
    assert 0.72 <= strangers["all"]["inside"] <= 0.92


@pytest.mark.slow
def test_what_is_known_narrows_the_interval(strangers: dict[str, Any], write_cases: WriteCases) -> None:
    known = statistics(bench_plan(write_cases(*(BY_ID[name] for name in three_groups())), "none").results)
    assert known is not None
    assert known.width < strangers["all"]["width"]
    assert known.median < strangers["all"]["median"]


@pytest.mark.slow
def test_at_most_5_percent_of_good_rows_are_skipped(strangers: dict[str, Any]) -> None:
    assert strangers["skipped share of quality A and B"] <= 0.05


@pytest.mark.slow
def test_the_bars_with_one_group_left_out() -> None:
    result = summary(bench_plan(corpus_path(), "group"))
    assert result["dense quality A"]["median"] <= 0.07
    assert result["dense quality A"]["p90"] <= 0.20
    assert result["dense quality A, median of family medians"] <= 0.09
    assert result["moe quality A and B"]["median"] <= 0.15
    assert result["256 GPUs or more"]["median"] <= 0.10
    assert result["decisions"]["share"] >= 0.80
    assert result["decisions"]["groups"] >= 10
    assert 0.72 <= result["all"]["inside"] <= 0.92
    assert result["all"]["width"] <= 1.6


@pytest.mark.slow
def test_five_rows_of_a_stranger_bring_the_error_under_10_percent() -> None:
    result = summary(bench_plan(corpus_path(), "family", handed_runs=5))
    assert result["all"]["median"] <= 0.10
    assert 0.72 <= result["all"]["inside"] <= 0.92
