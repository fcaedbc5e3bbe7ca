"""Speculative decoding in plans: expected tokens, speed-up, the number of draft tokens, and the acceptance measured."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from craton.job import parse_job
from craton.job.model import model_preset
from craton.planning.report import render_serving, serving_to_json
from craton.planning.serving import (
    AUTO_LENGTHS,
    AcceptanceEstimate,
    ServedModel,
    ServePlan,
    best_draft_length,
    expected_tokens,
    plan_serving,
    roofline_costs,
    speculation_speedup,
)

BIG, SMALL = (ServedModel(model_preset(name)) for name in ("llama-3.1-8b", "llama-3.2-1b"))


def drafted(acceptance: float, length: int, draw: random.Random) -> int:
    """Number of accepted tokens of one draft."""
    accepted = 0
    while accepted < length and draw.random() < acceptance:
        accepted += 1
    return accepted


@pytest.mark.parametrize(("acceptance", "length"), [(0.0, 4), (0.3, 1), (0.7, 3), (0.9, 8), (1.0, 5)])
def test_expected_tokens_are_those_of_a_simulation(acceptance: float, length: int) -> None:
    draw, count = random.Random(4), 20_000
    mean = sum(1 + drafted(acceptance, length, draw) for _ in range(count)) / count
    assert expected_tokens(acceptance, length) == pytest.approx(mean, rel=0.02)


def test_the_speedup_is_the_formula_of_the_paper_where_verifying_is_free() -> None:
    """Theorem 3.8: (1 - α^(γ+1)) / ((1 - α)(γc + 1)), with the cost ratio c."""
    costs = roofline_costs(BIG, SMALL)
    ratio = costs.draft_seconds(1, 0) / costs.plain_seconds(1, 0)
    assert 0.1 < ratio < 0.2
    for acceptance in (0.5, 0.8):
        for length in AUTO_LENGTHS:
            paper = (1 - acceptance ** (length + 1)) / ((1 - acceptance) * (length * ratio + 1))
            assert speculation_speedup(acceptance, length, costs, 1, 0) == pytest.approx(paper, rel=0.02)


def test_more_acceptance_asks_for_more_draft_tokens_and_too_little_for_none() -> None:
    costs = roofline_costs(BIG, SMALL)
    lengths = [best_draft_length(acceptance / 20, costs, 1, 512) for acceptance in range(20)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == max(AUTO_LENGTHS)
    assert best_draft_length(0.9, roofline_costs(BIG, BIG), 1, 512) == 0, "a draft model as slow as the model"


def test_a_compute_bound_batch_is_not_worth_drafts() -> None:
    few, many = (best_draft_length(0.8, roofline_costs(BIG, SMALL), batch, 64) for batch in (1, 2048))
    assert few >= 3
    assert many == 0


def test_acceptance_is_estimated_from_drafts_that_end_early() -> None:
    draw, estimate = random.Random(1), AcceptanceEstimate()
    for acceptance in (0.85, 0.4):
        for _ in range(3000):
            estimate.record(drafted(acceptance, 4, draw), 4)
        assert estimate.value == pytest.approx(acceptance, abs=0.05)


def planned(speculate: str, acceptance: float = 0.7) -> ServePlan:
    text = "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n"
    job = parse_job(f"{text}serve: {{initialize: random, speculate: {speculate}}}\n")
    return plan_serving(job, acceptance=acceptance)


def test_a_plan_of_a_server_has_its_drafts() -> None:
    auto = planned("{model: llama-3.2-1b}")
    drafts = auto.speculation
    assert drafts is not None
    assert (drafts.model, drafts.is_auto, drafts.acceptance) == ("llama-3.2-1b", True, 0.7)
    assert drafts.draft_tokens in AUTO_LENGTHS
    assert 1.0 < drafts.speedup_low < drafts.speedup < drafts.speedup_high
    assert drafts.single_tokens_per_second == pytest.approx(drafts.speedup * auto.single_tokens_per_second, rel=0.01)
    fixed, plain = planned("{model: llama-3.2-1b, tokens: 8}"), planned("{ngram: 4}")
    assert fixed.speculation is not None
    assert fixed.speculation.draft_tokens == 8
    assert fixed.speculation.speedup < drafts.speedup
    assert plain.speculation is None
    assert sum(auto.memory_parts.values()) == pytest.approx(auto.memory_bytes)
    kv_bytes = BIG.kv_bytes_per_token + SMALL.kv_bytes_per_token
    taken = auto.kv_tokens * kv_bytes + SMALL.weight_bytes
    assert taken == pytest.approx(plain.kv_tokens * BIG.kv_bytes_per_token, rel=0.001)
    assert serving_to_json(auto)["speculation"]["draft_tokens"] == drafts.draft_tokens
    assert planned("{model: llama-3.2-1b}", acceptance=0.05).speculation.draft_tokens == 0  # type: ignore[union-attr]


def test_the_report_names_length_acceptance_and_speedup() -> None:
    console = Console(width=80, file=io.StringIO())
    render_serving(planned("{model: llama-3.2-1b}"), console)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "llama-3.2-1b, 2 draft tokens per step (auto): one request" in text
    assert "acceptance 70% assumed (50% to 90%)" in text
    assert "draft model 2" in text
