"""A model in Craton's own engine: bytes in memory, step times, and what they guarantee for any model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.infrastructure import Gpu
from craton.infrastructure.catalog import gpu
from craton.job.model import Int4Format, ModelShape, model_preset
from craton.planning.rates import MachineRates, machine, machine_of_ranks
from craton.planning.serving import ServedModel, ServedSteps, draft_steps, own_steps, roofline_steps
from craton.planning.serving.profile import EngineProfileError, find_engine_profile
from craton.planning.serving.served_model import kv_bytes_per_token
from craton.planning.serving.terms import ServingTerms


def h200(share: float = 1.0) -> MachineRates:
    """A node of 8 H200, of which memory and matmuls have this share of their rates."""
    known = machine("H200-SXM", 8, 8, 50e9, 0)
    if share == 1.0:
        return known
    rates = replace(
        known.rates,
        streaming_bytes_per_second=share * known.rates.streaming_bytes_per_second,
        memory_bytes_per_second=share * known.rates.memory_bytes_per_second,
        matrix_flops={name: share * flops for name, flops in known.rates.matrix_flops.items()},
    )
    return replace(known, rates=rates)


def steps_of(name: str, precision: str = "bf16", tp: int = 1) -> ServedSteps:
    return own_steps(ServedModel(model_preset(name), precision, tp=tp), h200())


def roofline(name: str, precision: str = "bf16", tp: int = 1) -> ServedSteps:
    return roofline_steps(steps_of(name, precision, tp))


def test_the_roofline_of_one_request_of_llama_8b_on_an_h200() -> None:
    """4.3 TB/s ÷ 15.0 GB of weights without the input table; fp8 halves the blocks and leaves the head."""
    assert 1 / roofline("llama-3.1-8b").decode_seconds(1.0, 0.0) == pytest.approx(287, rel=0.02)
    assert 1 / roofline("llama-3.1-8b", "fp8").decode_seconds(1.0, 0.0) == pytest.approx(535, rel=0.02)


def test_layers_that_int4_leaves_in_bf16_where_ranks_split_ordered_inputs() -> None:
    shape = model_preset("llama-3.1-8b")
    form = Int4Format("gptq", 128, has_zero=False)
    plain, ordered = (
        ServedModel(replace(shape, int4=replace(form, by_activation=found)), "int4") for found in (False, True)
    )
    assert plain.weight_bytes == ordered.weight_bytes
    left = shape.layers * shape.hidden * (shape.hidden + shape.ffn_hidden) / 2
    more = replace(ordered, tp=2).weight_bytes - replace(plain, tp=2).weight_bytes
    assert more == pytest.approx(left * (2 - 0.5 - 2 / 128))
    times = [own_steps(replace(model, tp=2), h200()).work.weights_seconds for model in (plain, ordered)]
    assert times[1] > 1.5 * times[0]


def test_kv_cache_bytes_are_those_of_published_engines() -> None:
    """131,072 bytes a token, as vLLM's fp8 post has it for this model; in fp8 half of that."""
    model = ServedModel(model_preset("llama-3.1-8b"))
    assert model.kv_bytes_per_token == 131_072
    assert replace(model, kv_precision="fp8").kv_bytes_per_token == 65_536
    assert replace(model, tp=4).kv_bytes_per_token == 131_072 / 4
    deepseek = model_preset("deepseek-v3")
    assert ServedModel(deepseek).kv_bytes_per_token == kv_bytes_per_token(deepseek, 2) == 61 * (512 + 64) * 2
    assert ServedModel(deepseek, tp=8).kv_bytes_per_token == 61 * (512 + 64) * 2, "every rank holds all latents"
    assert ServedModel(deepseek, "fp8", "fp8").kv_bytes_per_token == 61 * (512 + 64)


def test_the_expansion_of_latents_is_not_quantized() -> None:
    """61 layers · 512 · 128 heads · (128 + 128) weights of two bytes instead of one, shared by the ranks."""
    model = ServedModel(model_preset("deepseek-v3"), "fp8", tp=8)
    tables = 2 * model.shape.embedding_parameters / 8 * 2
    one_byte_each = model.block_parameters + model.expert_parameters
    assert model.weight_bytes - one_byte_each - tables == pytest.approx(61 * 512 * 128 * 256 / 8)


def test_ranks_share_weights_and_heads_and_not_experts() -> None:
    whole, half = ServedModel(model_preset("llama-3.1-8b")), ServedModel(model_preset("llama-3.1-8b"), tp=2)
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2)
    one, two = roofline("llama-3.1-8b"), roofline("llama-3.1-8b", tp=2)
    parts, shared = one.terms(8.0, 1000.0), two.terms(8.0, 1000.0)
    assert shared["matmul"] + shared["head"] == pytest.approx((parts["matmul"] + parts["head"]) / 2, rel=0.01)
    assert shared["attention"] == pytest.approx(parts["attention"] / 2)
    assert parts["communication"] == 0.0 < shared["communication"]
    mixture = ServedModel(model_preset("qwen3-30b-a3b"))
    assert mixture.weight_bytes == pytest.approx(2 * mixture.shape.parameters, rel=1e-3)
    whole_experts = replace(mixture, tp=4)
    assert whole_experts.weight_bytes > 0.9 * mixture.weight_bytes, "every rank holds all experts"
    split = replace(whole_experts, ep=4)
    assert split.expert_parameters == mixture.expert_parameters / 4
    assert split.weight_bytes == pytest.approx(mixture.weight_bytes / 4)


def test_experts_are_read_as_tokens_meet_them() -> None:
    line = roofline("qwen3-30b-a3b")
    shape = model_preset("qwen3-30b-a3b")
    all_seconds = line.work.expert_read_seconds
    assert line.terms(1.0, 0.0)["experts"] / all_seconds < 1.3 * shape.top_k / shape.experts
    assert line.terms(512.0, 0.0)["experts"] >= all_seconds
    whole, quarter = (roofline("qwen3-30b-a3b", tp=tp) for tp in (1, 4))
    assert quarter.work.expert_read_seconds == whole.work.expert_read_seconds, "every rank holds all of them"
    assert quarter.terms(64.0, 0.0)["experts"] == pytest.approx(whole.terms(16.0, 0.0)["experts"], rel=0.3)


def terms_of(tp: int, ep: int, name: str = "qwen3-30b-a3b") -> ServingTerms:
    return own_steps(ServedModel(model_preset(name), tp=tp, ep=ep), h200()).work


def test_split_experts_are_read_once_by_all_ranks_together() -> None:
    whole, half, split = (terms_of(4, ep) for ep in (1, 2, 4))
    assert [terms.expert_read_seconds * ep for terms, ep in ((half, 2), (split, 4))] == pytest.approx(
        [whole.expert_read_seconds] * 2
    )
    assert whole.expert_token_seconds == half.expert_token_seconds == split.expert_token_seconds, "the same rows a rank"
    assert [terms.expert_groups for terms in (whole, half, split)] == [4.0, 2.0, 1.0]
    passes = [terms.elementwise_token_seconds for terms in (whole, half, split)]
    assert passes == sorted(set(passes)), "a rank also moves rows of experts elsewhere"


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])  # with shared experts, and without
def test_split_experts_add_collectives_where_nothing_else_is_summed(name: str) -> None:
    shape = model_preset(name)
    whole, half, split = (terms_of(4, ep, name) for ep in (1, 2, 4))
    pair = whole.collective_floor_seconds / (2 * shape.layers - (0 if shape.shared_experts else shape.moe_layers))
    assert half.collective_floor_seconds - whole.collective_floor_seconds == pytest.approx(shape.moe_layers * pair)
    assert split.collective_floor_seconds == pytest.approx(2 * shape.layers * pair)
    moved = [terms.collective_token_seconds for terms in (whole, half, split)]
    assert moved[0] < moved[1]
    assert moved[2] == pytest.approx(moved[0] if shape.shared_experts else 2 * moved[0])


def test_a_window_bounds_what_is_read() -> None:
    line = roofline("gpt-oss-20b")
    shape = model_preset("gpt-oss-20b")
    windowed = shape.sliding_layers / shape.layers
    read = [line.terms(1.0, context)["attention"] for context in (0.0, shape.sliding_window, 100_000.0)]
    per_token = (read[1] - read[0]) / shape.sliding_window
    assert read[2] - read[1] == pytest.approx((1 - windowed) * (100_000 - shape.sliding_window) * per_token)


def test_the_kv_cache_is_read_once_for_all_draft_tokens_of_a_request() -> None:
    steps = steps_of("llama-3.1-8b")
    plain, verified = steps.decode_seconds(8.0, 8000.0), steps.verify_seconds(8.0, 8000.0, 4)
    assert plain < verified < 1.2 * plain
    assert verified < steps.decode_seconds(8.0 * 5, 8000.0)
    assert steps.verify_seconds(8.0, 8000.0, 0) == plain


def test_a_draft_model_is_whole_on_every_rank() -> None:
    whole = draft_steps(ServedModel(model_preset("llama-3.2-1b")), h200())
    shared = draft_steps(ServedModel(model_preset("llama-3.2-1b"), tp=4), h200())
    assert shared.decode_seconds(4.0, 500.0) == whole.decode_seconds(4.0, 500.0)


def test_a_draft_token_takes_as_long_as_measured() -> None:
    """1.06 ms of llama-3.2-1b on one H200 (docs/measurements.md), where reading its weights takes 0.57 ms."""
    steps = draft_steps(ServedModel(model_preset("llama-3.2-1b")), h200())
    assert steps.decode_seconds(1.0, 500.0) == pytest.approx(1.06e-3, rel=0.1)


def test_what_fits_is_whole_pages() -> None:
    model = ServedModel(model_preset("llama-3.1-8b"))
    room = model.weight_bytes + 1e9
    tokens = model.kv_tokens(room + 1000.5 * 131_072, 1e9, page=16)
    assert tokens == 992
    assert model.kv_tokens(room - 1, 1e9, page=16) == 0


def test_only_our_engine_has_a_profile_of_a_cpu() -> None:
    cpu = replace(gpu("H200-SXM"), name="a CPU", generation="cpu")
    assert find_engine_profile("craton", cpu).generation == "cpu"
    with pytest.raises(EngineProfileError, match="'vllm' was measured on GPUs only"):
        find_engine_profile("vllm", cpu)


def test_a_cpu_packs_fp32_weights_for_several_rows_and_adds_reading_and_multiplying() -> None:
    rates = {"fp32": 1e11, "bf16": 4e11}
    cpu = machine_of_ranks(Gpu("a CPU", "cpu", rates, rates, 16e9, 3e10, 0.0, 0.0), 1)
    fp32, bf16 = (roofline_steps(own_steps(ServedModel(model_preset("qwen3-0.6b"), name), cpu)) for name in rates)
    read, row = fp32.work.weights_seconds, fp32.work.token_seconds + fp32.work.elementwise_token_seconds
    one, two, three = (fp32.terms(rows, 0.0)["matmul"] for rows in (1.0, 2.0, 3.0))
    assert one == pytest.approx(read + row)
    assert two - one == pytest.approx(read + row)
    assert three - two == pytest.approx(row)
    assert bf16.terms(2.0, 0.0)["matmul"] < 1.5 * bf16.terms(1.0, 0.0)["matmul"]


def test_a_step_is_cheap_to_predict() -> None:
    steps = steps_of("qwen3-30b-a3b")
    with counted_calls() as calls:
        steps.mixed_seconds(256.0, 1000.0, 512.0, 800.0)
    assert calls.number < 100


SHAPES = [model_preset(name) for name in ("qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3")]


@settings(max_examples=100)
@given(
    shape=st.sampled_from(SHAPES),
    batch=st.integers(1, 512),
    tokens=st.integers(0, 4096),
    context=st.integers(0, 10**5),
    more=st.integers(0, 1000),
    sizes=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]),
)
def test_more_work_or_slower_devices_never_make_a_step_shorter(
    shape: ModelShape, batch: int, tokens: int, context: int, more: int, sizes: tuple[int, int]
) -> None:
    tp, ep = sizes
    model = ServedModel(shape, tp=tp, ep=ep if shape.is_moe else 1)
    steps, slower = own_steps(model, h200()), own_steps(model, h200(0.5))
    base = steps.mixed_seconds(batch, context, tokens, 2048.0) * (1 - 1e-12)
    assert base > 0
    assert steps.mixed_seconds(batch + more, context, tokens, 2048.0) >= base
    assert steps.mixed_seconds(batch, context + more, tokens, 2048.0) >= base
    assert steps.mixed_seconds(batch, context, tokens + more, 2048.0) >= base
    assert steps.mixed_seconds(batch, context, tokens, 2048.0 + more) >= base
    assert slower.mixed_seconds(batch, context, tokens, 2048.0) >= base
    assert roofline_steps(steps).mixed_seconds(batch, context, tokens, 2048.0) > 0
