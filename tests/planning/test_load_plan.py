"""Plans of a load: the cheapest deployment within limits, what nothing keeps, and how both read."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from html_pages import Reader, check_in_browser, needs_browser
from rich.console import Console

from craton.job import Job, parse_job
from craton.planning import PlanError
from craton.planning.report import load_html, load_to_json, load_verdict, render_load, serving_to_json
from craton.planning.report.load_findings import above_text, drafts_text, latency_text, range_text, short_text, warnings
from craton.planning.report.load_table import deployment_heading, order_text
from craton.planning.serving import ServePlan, plan_serving
from craton.planning.serving.search import (
    Deployment,
    Interval,
    LoadPlan,
    SloMiss,
    best_of_each,
    plan_load,
    with_planned_load,
)

LOAD = "{rate: 20, input: 1024, output: 256}"


def job_of(
    model: str = "llama-3.1-8b",
    load: str = LOAD,
    slo: str = "{ttft: 500ms, tpot: 30ms}",
    more: str = "",
    cluster: str = "p5en.48xlarge",
    serve: str = "",
) -> Job:
    return parse_job(
        f"kind: serve\nmodel: {model}\ncluster: {cluster} x 1\n{more}"
        f"serve: {{initialize: random, {serve}load: {load}, slo: {slo}}}\n"
    )


@pytest.fixture(scope="module")
def two_instances() -> LoadPlan:
    job = job_of("llama-3.1-70b", more="software: vllm\n")
    return plan_load(job, instances=["p5en.48xlarge", "p6-b200.48xlarge"])


def check_row(row: Deployment) -> None:
    for latency in (row.ttft, row.tpot, row.e2e):
        assert latency["p50"].value <= latency["p90"].value <= latency["p95"].value <= latency["p99"].value
        assert all(interval.low <= interval.value <= interval.high for interval in latency.values())
    assert row.max_rate.low <= row.max_rate.value <= row.max_rate.high
    assert sum(row.bottleneck.values()) <= 1.0 + 1e-9
    assert row.rate <= row.max_rate.value * (1 + 1e-9)
    tokens = row.tokens_per_second_per_gpu.value * row.gpus
    assert tokens == pytest.approx(row.tokens_per_second.value) == pytest.approx(row.rate * 256)
    if row.dollars_per_million_input and row.dollars_per_million_output:
        # Both parts together are what the nodes cost.
        per_second = row.rate * (
            row.dollars_per_million_input.value * 1024 + row.dollars_per_million_output.value * 256
        )
        assert per_second * 3600 / 1e6 == pytest.approx(row.dollars_per_hour)


def test_the_cheapest_deployment_within_the_limits_is_chosen(two_instances: LoadPlan) -> None:
    plan = two_instances
    for row in plan.deployments:
        check_row(row)
    assert plan.holds
    assert plan.chosen.ttft["p95"].value <= 0.5
    assert plan.chosen.tpot["p95"].value <= 0.03
    costs = [row.dollars_per_hour for row in plan.deployments if row.holds]
    assert costs == sorted(costs, key=lambda cost: cost or 0)
    assert {row.instance for row in plan.deployments} == {"p5en.48xlarge", "p6-b200.48xlarge"}
    assert any(row.prefill is not None for row in plan.deployments), "prefill and decode pools are compared"
    one_less = {
        row.layout: row for row in plan.deployments if row.prefill is None and row.layout.replicas > 1 and row.holds
    }
    assert all(20.0 / (layout.replicas - 1) > row.slo_rate / layout.replicas for layout, row in one_less.items()), (
        "no replica is more than needed"
    )


def test_a_limit_that_nothing_keeps_is_named_with_the_nearest() -> None:
    plan = plan_load(job_of(slo="{tpot: {p95: 1ms}}"))
    assert not plan.holds
    miss = plan.chosen.misses[0]
    assert (miss.latency, miss.statistic, miss.limit) == ("tpot", "p95", 0.001)
    assert miss.ratio == min(row.misses[0].ratio for row in plan.deployments)
    text = load_verdict(plan)
    assert 1.0 < miss.ratio < 2.0
    assert text.startswith("TPOT p95 ≤ 1 ms: no layout keeps it for 20 requests/s of 1,024 input and 256 output tokens")
    assert text.endswith(f"ms, {miss.ratio - 1.0:.0%} above.")


def test_saturation_is_said_plainly() -> None:
    plan = plan_load(job_of(load="{rate: 500, input: 1024, output: 256}", slo="{}"), gpus=1)
    assert plan.chosen.is_saturated
    assert load_verdict(plan).startswith("1 replica of tp 1 on one p5en.48xlarge does not hold 500 requests/s of ")
    assert "it saturates at" in load_verdict(plan)
    either = load_verdict(plan_load(job_of(load="{rate: 500, input: 1024, output: 256}", slo="{}"), gpus=2))
    assert either.startswith("Nothing holds 500 requests/s of ")
    assert load_to_json(plan)["ttft_seconds"] is None, "a latency without a bound"


@pytest.mark.parametrize(
    ("model", "keys", "serve", "deployment", "verdict"),
    [
        ("llama-3.1-8b", "layout: {tp: 1}", "replicas: 6, ", "6 x tp 1", "6 replicas of tp 1 on one p5.48xlarge hold"),
        ("llama-3.1-8b", "layout: {tp: 1}", "replicas: 1, ", "1 x tp 1", "does not hold 15 requests/s of"),
        ("llama-3.1-8b", "layout: {tp: 2}", "replicas: 2, ttft: 1ms", "2 x tp 2", "2 replicas of tp 2 on one p5.48xla"),
        ("llama-3.1-8b", "layout: {tp: 1}", "", "2 x tp 1", "2 replicas of tp 1 on one p5.48xlarge hold"),
        ("gpt-oss-120b", "layout: {tp: 8, ep: 8}", "replicas: 2, ", "2 x tp 8 · ep 8", "2 replicas of tp 8 · ep 8 on"),
    ],
)
def test_stated_replicas_and_layouts_are_planned_as_they_are(
    model: str, keys: str, serve: str, deployment: str, verdict: str
) -> None:
    replicas, _, limit = serve.partition(", ")
    job = parse_job(
        f"kind: serve\nmodel: {model}\ncluster: p5.48xlarge x 1\nsoftware: vllm\n{keys}\nserve: {{{replicas}"
        f"{', ' if replicas else ''}load: {{rate: 15, input: 4096, output: 128}}, slo: {{{limit}}}}}\n"
    )
    plan = plan_load(job)
    assert [short_text(row) for row in plan.deployments] == [deployment], "no other layout, and no separate pools"
    assert verdict in load_verdict(plan)
    assert ("times the limit." in load_verdict(plan)) == bool(limit)


def test_stated_replicas_of_any_layout_have_no_separate_pools() -> None:
    rows = plan_load(job_of("llama-3.1-70b", more="software: vllm\n", serve="replicas: 2, ")).deployments
    assert {(row.layout.replicas, row.prefill) for row in rows} == {(2, None)}
    assert len(rows) == 3, "tp 2, 4 and 8"


def test_the_kv_cache_of_our_own_engine_is_that_of_its_plan() -> None:
    job = job_of(more="layout: {tp: 1}\n")
    assert plan_load(job, gpus=1).chosen.kv_tokens == plan_serving(job).kv_tokens


def test_more_load_is_slower_and_cached_prompts_are_faster() -> None:
    ttft = {
        load: plan_load(job_of(load=load, slo="{}"), gpus=1).chosen.ttft["p95"].value
        for load in (
            "{rate: 5, input: 1024, output: 256}",
            "{rate: 15, input: 1024, output: 256}",
            "{rate: 15, input: 1024, output: 256, burstiness: 0.25}",
            "{rate: 15, input: 1024, output: 256, burstiness: 4}",
            "{rate: 15, input: 1024, output: 256, prefix_hits: 0.8}",
        )
    }
    few, many, bursty, steady, cached = ttft.values()
    assert few < steady < many < bursty, "burstiness is the shape of the gaps, as in bench serve"
    assert cached < many


def test_the_fewest_gpus_and_the_most_load_agree() -> None:
    most = plan_load(job_of(load="{input: 1024, output: 256}"), gpus=2).chosen
    assert most.holds
    assert most.gpus == 2
    just = plan_load(job_of(load=f"{{rate: {0.99 * most.rate:.3f}, input: 1024, output: 256}}"), by="gpus").chosen
    assert just.gpus <= 2
    more = plan_load(job_of(load=f"{{rate: {1.5 * most.rate:.3f}, input: 1024, output: 256}}"), by="gpus").chosen
    assert more.gpus > 2


def test_users_who_wait_are_a_closed_load() -> None:
    plan = plan_load(job_of(load="{concurrency: 64, input: 1024, output: 256}"), gpus=1)
    row = plan.chosen
    # Little's law: every user waits for a whole answer, then sends the next request.
    assert row.rate * row.e2e["mean"].value == pytest.approx(64, rel=0.05)


def test_speculative_decoding_gives_more_tokens_a_step() -> None:
    def tpot(load: str) -> float:
        text = (
            "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n"
            f"serve: {{initialize: random, speculate: {{ngram: 4}}, load: {load}}}\n"
        )
        return plan_load(parse_job(text), gpus=1).chosen.tpot["mean"].value

    assert tpot("{rate: 1, acceptance: 0.9}") < 0.6 * tpot("{rate: 1, acceptance: 0.0}")


def test_drafts_are_said_and_an_assumed_acceptance_widens_the_interval() -> None:
    def planned(load: str, speculate: str = "{model: llama-3.2-1b}") -> LoadPlan:
        keys = f"replicas: 1, speculate: {speculate}, "
        return plan_load(job_of(load=load, slo="{}", more="layout: {tp: 1}\n", serve=keys))

    assumed, stated = planned("{concurrency: 1}"), planned("{concurrency: 1, acceptance: 0.7}")
    assert assumed.chosen.tpot["mean"].value == stated.chosen.tpot["mean"].value
    assert assumed.log_deviation > stated.log_deviation + 0.1
    assert stated.log_deviation == pytest.approx(planned("{concurrency: 1}", "off").log_deviation)
    text = drafts_text(assumed)
    assert text.startswith("llama-3.2-1b, 2 draft tokens per step (auto): decode 1.")
    assert text.endswith(" at this load; acceptance 70% assumed (50% to 90%), which is in all intervals")
    assert drafts_text(stated).endswith("x at this load; acceptance 70%")
    assert "no draft tokens, they would cost more than they save" in drafts_text(
        planned("{concurrency: 256, acceptance: 0.2}")
    )
    assert drafts_text(planned("{rate: 1}", "{ngram: 4}")).startswith("n-grams, 4 draft tokens per step: decode ")
    assert drafts_text(planned("{rate: 1}", "off")) == ""
    assert load_to_json(assumed)["drafts"]["is_assumed"] is True


def test_a_load_has_the_draft_tokens_that_the_engine_chooses() -> None:
    """One user has the speed-up of the plan without a load; so many that verifying costs more have no drafts."""

    def planned(more: str, users: int) -> tuple[ServePlan, float]:
        job = parse_job(
            "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nlayout: {tp: 1}\nserve: {initialize: random"
            f"{more}, load: {{concurrency: {users}, input: 512, output: 512}}}}\n"
        )
        return plan_serving(job), plan_load(job, gpus=1).chosen.tpot["mean"].value

    auto, fixed = (f", speculate: {{model: llama-3.2-1b{tokens}}}" for tokens in ("", ", tokens: 8"))
    alone, tpot = planned(auto, 1)
    assert alone.speculation is not None
    assert tpot == pytest.approx(1 / alone.speculation.single_tokens_per_second, rel=0.05)
    assert tpot < planned(fixed, 1)[1]
    many = [planned(more, 256)[1] for more in ("", auto, fixed)]
    assert many[1] == pytest.approx(many[0], rel=0.1)
    assert many[2] > 1.2 * many[0]


def test_experts_across_the_network_are_compared_with_one_domain() -> None:
    job = parse_job(
        "kind: serve\nmodel: deepseek-v3\ncluster: p5en.48xlarge x 1\nsoftware: sglang\n"
        "serve: {precision: fp8, load: {rate: 20, input: 1024, output: 256}, slo: {tpot: 60ms}}\n"
    )
    plan = plan_load(job)
    (note,) = plan.notes
    assert note.startswith("p5en.48xlarge: ep 8 inside one NVLink domain of 8 GPUs (")
    assert "/h, ep 16 across the network (" in note
    assert note.endswith("/h more")
    assert plan.compared >= 10
    numbers = [(replace(row.layout, ep=1), row.ttft["p95"], row.tpot["p95"]) for row in plan.deployments]
    assert len(set(numbers)) == len(numbers), "layouts that differ in ep alone and have the same numbers are one row"


def test_equal_cost_prefers_fewer_gpus_and_every_instance_is_shown() -> None:
    job = job_of(more="software: vllm\n")
    names = ["p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "g6e.48xlarge"]
    plan = plan_load(job, instances=names)
    shown = best_of_each(plan.deployments, 8)
    assert len(shown) == 8
    assert {row.instance for row in shown} == set(names)
    assert shown == [row for row in plan.deployments if row in shown], "in the same order"
    ranks = [(not row.holds, row.dollars_per_hour, row.gpus, -row.max_rate.value) for row in plan.deployments]
    assert ranks == sorted(ranks)
    assert f"({plan.compared} compared, 8 shown)" in deployment_heading(plan, 8)
    assert order_text(plan).endswith("$/h of whole nodes; fewer GPUs; a higher saturation rate")
    assert order_text(plan_load(job, gpus=4)) == "what holds; of 4 GPUs the largest load within the limits; $/h"
    assert order_text(plan_load(job, by="time")).endswith("mean end-to-end latency; $/h; a higher saturation rate")
    large = plan_load(job_of("llama-3.1-405b", more="software: vllm\n"), instances=["p5en.48xlarge", "g5.48xlarge"])
    assert [text for text in warnings(large) if text.startswith("g5.48xlarge: no deployment; ")]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (80, "TTFT TPOT max deployment instance GPUs p95 p95 req/s $/h $/M out"),
        (100, "deployment instance GPUs TTFT p95 TPOT p95 max req/s $/h $/M out"),
        (140, "deployment instance GPUs TTFT p95 TPOT p95 max req/s $/h $/M in $/M out $/M out, 80%"),
    ],
)
def test_the_table_of_deployments_fits_the_terminal(two_instances: LoadPlan, width: int, titles: str) -> None:
    shown = io.StringIO()
    render_load(two_instances, Console(file=shown, width=width))
    lines = shown.getvalue().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("Deployments, best first by cost"))
    first = next(index for index, line in enumerate(lines) if index > start and line.startswith(("✓", "✗")))
    assert " ".join(" ".join(lines[start + 1 : first]).split()) == titles
    rows = lines[first:]
    assert all(line.startswith(("✓", "✗")) for line in rows), "no row wraps"
    assert ("p5en " if width == 80 else "p5en.48xlarge ") in "".join(rows)
    dollars = two_instances.chosen.dollars_per_hour
    assert dollars is not None
    assert f"${dollars:.0f}" in rows[0] or f"${dollars:.2f}" in rows[0]


def test_dollars_have_an_interval(two_instances: LoadPlan) -> None:
    for row in load_to_json(two_instances)["deployments"]:
        for name in ("input", "output"):
            dollars = row[f"dollars_per_million_{name}"]
            assert 0 < dollars["low"] <= dollars["value"] <= dollars["high"]
    shared = next(row for row in two_instances.deployments if row.prefill is None and not row.is_saturated)
    assert shared.dollars_per_million_output is not None
    # The share of prefill in the time; the cost of separate pools at a rate is known.
    assert shared.dollars_per_million_output.low < shared.dollars_per_million_output.high


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("llama-3.1-8b", "tp: 3", "tp 3 does not divide the model's 32 heads; write a divisor"),
        ("llama-3.1-8b", "tp: 2, pp: 100", "pp 100 is more than the model's 32 layers"),
        ("llama-3.1-8b", "tp: 2, ep: 2", "ep 2 requires a model with experts, and llama-3.1-8b has none"),
        ("llama-3.1-8b", "tp: 8, pp: 999999", "has more than the 1,024 GPUs that are planned"),
        ("deepseek-v3", "tp: 2, ep: 3", "ep 3 does not divide the model's 256 experts"),
    ],
)
def test_a_stated_layout_that_cannot_be_is_refused(model: str, sizes: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_load(job_of(model, more=f"software: vllm\nlayout: {{{sizes}}}\n"))
    assert message in str(error.value)


def test_a_version_that_was_not_measured_is_said() -> None:
    def said(software: str) -> list[str]:
        return plan_load(job_of(more=f"software: {software}\n"), gpus=1).warnings

    assert said("vllm 99") == [
        "vllm 99 was not measured on H200-SXM, so the plan is that of vllm; measured are 0.12.0, 0.16.0, 0.18.0"
    ]
    assert said("vllm 0.18.0") == said("vllm") == []
    plan = plan_serving(parse_job("kind: serve\nmodel: llama-3.1-8b\ncluster: p5.48xlarge x 1\nsoftware: vllm 99\n"))
    assert any(text.startswith("vllm 99 was not measured on H100-SXM") for text in plan.warnings)


def test_latencies_without_a_bound_are_one_word() -> None:
    unbounded = Interval(math.inf, math.inf, math.inf)
    assert (latency_text(unbounded), range_text(unbounded)) == ("grows without bound", "unbounded")
    assert range_text(Interval(1.0, 0.5, math.inf)) == "500 ms to unbounded"
    assert above_text(SloMiss("ttft", "p95", 0.5, math.inf)) == "without bound"
    assert above_text(SloMiss("ttft", "p95", 0.5, 0.7)) == "40% above"


def test_other_engines_pad_what_tp_does_not_divide() -> None:
    """gpt3-175b has 50,257 tokens in its vocabulary."""
    searched = plan_load(job_of("gpt3-175b", more="software: vllm\n", cluster="p6-b300.48xlarge")).deployments
    stated = plan_load(job_of("gpt3-175b", more="software: vllm\nlayout: {tp: 8}\n", cluster="p6-b300.48xlarge"))
    assert stated.chosen.layout in [row.layout for row in searched]
    assert stated.chosen.kv_tokens > 100_000


def test_our_engine_splits_a_stated_layout_evenly() -> None:
    with pytest.raises(PlanError, match="tp 3 does not divide the model's 32 heads and 8 KV heads"):
        plan_load(job_of(more="layout: {tp: 3}\n"))


def planned_in(precisions: str, model: str = "llama-3.1-70b", instance: str = "p6-b200.48xlarge") -> LoadPlan:
    text = f"kind: serve\nmodel: {model}\ncluster: {instance} x 1\nsoftware: vllm\nlayout: {{tp: 4, ep: 1}}\n"
    return plan_load(
        parse_job(f"{text}serve: {{initialize: random, {precisions}, load: {{concurrency: 64}}}}\n"), gpus=4
    )


def test_weights_activations_and_kv_cache_have_their_own_precision() -> None:
    narrow = planned_in("precision: nvfp4, kv_precision: fp8")
    assert (narrow.activation_precision, narrow.kv_precision) == ("nvfp4", "fp8")
    plain = planned_in("precision: nvfp4")
    assert narrow.chosen.kv_tokens == pytest.approx(2 * plain.chosen.kv_tokens), "half the bytes of a token"
    only_weights = planned_in("precision: nvfp4, activation_precision: bf16")
    assert only_weights.chosen.kv_tokens == plain.chosen.kv_tokens
    assert only_weights.chosen.ttft["mean"].value > 1.2 * plain.chosen.ttft["mean"].value, "prompts in bf16"
    wide = planned_in("precision: bf16")
    assert only_weights.chosen.kv_tokens > wide.chosen.kv_tokens
    assert only_weights.chosen.tpot["mean"].value < wide.chosen.tpot["mean"].value, "fewer bytes of weights"


def test_formats_without_matmuls_on_the_gpu_are_widened_to_bf16() -> None:
    hopper = planned_in("precision: nvfp4", instance="p5en.48xlarge")
    assert hopper.activation_precision == "bf16"
    with pytest.raises(PlanError, match=r"H200-SXM has no fp4 matmuls .*; write activation_precision bf16"):
        planned_in("precision: nvfp4, activation_precision: nvfp4", instance="p5en.48xlarge")
    engine = "kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nsoftware: vllm\n"
    int4 = parse_job(f"{engine}serve: {{precision: int4}}\n")
    with pytest.raises(PlanError, match=r"is planned for a load only; give serve\.load, or --rate"):
        plan_serving(int4)


def test_published_checkpoints_keep_parts_in_bf16() -> None:
    experts = planned_in("precision: mxfp4", "gpt-oss-120b")
    latent = planned_in("precision: nvfp4", "deepseek-v3")
    assert (experts.attention_precision, experts.activation_precision) == ("bf16", "fp8")
    assert (latent.attention_precision, latent.activation_precision) == ("bf16", "nvfp4")


def test_a_prefix_is_reloaded_from_a_tier_if_that_is_faster(two_instances: LoadPlan) -> None:
    host, nvme = two_instances.tiers
    assert host.name.startswith("host memory (")
    assert 0 < host.reload_seconds < nvme.reload_seconds
    assert host.is_faster == (host.reload_seconds < host.recompute_seconds)


@pytest.mark.parametrize(
    ("model", "cluster", "rate", "pools", "link"),
    [
        ("llama-3.1-8b", "p5en.48xlarge", 20, "3 x tp 1 → 1 x tp 1", "NVLink"),
        ("llama-3.1-8b", "g6e.48xlarge", 2, "1 x tp 1 → 1 x tp 1", "PCIe"),
        ("llama-3.1-70b", "p5en.48xlarge", 12, "8 x tp 2 → 1 x tp 2", "EFA"),
    ],
)
def test_pools_send_kv_caches_over_the_slowest_link_between_them(
    model: str, cluster: str, rate: int, pools: str, link: str
) -> None:
    load = f"{{rate: {rate}, input: 4096, output: 128}}"
    plan = plan_load(job_of(model, load, "{}", more="software: vllm\n", cluster=cluster))
    assert (pools, link) in [(short_text(row), row.kv_transfer_link) for row in plan.deployments]


def test_a_tier_is_compared_with_the_prefill_of_the_prefill_pool() -> None:
    load = "{rate: 10, input: 2000, output: 256}"
    plan = plan_load(job_of("llama-3.1-70b", load, "{ttft: 1s, tpot: 20ms}", more="software: vllm\n"))
    assert short_text(plan.chosen) == "2 x tp 4 → 1 x tp 4"
    at_peak = 2.0 * 70e9 * 2000 / (4 * 989e12)  # of four H200
    assert at_peak / 0.8 < plan.tiers[0].recompute_seconds < plan.chosen.ttft["p50"].value


@pytest.mark.parametrize(
    ("job", "gpus", "message"),
    [
        (job_of("llama-3.1-405b", cluster="p5.48xlarge"), None, "llama-3.1-405b fits no layout on p5.48xlarge"),
        (job_of("llama-3.1-70b", more="software: vllm\n"), 1, "--gpus 1 is too few: the smallest layout needs 2"),
        (
            job_of(
                "llama-3.1-70b",
                "{rate: 1, input: 130000}",
                more="layout: {tp: 2}\n",
                serve="memory: 0.56, precision: fp8, ",
                cluster="p5.48xlarge",
            ),
            None,
            "the longest request has 130,256 tokens, and the KV cache of no layout holds more than",
        ),
        (job_of(more="software: vlm\n"), None, "engine 'vlm' has no profile; did you mean 'vllm'?"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(job: Job, gpus: int | None, message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_load(job, gpus=gpus)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_run_keeps_what_is_predicted_for_its_load() -> None:
    job = job_of(load="{rate: 5, input: 1024, output: 256}")
    plan = with_planned_load(plan_serving(job), job)
    assert plan.load is not None
    assert plan.load.rate == pytest.approx(5.0)
    assert plan.load.ttft_seconds_low < plan.load.ttft_seconds < plan.load.ttft_p95_seconds
    document = serving_to_json(plan)
    assert document["tpot_seconds"] == plan.load.tpot_seconds
    assert with_planned_load(plan_serving(job_of(load="{}")), job_of(load="{}")).load is None


def test_the_terminal_fits_80_columns(two_instances: LoadPlan) -> None:
    console = Console(width=80, file=io.StringIO())
    render_load(two_instances, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for shown in ("HOLDS", "saturation", "queues grow without bound", "per million tokens", "KV tier", "fitted to"):
        assert shown in " ".join(text.split())


def test_json_has_every_number(two_instances: LoadPlan) -> None:
    document: dict[str, Any] = json.loads(json.dumps(load_to_json(two_instances), allow_nan=False))
    assert document["holds"] is True
    assert set(document["chosen"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert set(document["chosen"]["ttft"]["p95"]) == {"value", "low", "high"}
    assert document["load"]["rate"] == 20.0
    assert document["tpot_seconds"] == two_instances.chosen.tpot["mean"].value


@needs_browser
def test_the_page_is_right_in_a_browser(two_instances: LoadPlan, tmp_path: Any) -> None:
    page = load_html(two_instances)
    reader = Reader(page)
    assert reader.plots == ["plot-latency", "plot-front"]
    assert load_verdict(two_instances) in reader.text
    plots = check_in_browser({"desk": (page, 1200), "phone": (page, 400)}, tmp_path)
    assert plots["phone"] == ["plot-latency", "plot-front"]


def test_the_front_is_not_beaten(two_instances: LoadPlan) -> None:
    points = [point for point in two_instances.front if point.instance == "p5en.48xlarge"]
    users, gpus = (
        np.array([getattr(point, f"tokens_per_second_per_{name}") for point in points]) for name in ("user", "gpu")
    )
    for point, user, gpu in zip(points, users, gpus, strict=True):
        assert math.isfinite(user)
        assert point.is_on_front == (not np.any((users > user) & (gpus > gpu)))
