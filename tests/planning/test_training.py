"""The step model: units, sums, and that better hardware never makes a step slower."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from craton.infrastructure import Cluster, cluster_of
from craton.job.layout import Layout, layout_is_valid
from craton.job.model import MlaShape, ModelShape, model_preset
from craton.planning.calibration import find_profile, predict
from craton.planning.rates import all_reduce_seconds, machine_of
from craton.planning.software import INDEX, NAMES, SoftwareProfile, Traits, prior_log
from craton.planning.step import StepModel, StepTimes, compose, flops_per_token, stack
from craton.planning.step.compute import group_of
from craton.planning.step.operations import attention_flops_per_token
from craton.planning.step.training import fullest_rank

EIGHT_B = model_preset("llama-3.1-8b")
SMALL = ModelShape("small", 6, 512, 1408, 8, 4, 64, 32000)
UNEVEN = ModelShape("uneven", 30, 4096, 11008, 32, 32, 128, 128256, tied_embeddings=True, gated_mlp=False)
EXPERTS = ModelShape(
    "experts", 12, 2048, 6144, 32, 4, 128, 151936, experts=64, top_k=8, moe_ffn_hidden=768, dense_layers=1
)
LATENT = ModelShape(
    "latent",
    14,
    2048,
    10944,
    16,
    16,
    128,
    102400,
    mla=MlaShape(0, 512, 128, 64, 128),
    experts=64,
    top_k=6,
    moe_ffn_hidden=1408,
    shared_experts=2,
    dense_layers=1,
    mtp_layers=1,
)
SHAPES = (EIGHT_B, SMALL, UNEVEN, EXPERTS, LATENT)
H100 = cluster_of("p5.48xlarge", 8)


def step_of(
    shape: ModelShape,
    layout: Layout,
    batch: int,
    *,
    sequence: int = 4096,
    cluster: Cluster = H100,
    software: str = "craton",
    lora: bool = False,
    imbalance: float = 1.0,
) -> float:
    profile = find_profile(software, cluster.instance.gpu)
    return predict(profile, _model(shape, batch, sequence, cluster, profile, lora, imbalance).terms(layout)).seconds


def times_of(shape: ModelShape, layout: Layout, batch: int, sequence: int = 4096, cluster: Cluster = H100) -> StepTimes:
    profile = find_profile("craton", cluster.instance.gpu)
    terms = _model(shape, batch, sequence, cluster, profile).terms(layout)
    return compose(terms, np.exp(np.array(profile.log_constants)))


def _model(
    shape: ModelShape,
    batch: int,
    sequence: int,
    cluster: Cluster,
    profile: SoftwareProfile,
    lora: bool = False,
    imbalance: float = 1.0,
) -> StepModel:
    place = machine_of(cluster)
    return StepModel(shape, sequence, batch, place.rates, place.network, profile.traits, lora, imbalance)


# --- FLOPs of a token, by hand


def test_flops_of_llama_8b() -> None:
    weights = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 + 2 * 4096) + 4096 + 128256 * 4096
    assert EIGHT_B.parameters == weights + 128256 * 4096
    assert flops_per_token(EIGHT_B, 8192) == 6 * weights + 6 * 32 * 4096 * 8192
    assert flops_per_token(EIGHT_B, 8192) == pytest.approx(5.15e10, rel=0.01)


def test_flops_of_llama_405b() -> None:
    shape = model_preset("llama-3.1-405b")
    passed = shape.parameters - 128256 * 16384
    assert shape.parameters == pytest.approx(405.85e9, rel=1e-3)
    assert flops_per_token(shape, 8192) == 6 * passed + 6 * 126 * 16384 * 8192
    assert flops_per_token(shape, 8192) == pytest.approx(2.52e12, rel=0.01)


def test_flops_of_experts_count_only_what_a_token_visits() -> None:
    shape = model_preset("qwen3-30b-a3b")
    visited = 8 * 3 * 2048 * 768
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    layer = attention + visited + 2048 * 128 + 2 * 2048  # router, norms
    passed = 48 * layer + 2048 + 151936 * 2048
    assert flops_per_token(shape, 4096) == pytest.approx(6 * passed + 6 * 48 * 32 * 128 * 4096)
    assert flops_per_token(replace(shape, experts=256), 4096) == pytest.approx(
        flops_per_token(shape, 4096) + 6 * 48 * 2048 * 128  # only the router grows
    )


def test_flops_of_latent_attention_use_its_own_widths() -> None:
    shape = model_preset("deepseek-v3")
    # 128 heads, 192 wide in the scores and 128 in the values, half of 4,096 keys, 61 layers
    assert attention_flops_per_token(shape, 4096) == 2 * 128 * (192 + 128) * 61 * 2048
    # 37B active; DeepSeek's own count is about 250 GFLOP a token with its multi-token layer
    assert flops_per_token(shape, 4096) == pytest.approx(2.4e11, rel=0.05)


def test_tied_embeddings_are_still_a_head() -> None:
    tied = replace(EIGHT_B, tied_embeddings=True)
    assert flops_per_token(tied, 8192) == flops_per_token(EIGHT_B, 8192)


def test_lora_skips_the_gradients_of_frozen_weights_but_not_of_attention() -> None:
    full, lora = flops_per_token(EIGHT_B, 8192), flops_per_token(EIGHT_B, 8192, lora=True)
    assert full - lora == 2 * (EIGHT_B.parameters - EIGHT_B.embedding_parameters)


@pytest.mark.parametrize("window", [256, 2048, 4096, 6000, 8191, 8192, 100_000])
def test_a_window_never_adds_flops(window: int) -> None:
    full = attention_flops_per_token(EIGHT_B, 8192)
    assert attention_flops_per_token(replace(EIGHT_B, sliding_window=window, sliding_layers=32), 8192) <= full


def test_a_short_window_counts_its_own_keys() -> None:
    full = attention_flops_per_token(EIGHT_B, 8192)
    half = attention_flops_per_token(replace(EIGHT_B, sliding_window=128, sliding_layers=16), 8192)
    assert half == pytest.approx(full * (0.5 + 0.5 * 128 / 4096), rel=0.01)


# --- units


def test_a_step_of_8b_on_8_h100_is_seconds() -> None:
    seconds = step_of(EIGHT_B, Layout(fsdp=8), 64, sequence=8192, cluster=cluster_of("p5.48xlarge", 1))
    flops = flops_per_token(EIGHT_B, 8192) * 64 * 8192
    mfu = flops / seconds / (8 * 989.5e12)
    assert 5 < seconds < 15
    assert 0.3 < mfu < 0.65


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_no_layout_beats_the_matrix_unit(shape: ModelShape) -> None:
    for layout in (Layout(fsdp=64), Layout(fsdp=32, tp=2), Layout(pp=2, fsdp=32), Layout(replicate=8, fsdp=8)):
        seconds = step_of(shape, layout, 256)
        assert 0 < flops_per_token(shape, 4096) * 256 * 4096 / seconds / (64 * 989.5e12) < 0.9


def test_twice_the_batch_is_nearly_twice_the_step() -> None:
    for layout in (Layout(fsdp=64), Layout(fsdp=8, tp=8), Layout(pp=4, fsdp=16, zero=1)):
        once, twice = step_of(EIGHT_B, layout, 512), step_of(EIGHT_B, layout, 1024)
        assert 1.8 < twice / once <= 2.0


def test_twice_the_layers_is_nearly_twice_the_step() -> None:
    deeper = replace(EIGHT_B, layers=64)
    assert 1.8 < step_of(deeper, Layout(fsdp=64), 512) / step_of(EIGHT_B, Layout(fsdp=64), 512) < 2.0


def test_twice_the_gpus_at_most_halve_the_step() -> None:
    small, large = cluster_of("p5.48xlarge", 8), cluster_of("p5.48xlarge", 16)
    once = step_of(EIGHT_B, Layout(fsdp=64), 1024, cluster=small)
    assert 0.5 <= step_of(EIGHT_B, Layout(fsdp=128), 1024, cluster=large) / once < 0.6


def test_a_longer_sequence_costs_more_a_token() -> None:
    short = step_of(EIGHT_B, Layout(fsdp=64, micro_batch=2), 512, sequence=4096)
    long = step_of(EIGHT_B, Layout(fsdp=64, micro_batch=1), 256, sequence=8192)
    assert 1.0 < long / short < 1.3


# --- what the parts of a layout cost


def test_parts_add_up_and_none_is_negative() -> None:
    for shape, layout in (
        (EIGHT_B, Layout(fsdp=64)),
        (EIGHT_B, Layout(pp=4, replicate=2, fsdp=2, cp=2, tp=2, recompute="full")),
        (EXPERTS, Layout(fsdp=64, ep=8)),
        (LATENT, Layout(pp=2, fsdp=32, ep=16, zero=1, recompute="selective")),
    ):
        times = times_of(shape, layout, 256)
        parts = {field.name: float(getattr(times, field.name)) for field in fields(StepTimes)}
        assert min(parts.values()) >= 0, parts
        hidden = parts.pop("hidden")
        assert sum(parts.values()) == pytest.approx(float(times.step_seconds))
        assert hidden >= 0


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(), set()),
        (Layout(replicate=8), {"gradients"}),
        (Layout(fsdp=8), {"shard"}),
        (Layout(fsdp=8, zero=1), {"gradients"}),
        (Layout(tp=8), {"tensor", "gradients"}),  # of norms, which each rank knows for its own tokens
        (Layout(pp=4), {"bubble", "send"}),
        (Layout(cp=4), {"context", "shard"}),
        (Layout(replicate=2, fsdp=4), {"shard", "gradients"}),
    ],
    ids=lambda given: str(given) if isinstance(given, Layout) else " ".join(sorted(given)),
)
def test_a_layout_pays_for_what_it_uses_and_for_nothing_else(layout: Layout, parts: set[str]) -> None:
    times = times_of(EIGHT_B, layout, 64)
    communication = ("tensor", "context", "exchange", "shard", "gradients", "bubble", "send", "recompute", "straggle")
    assert {name for name in communication if getattr(times, name) > 0} == parts


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2), Layout(fsdp=2)], ids=str)
@pytest.mark.parametrize("shape", [EIGHT_B, EXPERTS], ids=lambda shape: shape.name)
def test_two_ranks_share_the_work(shape: ModelShape, layout: Layout) -> None:
    """However a layout splits the model or the batch, each rank multiplies and attends for about half as long."""
    alone, shared = times_of(shape, Layout(), 16), times_of(shape, layout, 16)
    for part in ("gemm", "attention", "experts") if shape.is_moe else ("gemm", "attention"):
        assert 0.45 < getattr(shared, part) / getattr(alone, part) < 0.8, part


def test_only_experts_pay_for_experts() -> None:
    dense, moe = times_of(EIGHT_B, Layout(fsdp=64), 256), times_of(EXPERTS, Layout(fsdp=64, ep=8), 256)
    for part in ("experts", "permute", "dispatch", "exchange"):
        assert getattr(dense, part) == 0 < getattr(moe, part)
    assert times_of(EXPERTS, Layout(fsdp=64), 256).exchange == 0


def test_out_of_balance_experts_are_slower() -> None:
    layout = Layout(fsdp=64, ep=8)
    assert step_of(EXPERTS, layout, 256, imbalance=1.5) > step_of(EXPERTS, layout, 256, imbalance=1.0)


def test_recompute_costs_time_full_most() -> None:
    none, selective, full = (
        step_of(EIGHT_B, Layout(fsdp=64, recompute=recompute), 512) for recompute in ("none", "selective", "full")
    )
    assert none < selective < full
    assert 1.15 < full / none < 1.45  # one more forward pass beside three


@pytest.mark.parametrize("layout", [Layout(fsdp=64), Layout(fsdp=64, zero=1), Layout(replicate=64)], ids=str)
def test_no_more_is_hidden_than_there_is_to_hide_behind(layout: Layout) -> None:
    slow = replace(H100, instance=replace(H100.instance, network_bytes_per_second=1e9))
    times = times_of(EIGHT_B, layout, 64, cluster=slow)
    compute = times.gemm + times.attention + times.elementwise + times.head + times.host
    assert 0.5 * compute < times.hidden < compute
    assert times.shard + times.gradients > 10 * compute


def test_more_micro_batches_shrink_the_bubble() -> None:
    few, many = times_of(EIGHT_B, Layout(pp=8), 8), times_of(EIGHT_B, Layout(pp=8), 64)
    assert few.bubble / few.step_seconds > 2 * many.bubble / many.step_seconds
    # 1F1B: (pp - 1) / micro-batches of the compute, times the stack's constant
    assert few.bubble == pytest.approx(many.bubble)


def test_interleaving_and_zero_bubble_shrink_the_bubble() -> None:
    plain = times_of(EIGHT_B, Layout(pp=4), 16)
    interleaved = times_of(EIGHT_B, Layout(pp=4, vpp=4, schedule="interleaved"), 16)
    zero_bubble = times_of(EIGHT_B, Layout(pp=4, schedule="zero-bubble"), 16)
    assert interleaved.bubble == pytest.approx(plain.bubble / 4)
    assert zero_bubble.bubble == pytest.approx(plain.bubble / 3)


def test_tensor_parallel_across_nodes_is_far_slower_than_inside_one() -> None:
    inside = times_of(EIGHT_B, Layout(fsdp=2, tp=8), 64)
    outside = times_of(replace(EIGHT_B, kv_heads=16), Layout(tp=16), 64)
    assert outside.tensor > 3 * inside.tensor


def test_the_fullest_rank_holds_the_most_layers() -> None:
    assert fullest_rank(32, 1, 1, 1) == (32, 1)
    assert fullest_rank(32, 1, 4, 1) == (8, 1)
    assert fullest_rank(32, 1, 4, 2) == (8, 1)
    assert fullest_rank(33, 1, 4, 2)[0] == 9
    assert fullest_rank(30, 1, 4, 1) == (8, 0)  # one stage of the four has six layers and the head


@settings(max_examples=40)
@given(pp=st.integers(1, 32), vpp=st.integers(1, 4), layers=st.integers(4, 126))
def test_no_rank_has_less_than_its_share(pp: int, vpp: int, layers: int) -> None:
    assume(pp * vpp <= layers)
    fullest, _ = fullest_rank(float(layers), 1.0, pp, vpp)
    assert layers / pp <= fullest <= layers


def test_a_pipeline_is_never_faster_than_its_share_of_the_work() -> None:
    """126 layers on 8 ranks of 16, and a head that is worth several layers: all of it is in the step."""
    shape = model_preset("llama-3.1-405b")
    whole = times_of(shape, Layout(), 8)
    spread = times_of(shape, Layout(pp=8), 8)
    for name in ("gemm", "attention", "head"):
        assert getattr(spread, name) <= getattr(whole, name)
    work = whole.gemm + whole.attention + whole.head
    assert spread.gemm + spread.attention + spread.head >= 0.99 * work / 8


def test_many_steps_at_once_give_what_each_gives_alone() -> None:
    """A search and a fit evaluate stacked terms; the layouts and precisions differ in which constants they use."""
    profile = find_profile("megatron-bridge", H100.instance.gpu)
    model = _model(EXPERTS, 256, 4096, H100, profile)
    layouts = [
        Layout(fsdp=64),
        Layout(fsdp=64, precision="fp8"),
        Layout(pp=2, fsdp=32, ep=8, precision="mxfp8", zero=1),
        Layout(replicate=8, fsdp=4, tp=2, recompute="full"),
        Layout(pp=4, cp=2, fsdp=8, vpp=3, schedule="interleaved", zero=2),
    ]
    terms = [model.terms(layout) for layout in layouts]
    constants = np.exp(np.array(profile.log_constants))
    alone = [float(compose(term, constants).step_seconds) for term in terms]
    for values in (constants, np.tile(constants, (5, 1)).T):
        assert np.asarray(compose(stack(terms), values).step_seconds) == pytest.approx(alone, rel=1e-12)


def test_constants_mean_what_they_say() -> None:
    """Better efficiencies are faster, more of what costs time is slower: no constant is wired to the wrong place."""
    faster = {name for name in NAMES if name.endswith("efficiency")}
    base = np.exp(np.array(find_profile("craton", H100.instance.gpu).log_constants))
    model = _model(EXPERTS, 256, 4096, H100, find_profile("craton", H100.instance.gpu))
    busy = replace(Layout(), pp=2, replicate=2, fsdp=2, cp=2, tp=4, ep=4, recompute="full")
    touched = {}
    for name in NAMES:
        precisions = {"fp8_efficiency": "fp8", "mxfp8_efficiency": "mxfp8", "fp4_efficiency": "nvfp4"}
        terms = model.terms(replace(busy, precision=precisions.get(name, "bf16"), zero=2))  # type: ignore[arg-type]
        constants = base.copy()
        constants[INDEX[name]] *= 1.2
        touched[name] = float(compose(terms, constants).step_seconds / compose(terms, base).step_seconds)
    assert {name for name in touched if touched[name] < 1.0} == faster
    assert {name for name in touched if touched[name] > 1.0} == set(NAMES) - faster


def test_traits_move_the_prior_where_they_say() -> None:
    plain = dict(zip(NAMES, prior_log(Traits()), strict=True))
    eager = dict(zip(NAMES, prior_log(Traits(compiled=False)), strict=True))
    assert {name for name in NAMES if eager[name] != plain[name]} == {"elementwise_passes", "launch_seconds"}
    assert eager["launch_seconds"] > plain["launch_seconds"]


def exchange_seconds(tp: int, *, adjacent: bool) -> float:
    place = machine_of(H100)
    profile = find_profile("craton", H100.instance.gpu)
    model = StepModel(EXPERTS, 4096, 64, place.rates, place.network, profile.traits, adjacent_experts=adjacent)
    terms = model.terms(Layout(fsdp=64 // tp, tp=tp, ep=8))
    return float(compose(terms, np.exp(np.array(profile.log_constants))).exchange)


def test_expert_ranks_are_tp_apart_and_pay_for_leaving_the_node() -> None:
    assert exchange_seconds(1, adjacent=False) == exchange_seconds(1, adjacent=True)
    # 8 expert ranks, 2 apart, lie on two nodes; published runs keep them on one
    assert exchange_seconds(2, adjacent=False) > 3 * exchange_seconds(2, adjacent=True)


def test_gradients_of_experts_are_reduced_once_and_whole() -> None:
    """Under DDP a rank reduces its experts' gradients with the others that hold them, and all of them."""
    place = machine_of(H100)
    model = StepModel(EXPERTS, 4096, 64, place.rates, place.network, Traits())
    terms = model.terms(Layout(replicate=64, ep=8))
    experts = EXPERTS.moe_layers * EXPERTS.expert_parameters * EXPERTS.experts / 8
    others = EXPERTS.layers * terms.layer.parameters + terms.head.parameters
    expected = all_reduce_seconds(2 * others, group_of(64, 1, place.network), place.network)
    expected += all_reduce_seconds(2 * experts, group_of(8, 8, place.network), place.network)
    assert terms.once_reduce_seconds == pytest.approx(expected)


def test_lora_is_faster_than_full_training_and_slower_than_two_thirds_of_it() -> None:
    full, lora = (step_of(EIGHT_B, Layout(fsdp=64), 512, lora=lora) for lora in (False, True))
    assert 0.6 < lora / full < 0.85


# --- better hardware never hurts


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ModelShape, Layout, int, int]:
    shape = draw(st.sampled_from(SHAPES))
    precision = draw(st.sampled_from(["bf16", "fp8"]))
    pp = draw(st.sampled_from([1, 1, 2, 4, 5]))
    layout = Layout(
        pp=pp,
        replicate=draw(st.sampled_from([1, 2, 8])),
        fsdp=draw(st.sampled_from([1, 2, 8, 16])),
        cp=draw(st.sampled_from([1, 1, 2, 4])),
        tp=draw(st.sampled_from([1, 2, 4, 8, 16])),
        ep=draw(st.sampled_from([1, 4, 8, 16])) if shape.is_moe else 1,
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=precision,  # type: ignore[arg-type]
        zero=draw(st.sampled_from([1, 2, 3])),
        schedule=draw(st.sampled_from(["1f1b", "zero-bubble"])) if pp > 1 else "1f1b",
        offload=draw(st.sampled_from(["none", "none", "optimizer", "activations"])),
    )
    sequence = draw(st.sampled_from([1024, 4096]))
    batch = layout.data_parallel * layout.micro_batch * draw(st.sampled_from([1, 2, 8]))
    assume(layout_is_valid(layout, shape, layout.world, batch, sequence))
    return shape, layout, batch, sequence


def better(what: str, factor: float, nodes: int) -> Cluster:
    """A p5 cluster whose one rate is multiplied."""
    cluster = cluster_of("p5.48xlarge", nodes)
    node, card = cluster.instance, cluster.instance.gpu
    if what == "network":
        return replace(cluster, instance=replace(node, network_bytes_per_second=factor * node.network_bytes_per_second))
    if what == "nvlink":
        card = replace(card, nvlink_bytes_per_second=factor * card.nvlink_bytes_per_second)
    elif what == "memory":
        card = replace(card, memory_bytes_per_second=factor * card.memory_bytes_per_second)
    else:
        card = replace(
            card,
            flops={name: factor * value for name, value in card.flops.items()},
            achievable_flops={name: factor * value for name, value in card.achievable_flops.items()},
        )
    return replace(cluster, instance=replace(node, gpu=card))


@pytest.mark.parametrize("what", ["network", "nvlink", "memory", "flops"])
@settings(max_examples=30)
@given(
    job=jobs(),
    factor=st.sampled_from([1.1, 2.0, 30.0]),
    software=st.sampled_from(["craton", "nanotron", "megatron-bridge", "llm-foundry"]),
)
@example(job=(EIGHT_B, Layout(replicate=8, fsdp=8), 64, 1024), factor=1.5, software="nanotron")
@example(job=(UNEVEN, Layout(pp=4, tp=16), 8, 4096), factor=2.0, software="craton")
@example(job=(SMALL, Layout(pp=4, offload="activations"), 1, 4096), factor=30.0, software="craton")
@example(job=(EIGHT_B, Layout(fsdp=2, tp=8, zero=1, offload="activations"), 2, 1024), factor=1.1, software="nanotron")
def test_better_hardware_never_makes_a_step_slower(
    what: str, job: tuple[ModelShape, Layout, int, int], factor: float, software: str
) -> None:
    shape, layout, batch, sequence = job
    nodes = max(1, layout.world // 8)
    profile = find_profile(software, H100.instance.gpu)
    before, after = (
        predict(profile, _model(shape, batch, sequence, better(what, scale, nodes), profile).terms(layout)).seconds
        for scale in (1.0, factor)
    )
    assert after <= before * (1 + 1e-9), f"{what} x {factor}: {before:.6g} s became {after:.6g} s"


@settings(max_examples=25)
@given(job=jobs(), software=st.sampled_from(["craton", "nanotron", "llm-foundry"]))
def test_every_step_is_finite_and_its_interval_holds_it(
    job: tuple[ModelShape, Layout, int, int], software: str
) -> None:
    shape, layout, batch, sequence = job
    profile = find_profile(software, H100.instance.gpu)
    terms = _model(shape, batch, sequence, H100, profile).terms(layout)
    step = predict(profile, terms)
    assert 0 < step.low < step.seconds < step.high < math.inf
    times = compose(terms, np.exp(np.array(profile.log_constants)))
    assert all(getattr(times, field.name) >= -1e-12 for field in fields(StepTimes))


@settings(max_examples=12)
@given(job=jobs())
def test_more_work_is_never_faster(job: tuple[ModelShape, Layout, int, int]) -> None:
    shape, layout, batch, sequence = job
    base = step_of(shape, layout, batch, sequence=sequence)
    wider = replace(shape, ffn_hidden=2 * shape.ffn_hidden, moe_ffn_hidden=2 * shape.moe_ffn_hidden)
    assert step_of(shape, layout, 2 * batch, sequence=sequence) > base
    assert step_of(wider, layout, batch, sequence=sequence) > base
    assert step_of(replace(shape, vocab=2 * shape.vocab), layout, batch, sequence=sequence) >= base
    assert step_of(shape, layout, batch, sequence=2 * sequence) > base


def test_a_leaf_that_is_oversubscribed_is_slower_only_between_leaves() -> None:
    narrow = replace(H100, leaf_nodes=2, spine_oversubscription=8.0)
    far, near = Layout(fsdp=64), Layout(replicate=1, fsdp=16)
    assert step_of(EIGHT_B, far, 64, cluster=narrow) > step_of(EIGHT_B, far, 64)
    assert step_of(EIGHT_B, near, 16, cluster=narrow) == step_of(EIGHT_B, near, 16)
