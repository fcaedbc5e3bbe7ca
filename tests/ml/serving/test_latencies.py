"""Latencies as the engine sees them, from pieces with times that are given."""

from __future__ import annotations

from craton.ml.serving.engine import Latencies
from craton.ml.serving.engine.measurements import MAX_SAMPLES, WINDOW_SECONDS
from craton.ml.serving.messages import OutputDelta


def test_a_request_is_timed_from_its_submission_to_its_end() -> None:
    latencies = Latencies()
    latencies.begin(1, 10.0)
    latencies.note([OutputDelta(1, tokens=[5], admitted=10.5)], 12.0)
    latencies.note([OutputDelta(1, tokens=[6, 7])], 13.0)  # two tokens in a step take half of it each
    latencies.note([OutputDelta(1, tokens=[8], finish="length")], 13.25)
    assert latencies.quantiles(14.0) == {"first_token": (2.0, 2.0), "inter_token": (0.5, 0.5), "queue": (0.5, 0.5)}


def test_the_median_and_the_95th_percentile_are_of_the_last_minute() -> None:
    latencies = Latencies()
    latencies.begin(0, 0.0)
    latencies.note([OutputDelta(0, tokens=[5], finish="stop")], 9.0)
    for number in range(1, 101):
        latencies.begin(number, 100.0)
        latencies.note([OutputDelta(number, tokens=[5], finish="stop")], 100.0 + number / 100)
    median, p95 = latencies.quantiles(102.0)["first_token"]
    assert (round(median, 2), round(p95, 2)) == (0.51, 0.96)
    assert latencies.quantiles(102.0 + WINDOW_SECONDS) == {}


def test_copies_share_their_first_token_and_a_request_without_one_is_forgotten() -> None:
    latencies = Latencies()
    latencies.begin(1, 0.0)
    latencies.note([OutputDelta(1, index=0, tokens=[5]), OutputDelta(1, index=1, tokens=[6])], 1.0)
    latencies.note([OutputDelta(1, index=1, tokens=[7], finish="stop"), OutputDelta(1, index=0, finish="abort")], 3.0)
    latencies.begin(2, 0.0)
    latencies.note([OutputDelta(2, finish="abort")], 3.0)
    assert latencies.quantiles(3.0) == {"first_token": (1.0, 1.0), "inter_token": (2.0, 2.0)}
    assert latencies._submitted == latencies._newest == {}


def test_samples_are_bounded_and_the_newest_count() -> None:
    latencies = Latencies()
    latencies.note([OutputDelta(1, tokens=[5])], 0.0)
    for number in range(1, 2 * MAX_SAMPLES):
        latencies.note([OutputDelta(1, tokens=[5])], number / 1000)
    latencies.note([OutputDelta(1, tokens=[5])], 30.0)
    assert len(latencies._samples["inter_token"]) == MAX_SAMPLES
