"""Summaries of samples made by hand, whose numbers can be checked with a pencil."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from craton.bench.load import parse_objectives
from craton.bench.load.errors import WorkloadError
from craton.bench.load.samples import RequestSample
from craton.bench.load.summary import Failure, summarize, timeline


def sample(due: float, chunks: list[float], **changed: Any) -> RequestSample:
    """Sent 0.1 s after it was due, ended with its last piece."""
    settings = {
        "due_seconds": due,
        "sent_seconds": due + 0.1,
        "end_seconds": chunks[-1] if chunks else due + 1,
        "chunk_seconds": np.array(chunks),
        "prompt_tokens": 100,
        "output_tokens": len(chunks),
        "has_usage": True,
    }
    return RequestSample(**(settings | changed))


def failed(due: float, kind: str, detail: str = "") -> RequestSample:
    return sample(due, [], error=kind, error_detail=detail)


def test_latencies_of_one_request_count_from_when_it_was_due() -> None:
    one = sample(1.0, [1.5, 1.7, 2.1])
    assert one.ttft_seconds == pytest.approx(0.5)
    assert one.e2e_seconds == pytest.approx(1.1)
    assert one.tpot_seconds == pytest.approx(0.3)
    assert one.gap_seconds.tolist() == pytest.approx([0.2, 0.4])
    assert one.late_seconds == pytest.approx(0.1)


def test_a_piece_with_several_tokens_is_one_gap() -> None:
    one = sample(0.0, [1.0, 2.0, 3.0], output_tokens=9)
    assert len(one.gap_seconds) == 2
    assert one.tpot_seconds == pytest.approx(2 / 8)
    assert summarize([one]).tokens_per_chunk == 3


def test_throughput_from_the_first_due_to_the_last_end() -> None:
    found = summarize([sample(1.0, [2.0, 3.0]), sample(2.0, [3.0, 5.0]), failed(2.5, "HTTP 429")])
    assert (found.requests, found.answered, found.failed) == (3, 2, 1)
    assert found.duration_seconds == pytest.approx(4.0)
    assert found.requests_per_second == pytest.approx(2 / 4)
    assert found.output_tokens_per_second == pytest.approx(4 / 4)
    assert found.total_tokens_per_second == pytest.approx(204 / 4)


def test_percentiles_over_requests_and_over_all_gaps() -> None:
    found = summarize([sample(0.0, [float(first), first + 1.0, first + 3.0]) for first in range(1, 102)])
    assert found.ttft_seconds is not None
    assert (found.ttft_seconds.p50, found.ttft_seconds.p95, found.ttft_seconds.p99) == (51, 96, 100)
    assert found.ttft_seconds.mean == pytest.approx(51)
    assert found.itl_seconds is not None
    assert (found.itl_seconds.p50, found.itl_seconds.p95) == (1.5, 2.0)
    assert found.tpot_seconds is not None
    assert found.tpot_seconds.p99 == pytest.approx(1.5)


def test_a_single_token_has_no_gap() -> None:
    found = summarize([sample(0.0, [1.0])])
    assert found.itl_seconds is None
    assert found.tpot_seconds is None
    assert found.ttft_seconds is not None


def test_nothing_answered_and_nothing_at_all() -> None:
    for samples in ([], [failed(0.0, "timeout")]):
        found = summarize(samples, parse_objectives("ttft=1s"))
        assert (found.answered, found.output_tokens_per_second, found.ttft_seconds) == (0, 0.0, None)
        json.dumps(found.to_json(), allow_nan=False)


def test_errors_by_kind_the_most_frequent_first_with_the_first_example() -> None:
    found = summarize([failed(0, "timeout", "a"), failed(1, "HTTP 429", "b"), failed(2, "HTTP 429", "c")])
    assert found.failures == (Failure("HTTP 429", 2, "b"), Failure("timeout", 1, "a"))


def test_cached_tokens_only_when_the_server_says() -> None:
    said, unsaid = sample(0.0, [1.0], cached_tokens=0), sample(0.0, [1.0])
    assert summarize([said, replace(said, cached_tokens=30)]).cached_tokens == 30
    assert summarize([said]).cached_tokens == 0
    assert summarize([unsaid]).cached_tokens is None


def test_one_answer_without_usage_is_said() -> None:
    counted = sample(0.0, [1.0])
    assert summarize([counted]).has_usage
    assert not summarize([counted, replace(counted, has_usage=False)]).has_usage


def test_goodput_counts_who_meets_every_objective() -> None:
    objectives = parse_objectives("ttft=500ms, itl=200ms")
    samples = [
        sample(0.0, [0.5, 0.7]),  # good: at the limits
        sample(0.0, [0.6, 0.7]),  # first token too late
        sample(0.0, [0.3, 0.6]),  # a gap too long
        sample(0.0, [0.4]),  # good: one token has no gaps
        failed(0.0, "timeout"),
    ]
    assert [objectives.met_by(each) for each in samples] == [True, False, False, True, False]
    found = summarize(samples, objectives)
    assert found.good_share == pytest.approx(2 / 5)
    assert found.goodput_requests_per_second == pytest.approx(2 / found.duration_seconds)
    assert summarize(samples).goodput_requests_per_second is None


def test_itl_is_held_against_nearly_all_gaps_of_a_request() -> None:
    """One gap in a hundred does not spoil it; one in ten does."""
    objectives = parse_objectives("itl=50ms")
    rare, often = ([0.2 if index % every == 0 else 0.01 for index in range(1, 101)] for every in (100, 10))
    assert objectives.met_by(sample(0.0, np.cumsum([1.0, *rare]).tolist()))
    assert not objectives.met_by(sample(0.0, np.cumsum([1.0, *often]).tolist()))


def test_the_other_objectives() -> None:
    one = sample(0.0, [1.0, 2.0])
    for name, seconds in (("tpot", 1.0), ("e2e", 2.0)):
        assert parse_objectives(f"{name}={seconds}s").met_by(one)
        assert not parse_objectives(f"{name}={seconds - 0.1}s").met_by(one)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=500", "ttft<5ms", "speed=5s", "ttft=1s,ttft=2s", "ttft=1h"])
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(WorkloadError, match="--slo"):
        parse_objectives(text)


def test_the_timeline_is_exact() -> None:
    """Two requests of 4 s, one 2 s after the other; of 3 and 2 tokens, the last of them two in one piece."""
    samples = [
        sample(0.0, [1.0, 3.0, 4.0], sent_seconds=0.0),
        sample(2.0, [6.0], sent_seconds=2.0, output_tokens=2),
    ]
    course = timeline(samples, bins=6)
    assert course.seconds.tolist() == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert course.running.tolist() == pytest.approx([1, 1, 2, 2, 1, 1])
    assert course.tokens_per_second.tolist() == pytest.approx([0, 1, 0, 1, 1, 2])


def test_the_timeline_keeps_all_tokens_and_running_seconds() -> None:
    generator = np.random.default_rng(0)
    samples = [sample(due, np.sort(due + 0.1 + generator.random(20)).tolist()) for due in generator.random(50) * 10]
    course = timeline(samples)
    width = course.seconds[1] - course.seconds[0]
    assert (course.tokens_per_second * width).sum() == pytest.approx(50 * 20)
    running = sum(each.end_seconds - each.sent_seconds for each in samples)
    assert (course.running * width).sum() == pytest.approx(running)
