"""Which layouts are possible, and what is said of those that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.job import LayoutError
from craton.job.layout import Layout, LayoutSpec, check_layout, layout_is_valid, layout_line, nearest_layout
from craton.job.layout.layout import SCHEDULES
from craton.job.model import ModelShape, model_preset

LLAMA = model_preset("llama-3.1-8b")
QWEN = model_preset("qwen3-30b-a3b")
DEEPSEEK = model_preset("deepseek-v3")

POWERS = st.sampled_from([1, 2, 3, 4, 8, 16])
LAYOUTS = st.builds(
    Layout,
    pp=POWERS,
    replicate=POWERS,
    fsdp=POWERS,
    cp=POWERS,
    tp=POWERS,
    ep=POWERS,
    vpp=st.sampled_from([1, 2, 5]),
    micro_batch=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from(SCHEDULES),
)


def test_a_valid_layout_has_no_problems() -> None:
    layout = Layout(pp=4, fsdp=4, tp=8, vpp=2, schedule="interleaved")
    assert check_layout(layout, LLAMA, 128, 1024, 8192) == []


@pytest.mark.parametrize(
    ("changes", "shape", "says"),
    [
        ({"fsdp": 8}, LLAMA, "= 64 ranks, but the cluster has 128 GPUs; fsdp 16 would fit"),
        ({"tp": 3}, LLAMA, "does not divide 128; the nearest that does is 2"),
        ({"tp": 64, "fsdp": 2}, LLAMA, "tp 64 does not divide the model's 32 heads; nearest: tp 32"),
        ({"tp": 12}, LLAMA, "tp 12 does not divide the model's 32 heads and 8 KV heads, nor is it a multiple"),
        ({"pp": 64, "fsdp": 2, "tp": 1}, LLAMA, "64 stages, but the model has 32 layers; use pp ≤ 32"),
        ({"ep": 2}, LLAMA, "ep 2 requires experts, but llama-3.1-8b is dense; use ep 1"),
        ({"ep": 3}, QWEN, "ep 3 does not divide the model's 128 experts; nearest: ep 2"),
        ({"ep": 64}, QWEN, "ep 64 does not divide replicate · fsdp · cp = 16; nearest: ep 16"),
        ({"fsdp": 1, "cp": 3, "tp": 1}, LLAMA, "2·cp = 6, not 8192; nearest: cp 2, or sequence 8190"),
        ({"micro_batch": 3}, LLAMA, "· 16 · 3 = 48; nearest: micro_batch 2, or 1008 sequences"),
        ({"schedule": "interleaved", "pp": 2, "fsdp": 8}, LLAMA, "interleaved needs vpp above 1; use vpp 2"),
        ({"vpp": 2, "pp": 2, "fsdp": 8}, LLAMA, "vpp 2 needs schedule interleaved or zero-bubble"),
        ({"vpp": 2, "schedule": "interleaved"}, LLAMA, "needs a pipeline; use pp 2"),
    ],
)
def test_each_problem_names_the_nearest_valid_value(changes, shape, says) -> None:
    layout = replace(Layout(fsdp=16, tp=8), **changes)
    problems = check_layout(layout, shape, 128, 1024, 8192)
    assert any(says in problem for problem in problems), problems


def test_key_value_heads_may_be_copied_by_other_stacks_and_are_cut_by_ours() -> None:
    layout = Layout(fsdp=8, tp=16)
    assert check_layout(layout, LLAMA, 128, 1024, 8192) == []
    assert check_layout(layout, LLAMA, 128, 1024, 8192, trained=True) == [
        "tp 16 does not divide the model's 8 KV heads; nearest: tp 8"
    ]


WIDE = replace(LLAMA, vocab=128258, ffn_hidden=14334)
SHARED = replace(QWEN, shared_experts=1, moe_ffn_hidden=772, hidden=2056, dense_layers=1)


@pytest.mark.parametrize(
    ("layout", "shape", "batch", "says"),
    [
        (Layout(fsdp=32, tp=4), WIDE, 1024, "tp 4 does not divide the model's 14334 of ffn_hidden and 128258 of vocab"),
        (Layout(fsdp=16, tp=8, ep=4), SHARED, 1024, "772 of shared_experts · moe_ffn_hidden"),
        (Layout(fsdp=16, tp=8, precision="fp8"), LLAMA, 1024, ""),
        (
            Layout(fsdp=16, tp=8, precision="fp8"),
            replace(LLAMA, ffn_hidden=14400),
            1024,
            "tp 8 does not split ffn_hidden 14400 into multiples of 16, as fp8 requires; nearest: tp 4",
        ),
        (Layout(replicate=2, fsdp=64, ep=128), QWEN, 1024, ""),
        (Layout(replicate=16, fsdp=8, ep=128), QWEN, 1024, ""),
        (Layout(replicate=3, fsdp=8, ep=12), replace(QWEN, experts=96), 24, "ep 12 and fsdp · cp = 8: one must divide"),
        (Layout(fsdp=64, tp=2, ep=32), SHARED, 1024, ""),
        (Layout(fsdp=64, tp=2, ep=2), SHARED, 1024, ""),
        (
            Layout(fsdp=512, ep=8),
            SHARED,
            512,
            "over 64 ranks (fsdp · cp · tp without ep 8)",
        ),
        (
            Layout(pp=4, fsdp=4, tp=8, vpp=2, schedule="interleaved"),
            LLAMA,
            24,
            "the 6 micro-batches per step must be a multiple of pp 4",
        ),
    ],
)
def test_what_our_own_training_needs(layout: Layout, shape: ModelShape, batch: int, says: str) -> None:
    problems = check_layout(layout, shape, layout.world, batch, 8192, trained=True)
    assert layout_is_valid(layout, shape, layout.world, batch, 8192, trained=True) == (not says)
    assert bool(problems) == bool(says), problems
    assert any(says in problem for problem in problems) or not says, problems


def test_sequence_parallel_needs_a_sequence_tp_divides() -> None:
    problems = check_layout(Layout(tp=8), LLAMA, 8, 8, 1004)
    assert problems == ["tp 8 does not divide the 1004 tokens per rank; nearest: sequence 1008"]


@settings(max_examples=300)
@given(
    LAYOUTS,
    st.sampled_from([LLAMA, QWEN, DEEPSEEK]),
    st.sampled_from([6, 64, 96, 1000]),
    st.sampled_from([4096, 1000, 999]),
    st.booleans(),
)
def test_the_fast_answer_is_the_long_one(layout, shape, batch, sequence, trained) -> None:
    for world in (layout.world, layout.world + 1):
        problems = check_layout(layout, shape, world, batch, sequence, trained=trained)
        assert layout_is_valid(layout, shape, world, batch, sequence, trained=trained) == (not problems)


@pytest.mark.parametrize(
    ("written", "shape", "world", "line"),
    [
        ({"tp": 16}, LLAMA, 128, "layout: {fsdp: 16, tp: 8}"),
        ({"tp": 3}, LLAMA, 8, "layout: {fsdp: 2, tp: 4}"),
        ({"fsdp": 4, "tp": 4}, LLAMA, 8, "layout: {fsdp: 2, tp: 4}"),
        ({"tp": 8, "pp": 3}, LLAMA, 128, "layout: {pp: 4, fsdp: 4, tp: 8}"),
        ({"cp": 3}, LLAMA, 8, "layout: {fsdp: 2, cp: 4}"),
        ({"ep": 3}, QWEN, 8, "layout: {fsdp: 8, ep: 4}"),
        ({"pp": 64}, LLAMA, 64, "layout: {pp: 32, fsdp: 2}"),
        ({"pp": 2, "vpp": 32}, LLAMA, 8, "layout: {pp: 2, fsdp: 4}"),
        ({"fsdp": 2}, LLAMA, 1, "layout: {fsdp: 1}"),
    ],
)
def test_the_nearest_layout_is_a_line_to_paste(written: dict, shape: ModelShape, world: int, line: str) -> None:
    spec = LayoutSpec(**written)
    near = nearest_layout(spec.named(), shape, world, 1024, 8192, trained=True, written=written)
    assert near is not None
    assert layout_line(near) == line
    pasted = LayoutSpec.model_validate(yaml.safe_load(line)["layout"]).resolve(world)
    assert pasted == near
    assert layout_is_valid(pasted, shape, world, 1024, 8192, trained=True)


def test_no_layout_is_near_where_none_is_possible() -> None:
    assert nearest_layout(Layout(tp=2), LLAMA, 37, 8, 8192, trained=True) is None


def test_the_nearest_of_many_ranks_is_found_with_few_calls() -> None:
    with counted_calls() as calls:
        near = nearest_layout(Layout(pp=12, fsdp=16, cp=3, tp=16, ep=24), DEEPSEEK, 16384, 16384, 4096, trained=True)
    assert near is not None
    assert calls.number < 1_200_000  # half as many again as today


def test_a_search_can_ask_a_hundred_thousand_times() -> None:
    layout = Layout(pp=4, fsdp=4, tp=8, ep=4, vpp=2, schedule="interleaved")
    with counted_calls() as calls:
        assert layout_is_valid(layout, QWEN, 128, 1024, 8192)
    assert calls.number < 50  # seven, which take one or two microseconds


def test_a_written_layout_fills_the_rest_of_the_world() -> None:
    assert LayoutSpec(tp=8).resolve(128) == Layout(fsdp=16, tp=8)
    assert LayoutSpec(fsdp=8, tp=8).resolve(128) == Layout(replicate=2, fsdp=8, tp=8)
    assert LayoutSpec(replicate=4).resolve(128, "fp8") == Layout(replicate=4, fsdp=32, precision="fp8")
    assert LayoutSpec(pp=2, vpp=2).resolve(8).schedule == "interleaved"
    with pytest.raises(LayoutError, match="multiple of 24 ranks, but the cluster has 128 GPUs"):
        LayoutSpec(tp=8, pp=3).resolve(128)
