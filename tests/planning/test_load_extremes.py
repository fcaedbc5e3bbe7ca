"""Plans of loads at the edges: answers of a few tokens, lone users, short benchmarks, and the intervals of TTFT."""

from __future__ import annotations

import math

import pytest
from serving_simulator import CLOSED_CASES, throughput_ratio

from craton.infrastructure.catalog import gpu
from craton.job import Job, parse_job
from craton.planning.serving.profile import METRICS, find_engine_profile
from craton.planning.serving.search import Deployment, LoadPlan, plan_load


def job_of(load: str, software: str = "craton") -> Job:
    return parse_job(
        f"kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nsoftware: {software}\nlayout: {{tp: 1}}\n"
        f"serve: {{initialize: random, load: {load}}}\n"
    )


def chosen(load: str, software: str = "craton") -> Deployment:
    return plan_load(job_of(load, software), gpus=1).chosen


@pytest.mark.parametrize("arrivals", ["rate: 5", "concurrency: 8", "concurrency: 8, requests: 16"])
@pytest.mark.parametrize("output", [2, 8, 32])
def test_an_answer_of_a_few_tokens_takes_its_decode_steps(arrivals: str, output: int) -> None:
    row = chosen(f"{{{arrivals}, input: 2048, output: {output}}}")
    decode_step = chosen("{rate: 0.01, input: 2048, output: 256}").tpot["mean"].value
    for statistic in ("mean", "p50", "p90", "p95", "p99"):
        assert row.tpot[statistic].value >= 0.95 * decode_step
        assert row.e2e[statistic].value >= row.ttft[statistic].value + 0.9 * (output - 1) * decode_step
    percentiles = [row.tpot[name].value for name in ("p50", "p90", "p95", "p99")]
    assert percentiles == sorted(percentiles)


def spread(plan: LoadPlan, latency: str) -> float:
    interval = getattr(plan.chosen, latency)["mean"]
    return math.log(interval.high / interval.low) / 2 / 1.2816


@pytest.mark.parametrize("load", ["{rate: 2, input: 512, output: 64}", "{concurrency: 4, input: 512, output: 64}"])
def test_the_interval_of_ttft_has_what_the_fit_does_not_explain(load: str) -> None:
    for software in ("sglang", "craton"):
        job = job_of(load, software)
        plan = plan_load(job, gpus=1)
        profile = find_engine_profile(software, gpu("H200-SXM"))
        unexplained = profile.deviations[METRICS.index("ttft_seconds")]
        assert spread(plan, "ttft") >= unexplained
        assert spread(plan, "ttft") > spread(plan, "e2e") > 0


def test_every_interval_of_the_curve_contains_its_value() -> None:
    for load in ("{rate: 40, input: 846, output: 20}", "{rate: 2, input: 4096, output: 8}"):
        for point in plan_load(job_of(load, "vllm"), gpus=1).curve:
            for table in (point.ttft, point.tpot):
                assert all(interval.low <= interval.value <= interval.high for interval in table.values())


def test_input_tokens_have_a_price_for_a_lone_user_too() -> None:
    prices = []
    for users in (1, 4, 16, 64):
        row = chosen(f"{{concurrency: {users}, input: 2048, output: 256}}")
        assert row.dollars_per_million_input
        prices.append(row.dollars_per_million_input.value)
        # The share of time that one request alone spends in prefill.
        assert row.prefill_share >= 0.9 * row.ttft["mean"].value / row.e2e["mean"].value / users
    assert prices[0] == max(prices)
    assert max(prices[1:]) < 1.3 * min(prices)  # a step with a prompt costs little more than its tokens


@pytest.mark.parametrize("rounds", [1, 2, 10])
@pytest.mark.parametrize("name", CLOSED_CASES)
def test_the_throughput_of_a_benchmark_counts_its_end(name: str, rounds: int) -> None:
    assert 1 / 1.3 < throughput_ratio(*CLOSED_CASES[name], 64, rounds) < 1.3


def test_tensor_parallelism_across_the_network_is_a_warning() -> None:
    job = parse_job(
        "kind: serve\nmodel: llama-3.1-70b\ncluster: p5.48xlarge x 2\nsoftware: vllm\nlayout: {tp: 16}\n"
        "serve: {initialize: random, load: {concurrency: 1, input: 128, output: 128}}\n"
    )
    assert any("tp 16 leaves the NVLink domain of 8 GPUs" in warning for warning in plan_load(job).warnings)
    assert not plan_load(job_of("{concurrency: 1, input: 128, output: 128}"), gpus=1).warnings
