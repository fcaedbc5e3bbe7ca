"""Plans of strategies: tokens, KV cache, seconds, dollars by hand; the best under a budget; what a file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from craton.job import load_job
from craton.planning import PlanError
from craton.planning.report import strategies_html, strategies_to_json
from craton.planning.serving import plan_serving
from craton.planning.strategies import (
    EndpointPrice,
    MeasuredPrice,
    NoPrice,
    SampleLengths,
    ServerPrice,
    StrategyShape,
    parse_accuracy,
    parse_budget,
    plan_strategies,
    read_record,
    shape_of,
    strategy_usage,
)

LENGTHS = SampleLengths(100.0, 400.0)
SERVER = Path(__file__).parents[2] / "examples" / "serve-llama-8b.yaml"


def write_evaluation(folder: Path, accuracies: Any = None, samples: int = 16, **more: Any) -> Path:
    """Write an evaluation as `craton eval` does, from simulated samples of problems of known accuracy."""
    generator = np.random.default_rng(11)
    accuracies = generator.beta(0.8, 0.8, size=400) if accuracies is None else np.asarray(accuracies)
    right = generator.random((len(accuracies), samples)) < accuracies[:, None]
    lines = [
        {"settings": "a", "problem": row, "samples": [{"is_right": bool(value), "answer": "1"} for value in values]}
        for row, values in enumerate(right)
    ]
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= samples]
    order = [np.array([right[:, :size].any(axis=1)]) for size in sizes]
    passes = {str(size): float(found.mean()) for size, found in zip(sizes, order, strict=True)}
    passes["1"] = float(right.mean())
    plain = {
        "strategy": {"kind": "sample", "temperature": 1.0},
        "settings": "a",
        "n": samples,
        "accuracy": float(right.mean()),
        "num_scored": len(accuracies),
        "pass_at": dict(zip(passes, sorted(passes.values()), strict=True)),
        "majority_at": {},
        "prompt_tokens_mean": 100.0,
        "completion_tokens_mean": 400.0,
        "completion_tokens_per_problem": 400.0 * samples,
        "seconds_per_problem": 2.0,
        "dollars_per_problem": 0.0064,
    }
    document = {"suite": "sums", "model": "tiny", "num_problems": len(accuracies), "strategies": [plain]}
    document["strategies"] += more.get("strategies", [])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (folder / "evaluation.json").write_text(json.dumps(document))
    return folder


def test_tokens_and_kv_cache_of_every_kind_by_hand() -> None:
    usages = {
        "sample": (StrategyShape("sample"), 400, 500),
        "best of 8": (StrategyShape("best_of", 8), 3200, 3300),
        "vote of 8": (StrategyShape("vote", 8), 3200, 3300),
        "tree": (shape_of({"kind": "tree", "n": 32, "step": {"tokens": 50}}), 1600, 1700),
        "beam": (shape_of({"kind": "beam", "n": 2, "width": 4, "depth": 4, "step": {"tokens": 50}}), 1600, 800),
        "budget": (shape_of("budget:500-900"), 500, 600),
        "budget cut": (shape_of("budget:200"), 200, 300),
    }
    for name, (shape, completion, kv_tokens) in usages.items():
        usage = strategy_usage(shape, LENGTHS)
        assert (usage.completion_tokens, usage.kv_tokens) == (completion, kv_tokens), name
        assert usage.tokens == 100 + completion


def test_an_endpoint_charges_the_prompt_of_every_sample() -> None:
    price = EndpointPrice(1.0, 10.0).price(strategy_usage(StrategyShape("best_of", 8), LENGTHS))
    assert price.dollars == pytest.approx((8 * 100 * 1.0 + 8 * 400 * 10.0) / 1e6)


def test_a_server_computes_the_prompt_once_and_costs_its_hours() -> None:
    plan = plan_serving(load_job(SERVER))
    one = ServerPrice(plan).price(strategy_usage(StrategyShape("sample"), LENGTHS))
    many = ServerPrice(plan).price(strategy_usage(StrategyShape("best_of", 64), LENGTHS))
    assert one.dollars
    assert many.dollars
    assert one.problems_per_hour
    assert one.latency_seconds
    assert many.latency_seconds
    assert one.dollars * one.problems_per_hour == pytest.approx(plan.dollars_per_hour)
    assert one.latency_seconds < many.latency_seconds < 2 * one.latency_seconds, "samples share the steps"
    assert 20 * one.dollars < many.dollars < 66 * one.dollars
    assert many.kv_bytes == (100 + 64 * 400) * plan.kv_bytes_per_token
    huge = ServerPrice(plan).price(strategy_usage(StrategyShape("best_of", 1024), SampleLengths(100.0, 30_000.0)))
    assert huge.concurrency is not None
    assert huge.concurrency < 1
    assert huge.dollars is None


def test_predictions_from_fewer_samples_contain_what_more_measured(tmp_path: Path) -> None:
    voted = {
        "strategy": {"kind": "best_of", "n": 32, "score": "exact"},
        "n": 1,
        "accuracy": 0.955,
        "low": 0.93,
        "high": 0.97,
    }
    plan = plan_strategies(read_record(write_evaluation(tmp_path, strategies=[voted])), NoPrice())
    measured = {(row.name, row.n): row for row in plan.rows if row.is_inside is not None}
    assert {n for name, n in measured if name == "best of n"} == {2, 4, 8, 16}
    assert all(row.is_inside for row in measured.values()), {key: row.predicted for key, row in measured.items()}
    assert measured["best of n, exact", 32].ratio == pytest.approx(1.0, abs=0.05)
    assert plan.rows[0].measured is not None
    assert plan.rows[0].shape.kind == "sample"


def test_the_best_strategy_keeps_the_budget_and_no_cheaper_one_is_as_good() -> None:
    record = parse_accuracy("1:0.4,4:0.6,16:0.75")
    price = EndpointPrice(0.0, 10.0)
    for text, limit in (("$0.02", 0.02), ("0.1", 0.1)):
        plan = plan_strategies(record, price, parse_budget(text), lengths=LENGTHS)
        best = plan.best_with_truth
        assert best is not None
        assert best.price.dollars is not None
        assert best.accuracy is not None
        assert best.price.dollars <= limit
        better = [row for row in plan.rows if row.needs_truth and (row.accuracy or 0) > best.accuracy + 0.01]
        assert all((row.price.dollars or 0) > limit for row in better)
        assert better
    front = [row for row in plan.rows if row.is_on_front and row.needs_truth]
    assert [row.accuracy for row in front] == sorted(row.accuracy or 0 for row in front)
    by_tokens = plan_strategies(record, price, parse_budget("1000 tokens"), lengths=LENGTHS)
    assert by_tokens.best_with_truth is not None
    assert by_tokens.best_with_truth.n == 2
    none = plan_strategies(record, price, parse_budget("10 tokens"), lengths=LENGTHS)
    assert none.best is None
    assert none.best_with_truth is None


def test_an_early_stop_costs_less_than_the_full_vote() -> None:
    plan = plan_strategies(parse_accuracy("1:0.7,4:0.85"), EndpointPrice(0.1, 1.0), lengths=LENGTHS)
    rows = {row.name: row for row in plan.rows if row.n == 16}
    full, stopped = rows["full vote"], rows["vote, stop 0.88"]
    assert full.usage
    assert stopped.usage
    assert full.predicted
    assert stopped.predicted
    assert stopped.usage.completion_tokens < 0.6 * full.usage.completion_tokens
    assert stopped.predicted.accuracy == pytest.approx(full.predicted.accuracy, abs=0.01)


def test_a_file_gives_counts_lengths_and_prices(tmp_path: Path) -> None:
    record = read_record(write_evaluation(tmp_path, [0.0] * 30 + [1.0] * 20, samples=4))
    assert record.known.counts == {(0, 4): 30, (4, 4): 20}
    assert record.lengths == SampleLengths(100.0, 400.0)
    assert record.dollars_per_token == pytest.approx(0.0064 / 1600)
    price = MeasuredPrice(record.seconds_per_token, record.dollars_per_token)
    assert price.price(strategy_usage(StrategyShape("sample"), LENGTHS)).dollars == pytest.approx(0.0016)
    (tmp_path / "problems.jsonl").write_text("")
    assert read_record(tmp_path / "evaluation.json").known.counts == {}


def test_a_yaml_file_of_accuracies(tmp_path: Path) -> None:
    file = tmp_path / "known.yaml"
    file.write_text(
        "pass_at: {1: 0.3, 8: 0.6}\nmajority_at: {8: 0.45}\nproblems: 1991\nsamples: 64\ncompletion_tokens: 300\n"
    )
    record = read_record(file)
    assert record.known.num_problems == 1991
    assert record.known.majority_at == {8: 0.45}
    assert record.lengths == SampleLengths(0.0, 300.0)


BAD_FILES = {
    "{}": "pass_at is missing",
    "pass_at: {1: 1.4}": "1.4 at 1 is not a share",
    "pass_at: {0: 0.4}": "0 is not a whole number of 1 or more",
    "pass_at: {1: 0.6, 4: 0.5}": "pass_at falls with more samples",
    "pass_at: 0.5": "is not a mapping",
    "pass_att: {1: 0.5}": "did you mean 'pass_at'",
    "pass_at: {1: 0.5}\nproblems: 1": "is not a whole number of 2 or more",
    "- 1": "holds no mapping",
    "a: [": "neither JSON nor YAML",
    "strategies: [{strategy: {kind: vote, n: 4}, n: 1, accuracy: 0.5}]": "holds no plain samples",
    "strategies: [{accuracy: 0.5}]": "is not an evaluation.json of this version",
    "num_problems: 0\nstrategies: [{accuracy: 0.5, n: 4, strategy: {kind: sample}}]": "is not an evaluation.json",
    "num_problems: 9\nstrategies: [{accuracy: 0.5, n: -4, strategy: {kind: sample}}]": "is not an evaluation.json",
    "strategies: 3": "is not an evaluation.json of this version",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(PlanError) as caught:
        read_record(file)
    assert BAD_FILES[content] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("$0.01", "$0.01 per problem"),
        ("2", "$2.00 per problem"),
        ("20k tokens", "20k tokens per problem"),
        ("90s", "1m 30s per problem"),
    ],
)
def test_budgets(text: str, shown: str) -> None:
    assert str(parse_budget(text)) == shown


@pytest.mark.parametrize("text", ["much", "$", "-1", "0", "tokens", "0 tokens", "5 parsecs", "nan", "$1e999"])
def test_a_bad_budget_is_one_clear_line(text: str) -> None:
    with pytest.raises(PlanError, match="is not an amount per problem"):
        parse_budget(text)


def test_the_report_and_the_json_hold_every_row(tmp_path: Path) -> None:
    plan = plan_strategies(
        read_record(write_evaluation(tmp_path / "<b>", samples=4)),
        EndpointPrice(1.0, 2.0),
        shapes=[shape_of("vote:8"), shape_of("tree:32")],
    )
    page = strategies_html(plan)
    document = json.loads(json.dumps(strategies_to_json(plan), allow_nan=False))
    assert len(document["rows"]) == len(plan.rows)
    assert document["rows"][0]["accuracy"] == plan.rows[0].accuracy
    assert document["best"]["name"] in ("vote, stop 0.88", "one sample", "full vote")
    for row in plan.rows:
        assert row.name in page
    assert "plot-dollars" in page
    assert "plot-tokens" in page


@pytest.mark.parametrize(("strategy", "is_told"), [("best_of:4:judge", True), ("best_of:4", False)])
def test_what_scores_the_samples_comes_on_top(strategy: str, is_told: bool) -> None:
    shapes = [shape_of(strategy)]
    plan = plan_strategies(parse_accuracy("1:0.4,4:0.6"), EndpointPrice(0.0, 10.0), None, shapes, lengths=LENGTHS)
    assert any("a judge or reward model comes on top" in note for note in plan.notes) == is_told
