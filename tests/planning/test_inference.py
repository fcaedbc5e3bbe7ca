"""The arithmetic of serving against numbers worked out elsewhere, and what it guarantees for any model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.infrastructure.catalog import gpu
from craton.job.model import ModelShape, model_preset
from craton.planning.serving import DevicePeaks, Roofline, ServedModel
from craton.planning.serving.step import peaks_of

H200 = DevicePeaks(bytes_per_second=4.3e12, flops=790e12)  # measured: copies, and products of random bf16 matrices


def roofline(name: str, precision: str = "bf16", roofs: DevicePeaks = H200, **more: object) -> Roofline:
    return Roofline(ServedModel(model_preset(name), precision, **more), roofs)  # type: ignore[arg-type]


def test_one_request_of_llama_8b_on_an_h200() -> None:
    """4.3 TB/s ÷ 15.0 GB of weights without the input table; fp8 halves the blocks and leaves the head."""
    assert 1 / roofline("llama-3.1-8b").decode_seconds(1, 0) == pytest.approx(287, rel=0.005)
    assert 1 / roofline("llama-3.1-8b", "fp8").decode_seconds(1, 0) == pytest.approx(535, rel=0.005)


def test_the_slope_over_the_context_is_that_of_the_keys_and_values() -> None:
    """131,072 bytes a token, as vLLM's fp8 post has it for this model; in fp8 half of that."""
    model = ServedModel(model_preset("llama-3.1-8b"))
    assert model.kv_bytes_per_token == 131_072
    assert replace(model, kv_precision="fp8").kv_bytes_per_token == 65_536
    line = Roofline(model, H200)
    slope = (line.decode_seconds(1, 9000) - line.decode_seconds(1, 1000)) / 8000
    assert slope == pytest.approx(131_072 / 4.3e12)


@pytest.mark.parametrize(
    ("name", "seconds", "tokens_per_second"), [("qwen3-0.6b", 3.67, 36_500), ("qwen3-14b", 16.05, 8_300)]
)
def test_the_floor_of_the_published_mix(name: str, seconds: float, tokens_per_second: float) -> None:
    """256 requests, 100 to 1024 tokens in and out, seed 0: 142,827 prompt and 133,966 output tokens, 120.9 million
    tokens of context read, 131 requests a step in the mean."""
    line = roofline(name)
    steps = 133_966 / 131
    floor = steps * line.step_seconds(131, round(120.9e6 / steps), 131) + line.prefill_seconds(142_827, 558)
    assert floor == pytest.approx(seconds, rel=0.01)
    assert 133_966 / floor == pytest.approx(tokens_per_second, rel=0.01)


def test_prompts_cost_their_products_and_attention() -> None:
    """Causal attention of an 8B model against its products: 3.6% at 2k tokens, 29% at 16k, 57% at 32k."""
    line = roofline("llama-3.1-8b")
    products = 2 * (line.model.block_parameters + line.model.head_parameters)  # the 15 GFLOP of a token
    for tokens, share in ((2048, 0.036), (16_384, 0.29), (32_768, 0.57)):
        whole = line.step_flops(tokens, tokens, 1, pairs=0.5 * tokens * tokens)
        attention = whole - line.step_flops(tokens, 0, 1)
        assert attention / (products * tokens) == pytest.approx(share, rel=0.02)


def test_where_computing_begins_to_bind() -> None:
    assert roofline("llama-3.1-8b").balanced_batch == pytest.approx(790 / 4.3)
    line = roofline("llama-3.1-8b")
    assert line.decode_seconds(100, 0) == pytest.approx(line.decode_seconds(1, 0))
    assert line.decode_seconds(400, 0) == pytest.approx(2 * line.decode_seconds(200, 0), rel=0.01)


def test_ranks_share_weights_and_heads_and_send_what_they_share() -> None:
    whole, half = roofline("llama-3.1-8b"), roofline("llama-3.1-8b", tp=2)
    assert half.model.weight_bytes == pytest.approx(whole.model.weight_bytes / 2)
    assert half.decode_seconds(8, 1000) == pytest.approx(whole.decode_seconds(8, 1000) / 2)
    linked = roofline("llama-3.1-8b", roofs=replace(H200, link_bytes_per_second=400e9), tp=2)
    sent = 4 * 32 * 4096 * 2 / 2 * 8  # four collectives a layer, half of 8 tokens in bf16
    assert linked.decode_seconds(8, 1000) - half.decode_seconds(8, 1000) == pytest.approx(sent / 400e9)


def test_experts_are_read_as_tokens_meet_them() -> None:
    line = roofline("qwen3-30b-a3b")
    shape, expert_bytes = line.model.shape, line.model.expert_bytes
    plain = line.model.block_bytes + line.model.head_bytes
    assert line.read_bytes(1, 0, 1) - plain == pytest.approx(expert_bytes * shape.top_k / shape.experts)
    assert line.read_bytes(4096, 0, 1) - plain == pytest.approx(expert_bytes, rel=1e-3)
    assert line.model.weight_bytes == pytest.approx(2 * shape.parameters, rel=1e-3)
    assert replace(line.model, tp=4).expert_bytes == expert_bytes, "every rank holds all of them"


def test_a_window_bounds_what_is_read() -> None:
    line = roofline("gpt-oss-20b")
    shape = line.model.shape
    full = line.read_bytes(1, 100_000, 1) - line.read_bytes(1, 0, 1)
    windowed = shape.sliding_layers / shape.layers
    expected = line.model.kv_bytes_per_token * ((1 - windowed) * 100_000 + windowed * shape.sliding_window)
    assert full == pytest.approx(expected)


def test_latent_attention_keeps_every_head() -> None:
    model = ServedModel(model_preset("deepseek-v3"))
    assert model.kv_bytes_per_token == 2 * 61 * 128 * 192 * 2


def test_what_fits_is_whole_pages() -> None:
    model = ServedModel(model_preset("llama-3.1-8b"))
    room = model.weight_bytes + 1e9
    tokens = model.kv_tokens(room + 1000.5 * 131_072, 1e9, page=16)
    assert tokens == 992
    assert model.kv_tokens(room - 1, 1e9, page=16) == 0


def test_the_catalog_gives_roofs_near_the_measured() -> None:
    found = peaks_of(gpu("H200-SXM"))
    assert found.bytes_per_second == pytest.approx(4.29e12, rel=0.03)
    assert found.flops == pytest.approx(790e12, rel=0.03)
    assert peaks_of(gpu("H200-SXM"), "fp8").flops > 1.5 * found.flops


def test_a_shared_prefix_is_read_once_but_multiplied_by_every_query() -> None:
    """64 texts of one prompt of 4,096 tokens, 512 tokens later, in the 8B shape."""
    line = roofline("llama-3.1-8b")
    context, shared = 64 * (4096 + 512), 63 * 4096
    saved = line.read_bytes(64, context, 64) - line.read_bytes(64, context, 64, shared)
    assert saved == shared * 131_072
    alone, together = (line.step_seconds(64, context, 64, shared_tokens=tokens) for tokens in (0, shared))
    assert together == pytest.approx(alone - saved / line.roofs.bytes_per_second)
    assert alone / together == pytest.approx(2.7, rel=0.02)
    slow = Roofline(line.model, replace(line.roofs, flops=1e9))  # compute-bound: the same with and without
    assert slow.step_seconds(64, context, 64, shared_tokens=shared) == slow.step_seconds(64, context, 64)


def test_layers_with_a_window_do_not_share_reads() -> None:
    line = roofline("gpt-oss-20b")
    saved = line.read_bytes(8, 80_000, 8) - line.read_bytes(8, 80_000, 8, 70_000)
    assert saved == pytest.approx(70_000 * line.model.kv_bytes_per_token / 2)  # every other layer has one


def test_a_step_is_cheap_to_bound() -> None:
    line = roofline("qwen3-30b-a3b")
    with counted_calls() as calls:
        line.step_seconds(256, 300_000, 256, 400_000.0)
    assert calls.number < 50  # seven, which take one or two microseconds


SHAPES = [model_preset(name) for name in ("qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3")]


@settings(max_examples=200)
@given(
    shape=st.sampled_from(SHAPES),
    tokens=st.integers(1, 4096),
    context=st.integers(0, 10**6),
    more=st.integers(0, 1000),
    tp=st.sampled_from([1, 2, 4]),
    link=st.sampled_from([0.0, 1e11]),
)
def test_more_work_or_slower_devices_never_make_a_step_shorter(
    shape: ModelShape, tokens: int, context: int, more: int, tp: int, link: float
) -> None:
    roofs = replace(H200, link_bytes_per_second=link)
    line = Roofline(ServedModel(shape, tp=tp), roofs)
    base = line.step_seconds(tokens, context, 1)
    assert base > 0
    assert line.step_seconds(tokens + more, context, 1) >= base
    assert line.step_seconds(tokens, context + more, 1) >= base
    assert line.step_seconds(tokens, context, 1 + more) >= base
    assert line.step_seconds(tokens, context, 1, pairs=context + more) >= base
    slower = replace(roofs, bytes_per_second=roofs.bytes_per_second / 2, flops=roofs.flops / 2)
    assert Roofline(line.model, slower).step_seconds(tokens, context, 1) >= base
    assert line.step_seconds(0, 0, 0) == 0.0
