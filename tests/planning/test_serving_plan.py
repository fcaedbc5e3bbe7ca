"""Plans of servers: ranks, room and speed, and how they are told."""

from __future__ import annotations

import io
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from craton.infrastructure import Cluster
from craton.infrastructure.local import LocalMachine, instance_of_machine
from craton.infrastructure.microbenchmark import Measurement
from craton.job import parse_job
from craton.planning import PlanError
from craton.planning.report import render_serving
from craton.planning.report import serving_to_json as to_json
from craton.planning.serving import ServePlan, plan_serving, plan_steps, roofline_steps
from craton.planning.serving.search import plan_load

MIXTURE = "kind: serve\nmodel: mixtral-8x7b\ncluster: p5en.48xlarge x 1\n"


def planned(model: str = "llama-3.1-8b", cluster: str = "p5en.48xlarge x 1", more: str = "", tp: int = 0) -> ServePlan:
    layout = f"layout: {{tp: {tp}}}\n" if tp else ""
    return plan_serving(
        parse_job(f"kind: serve\nmodel: {model}\ncluster: {cluster}\n{layout}serve: {{initialize: random{more}}}\n")
    )


def rendered(plan: ServePlan, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    render_serving(plan, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_llama_8b_on_an_h200() -> None:
    plan = planned()
    assert (plan.tp, plan.fits, plan.kind, plan.served_name) == (1, True, "serve", "llama-3.1-8b")
    assert plan.single_roof_tokens_per_second == pytest.approx(279, rel=0.02)
    assert plan.single_tokens_per_second == pytest.approx(1 / plan_steps(plan).decode_seconds(1.0, 512 + 256))
    assert plan.memory_bytes == pytest.approx(0.9 * plan.memory_limit_bytes, rel=0.001)
    assert sum(plan.memory_parts.values()) == pytest.approx(plan.memory_bytes)
    assert plan.kv_tokens * plan.kv_bytes_per_token == pytest.approx(plan.memory_parts["keys and values"])
    assert plan.best_batch == 256
    assert plan.bound in plan_steps(plan).terms(256.0, 768.0)
    assert plan.best_tokens_per_second < 256 / plan.best_tpot_seconds, "a request also waits for its first token"
    assert plan.best_roof_tokens_per_second > plan.best_tokens_per_second > plan.single_tokens_per_second
    assert plan.dollars_per_million_tokens == pytest.approx(63.296 / 3600 / plan.best_tokens_per_second * 1e6, rel=0.01)


def test_our_server_is_planned_as_it_was_measured() -> None:
    """Llama 3.1 8B in bf16 on one H200: 235 tokens/s for one request; 10.4k for 256 at once, of 512 in and 256 out."""
    plan = planned()
    assert plan.single_tokens_per_second_low < 235 < plan.single_tokens_per_second_high
    load = "load: {concurrency: 256, input: 512, output: 256, requests: 640}"
    text = f"kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nserve: {{initialize: random, {load}}}\n"
    speed = plan_load(parse_job(text), gpus=1).chosen.tokens_per_second
    assert speed.low < 10_360 < speed.high
    assert speed.value == pytest.approx(10_360, rel=0.15)
    assert plan.single_tokens_per_second_high < 2 * plan.single_tokens_per_second_low
    assert plan.best_tokens_per_second_high < 2 * plan.best_tokens_per_second_low


def test_the_plan_of_the_same_load_says_the_same() -> None:
    plan = planned(tp=1)
    load = "load: {concurrency: 256, input: 512, output: 512}"
    text = f"kind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\nserve: {{initialize: random, {load}}}\n"
    chosen = plan_load(parse_job(text), gpus=1).chosen
    assert plan.best_tokens_per_second == pytest.approx(chosen.tokens_per_second.value, rel=0.01)
    assert plan.best_tpot_seconds == pytest.approx(chosen.tpot["mean"].value, rel=0.01)


@pytest.mark.parametrize(
    ("model", "cluster", "more", "tp"),
    [
        ("llama-3.1-8b", "p5.48xlarge x 1", "", 1),
        ("llama-3.1-70b", "p5.48xlarge x 1", "", 4),
        ("llama-3.1-70b", "p5.48xlarge x 1", ", max_length: 128k", 4),
        ("llama-3.1-70b", "p5.48xlarge x 1", ", precision: fp8", 2),
        ("llama-3.1-70b", "p5en.48xlarge x 1", ", precision: fp8", 1),
        ("llama-3.1-405b", "p5en.48xlarge x 1", "", 8),
    ],
)
def test_as_few_ranks_as_leave_room(model: str, cluster: str, more: str, tp: int) -> None:
    plan = planned(model, cluster, more)
    assert (plan.tp, plan.fits) == (tp, True)
    if tp > 1 and model != "llama-3.1-405b":
        fewer = planned(model, cluster, more, tp // 2)
        assert not fewer.fits or fewer.kv_tokens < 16 * 1024


def test_experts_are_split_where_that_is_faster_or_the_only_way() -> None:
    plan = planned("mixtral-8x7b", "p5.48xlarge x 1")  # 93 GB of weights, and a GPU has 80
    assert (plan.tp, plan.ep, plan.warnings) == (2, 2, [])
    assert "with 2 ranks (tp 2 · ep 2) on" in rendered(plan)
    assert to_json(plan)["ep"] == 2
    deepseek = planned("deepseek-v3", more=", precision: fp8")
    assert (deepseek.tp, deepseek.ep, deepseek.fits) == (8, 8, True)


def test_a_layout_without_ep_has_all_experts_on_every_rank() -> None:
    whole, split = (
        plan_serving(parse_job(f"{MIXTURE}layout: {{{sizes}}}\nserve: {{initialize: random}}\n"))
        for sizes in ("tp: 4", "tp: 4, ep: 4")
    )
    assert (whole.ep, split.ep) == (1, 4)
    assert "each of the 4 ranks holds all 8 experts; layout: {tp: 4, ep: 4} needs less memory" in whole.warnings
    assert split.warnings == []
    saved = whole.memory_parts["weights"] - split.memory_parts["weights"]
    assert (split.kv_tokens - whole.kv_tokens) * split.kv_bytes_per_token / 4 == pytest.approx(saved, rel=1e-3)
    assert split.best_tokens_per_second > whole.best_tokens_per_second
    assert plan_steps(split).work.expert_read_seconds == plan_steps(whole).work.expert_read_seconds / 4


def test_a_load_is_planned_with_experts_whole_and_split() -> None:
    text = MIXTURE + "serve: {initialize: random, load: {concurrency: 64, input: 512, output: 128}}\n"
    layouts = [str(row.layout) for row in plan_load(parse_job(text), gpus=4).deployments]
    assert any(layout.startswith("tp 4 · ep 4") for layout in layouts)
    assert any(layout.startswith("tp 4") and "ep" not in layout for layout in layouts)
    stated = plan_load(parse_job(text + "layout: {tp: 4, ep: 2}\n"), gpus=4).deployments
    assert [(row.layout.tp, row.layout.ep) for row in stated] == [(4, 2)]


def test_weights_in_4_bits() -> None:
    """Codes, a scale of 2 bytes and a zero point of 1 for 128 weights of the blocks; table and head in bf16."""
    plan, plain = planned(more=", precision: int4"), planned()
    shape = plan.model
    tables = 2 * 2 * shape.embedding_parameters
    blocks = shape.layers * (shape.attention_parameters + shape.dense_mlp_parameters)
    assert plan.memory_parts["weights"] == pytest.approx(tables + blocks * (0.5 + 3 / 128))
    assert plan.kv_tokens > plain.kv_tokens
    assert any("no server with them" in warning for warning in plan.warnings)
    steps, others = plan_steps(plan), plan_steps(plain)
    assert steps.terms(1.0, 512.0)["matmul"] < 0.7 * others.terms(1.0, 512.0)["matmul"]
    assert steps.terms(8.0, 512.0)["matmul"] < 1.1 * others.terms(8.0, 512.0)["matmul"]
    few, many = (steps.terms(rows, 512.0)["matmul"] for rows in (64.0, 65.0))
    assert many > 2 * few, "the weights are unpacked for more than 64 tokens"
    experts = planned("qwen3-30b-a3b", more=", precision: int4")
    assert experts.memory_parts["weights"] > 0.9 * planned("qwen3-30b-a3b").memory_parts["weights"]
    assert any("routed experts stay in bf16" in warning for warning in experts.warnings)


def test_what_does_not_fit_is_still_an_answer() -> None:
    plan = planned("deepseek-v3", "p5.48xlarge x 1")
    assert not plan.fits
    assert plan.tp == 8
    assert "each of the 8 ranks holds the latents of all tokens (MLA)" in plan.warnings
    text = rendered(plan)
    assert "DOES NOT FIT" in text
    assert "2,048 are needed" in text
    assert "tokens/s" not in text


def test_less_room_than_the_model_could_use_is_told() -> None:
    short = planned("llama-3.1-8b", "p5.48xlarge x 1", ", memory: 0.32", tp=1)
    assert short.max_length == short.kv_tokens < 131_072
    assert "longer requests are refused" in " ".join(rendered(short).split())
    assert planned().warnings == []


def test_what_is_written_counts() -> None:
    plain = planned()
    fp8 = planned(more=", kv_precision: fp8")
    assert fp8.kv_tokens == pytest.approx(2 * plain.kv_tokens, rel=0.001)
    assert planned(more=", memory: 0.5").kv_tokens < 0.6 * plain.kv_tokens
    host = planned(more=", host_memory: 64GiB")
    assert host.host_kv_tokens == 64 * 2**30 // 131_072
    assert planned(more=", max_running: 32").best_batch == 32
    assert 1.1 < planned(more=", precision: fp8").single_tokens_per_second / plain.single_tokens_per_second < 1.9


def test_ranks_of_a_processor_share_it() -> None:
    measured = Measurement(100e9, 100e9, "by hand", 20e9, 1e9, 0.0)
    machine = LocalMachine("a processor", 2, 16 * 2.0**30, measured, datetime(2026, 11, 15, tzinfo=UTC))
    here = Cluster(name="local x 1", instance=instance_of_machine(machine), num_nodes=1)
    tiny = "{layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 512, max_sequence: 2048}"
    text = f"kind: serve\nmodel: {tiny}\ncluster: local\nserve: {{precision: fp32, initialize: random}}\n"
    one = plan_serving(parse_job(text), cluster=here)
    two = plan_serving(parse_job(text + "layout: {tp: 2}\n"), cluster=here)
    assert (one.tp, two.tp) == (1, 2)
    whole, shared = (roofline_steps(plan_steps(plan)).terms(1.0, 1000.0) for plan in (one, two))
    assert shared["attention"] == pytest.approx(whole["attention"]), "half of the heads at half of the rate"
    assert two.memory_limit_bytes == pytest.approx(one.memory_limit_bytes / 2)
    assert one.memory_parts["keys and values"] == pytest.approx(2**30, rel=0.01), "the rest is the machine's own"


def test_the_json_is_plain() -> None:
    plan = planned(tp=2)
    document: dict[str, Any] = json.loads(json.dumps(to_json(plan)))
    assert (document["kind"], document["tp"], document["fits"], document["requests"]) == (
        "serve",
        2,
        True,
        plan.requests,
    )
    assert "tokens_per_second" not in document, "it would be compared with what a server at any load measures"
    assert all(math.isfinite(point["tokens_per_second"]) for point in document["decode"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_the_terminal_and_says_what_is_asked(width: int) -> None:
    text = rendered(planned("qwen3-30b-a3b", more=", host_memory: 64GiB", tp=4), width)
    assert max(len(line) for line in text.splitlines()) <= width
    expected = ("FITS", "tp 4", "KV cache", "one request", "together", "first token", "assumed", "roofline")
    for words in (*expected, "context"):
        assert words in text


def test_the_table_has_a_rate_where_there_is_room() -> None:
    plan = planned()
    rates = {(point.batch, point.context): point for point in plan.decode}
    assert rates[1, 512].tokens_per_second > rates[1, 8192].tokens_per_second
    assert (256, 8192) not in rates, "2.1 million tokens do not fit"
    assert "no room" in rendered(plan)
    for (batch, context), point in rates.items():
        assert batch * context <= plan.kv_tokens
        assert point.tokens_per_second == pytest.approx(batch / point.step_seconds)


def test_links_make_ranks_wait() -> None:
    """Twice the ranks have half of the weights each, but as many collectives in every layer."""
    four, eight = (planned("llama-3.1-70b", tp=tp) for tp in (4, 8))
    parts = [plan_steps(plan).terms(1.0, 768.0) for plan in (four, eight)]
    assert parts[1]["communication"] >= parts[0]["communication"] > 0
    assert 1 < eight.single_tokens_per_second / four.single_tokens_per_second < 1.8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind: serve\nmodel: llama-3.1-8b\ncluster: p5.48xlarge x 2\n",
            "job.yaml:3: cluster: a server runs on one node",
        ),
        ("kind: serve\nmodel: llama-3.1-8b\ncluster: p5.84xlarge x 1\n", "job.yaml:3: cluster: .*p5.84xlarge"),
        (
            "kind: serve\nmodel: llama-3.1-8b\ncluster: p5.48xlarge x 1\nlayout: {tp: 3}\n",
            "job.yaml:4: layout: tp 3 does not divide .* nearest: tp 2",
        ),
        (
            "kind: serve\nmodel: llama-2-7b\ncluster: p5.48xlarge x 1\nlayout: {tp: 16}\n",
            "tp 16 needs 16 GPUs on one node, but a node has 8",
        ),
        ("kind: command\ncommand: ls\ncluster: local\n", "kind command does not serve"),
    ],
)
def test_jobs_that_cannot_be_planned_say_why(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_serving(parse_job(text))
