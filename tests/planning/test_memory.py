"""Memory of a training step against formulas, published peaks, and the rule that what ran must fit."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.infrastructure.catalog import gpu
from craton.job.layout import Layout
from craton.job.model import MlaShape, ModelShape, model_preset
from craton.planning.calibration import STACKS, Case, load_cases
from craton.planning.memory import Memory, memory, memory_bytes, memory_bytes_of
from craton.planning.memory.peak import INSTANTS
from craton.planning.software import Traits
from craton.planning.step import Workload, adapter_parameters

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "data" / "training_results.json"
RUNTIME = "runtime and communicators"

LLAMA_8B = model_preset("llama-3.1-8b")
LLAMA_70B = model_preset("llama-3.1-70b")
LLAMA_405B = model_preset("llama-3.1-405b")
DEEPSEEK_V3 = model_preset("deepseek-v3")
QWEN_30B = model_preset("qwen3-30b-a3b")
MEGATRON = Traits(dispatcher="deepep", selective="modules")
MEGATRON_2022 = Traits(attention="unfused", compiled=False, sequence_parallel=False, master_gradients=True)
PLAIN = Traits(compiled=False)
TORCHTITAN = Traits(attention="flash2", selective="operators", master_gradients=True)  # reduces in fp32


def step(shape: ModelShape, layout: Layout, sequence: int = 4096, micro_batches: int = 8, **options: Any) -> Workload:
    return Workload(shape, layout, sequence, micro_batches * layout.data_parallel * layout.micro_batch, **options)


def allocated(result: Memory) -> float:
    """What a framework reports as its peak: everything but the CUDA context and NCCL."""
    return result.total_bytes - result.parts[RUNTIME]


def allocated_bytes(work: Workload, traits: Traits) -> float:
    return allocated(memory(work, traits))


# --- formulas


def gpt(layers: int) -> ModelShape:
    return ModelShape("GPT", layers, 6144, 4 * 6144, 64, 64, 96, 51200, tied_embeddings=True, gated_mlp=False)


def activations_of_a_layer(layout: Layout, traits: Traits, sequence: int = 2048) -> float:
    """The difference between two models that differ by one layer."""
    more, less = (memory(step(gpt(layers), layout, sequence), traits) for layers in (25, 24))
    return more.parts["activations"] - less.parts["activations"]


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_activations_of_a_2022_layer_are_korthikantis(micro_batch: int) -> None:
    """arXiv:2205.05198, equations 1, 2 and 4, and table 2."""
    s, b, h, a = 2048, micro_batch, 6144, 64
    sequence_parallel = replace(MEGATRON_2022, sequence_parallel=True)
    alone = Layout(micro_batch=b)
    split = Layout(tp=8, micro_batch=b)
    scores = 5 * a * s / h

    def per_layer(layout: Layout, traits: Traits = MEGATRON_2022) -> Any:
        return pytest.approx(activations_of_a_layer(layout, traits), abs=2)

    assert s * b * h * (34 + scores) == per_layer(alone)
    assert s * b * h * (10 + 24 / 8 + scores / 8) == per_layer(split)
    assert s * b * h / 8 * (34 + scores) == per_layer(split, sequence_parallel)
    assert s * b * h * (10 + 24 / 8) == per_layer(replace(split, recompute="selective"))
    assert s * b * h * 34 / 8 == per_layer(replace(split, recompute="selective"), sequence_parallel)
    assert s * b * h * 2 == per_layer(replace(split, recompute="full"))


@pytest.mark.parametrize(("vpp", "factor"), [(1, 1.0), (2, 1 + 7 / 16), (3, 1 + 7 / 24)])
def test_first_pipeline_rank_holds_what_interleaving_adds(vpp: int, factor: float) -> None:
    """arXiv:2205.05198, section 4.2.3: L layers in flight, times 1 + (p - 1)/(p · m) when interleaved."""
    layout = Layout(pp=8, tp=8, vpp=vpp, schedule="interleaved" if vpp > 1 else "1f1b")
    result = memory(step(gpt(48), layout, 2048, micro_batches=64), MEGATRON_2022)
    a_layer = 2048 * 6144 * (10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8)
    assert result.parts["activations"] == pytest.approx(48 * a_layer * factor, rel=1e-9)


def states(result: Memory) -> float:
    return sum(result.parts[name] for name in ("parameters", "gradients", "optimizer states"))


@pytest.mark.parametrize(
    ("layout", "gigabytes"),
    [
        (Layout(replicate=64), 120.0),
        (Layout(fsdp=64, zero=1), 31.4),
        (Layout(fsdp=64, zero=2), 16.6),
        (Layout(fsdp=64, zero=3), 1.88),
    ],
)
def test_states_are_those_of_the_zero_paper(layout: Layout, gigabytes: float) -> None:
    """arXiv:1910.02054, figure 1: 7.5 billion parameters on 64 GPUs."""
    shape = ModelShape("7.5B", 36, 4096, 4 * 4096, 32, 32, 128, 50176, tied_embeddings=True, gated_mlp=False)
    states_per_parameter = states(memory(step(shape, layout, 1024), Traits())) / shape.parameters
    assert states_per_parameter * 7.5 == pytest.approx(gigabytes, rel=0.005)


def test_bytes_of_a_parameter() -> None:
    def per_parameter(traits: Traits = MEGATRON, **layout: Any) -> float:
        return states(memory(step(LLAMA_8B, Layout(**layout)), traits)) / LLAMA_8B.parameters

    assert per_parameter() == pytest.approx(16, rel=1e-4)
    assert per_parameter(precision="fp32") == pytest.approx(16, rel=1e-4)
    assert per_parameter(replace(MEGATRON, master_gradients=True)) == pytest.approx(18, rel=1e-4)
    assert per_parameter(precision="mxfp8") == pytest.approx(16, rel=0.01)  # two copies of a byte for one of two
    assert per_parameter(precision="nvfp4") < 15.5
    assert per_parameter(fsdp=4) == pytest.approx((4 + 4 + 8) / 4, rel=1e-4)
    assert per_parameter(cp=4) == pytest.approx(2 + 2 + 12 / 4, rel=1e-4)


def test_bytes_of_a_parameter_without_fp32_weights() -> None:
    def per_parameter(**layout: Any) -> float:
        work = step(LLAMA_8B, Layout(**layout), weights="bf16")
        return states(memory(work, MEGATRON)) / LLAMA_8B.parameters

    assert per_parameter() == pytest.approx(2 + 2 + 2 + 2, rel=1e-4)
    assert per_parameter(fsdp=4) == pytest.approx(8 / 4, rel=1e-4)
    assert per_parameter(fsdp=4, zero=1) == pytest.approx(2 + 2 + 4 / 4, rel=1e-4)


def test_adapters_need_weights_and_little_else() -> None:
    result = memory(step(LLAMA_8B, Layout(recompute="full"), lora=True), MEGATRON)
    assert result.parts["parameters"] == pytest.approx(2 * LLAMA_8B.parameters, rel=1e-4)
    assert result.parts["gradients"] + result.parts["optimizer states"] < 0.05 * result.parts["parameters"]


@pytest.mark.parametrize("traits", [MEGATRON, STACKS["craton"]], ids=["megatron", "craton"])
def test_states_of_adapters_grow_with_their_rank(traits: Traits) -> None:
    """Of an 8B rank 16 trains 38M parameters: queries, keys and values share an adapter."""

    def states(rank: int) -> float:
        return memory(step(LLAMA_8B, Layout(fsdp=8), lora=True, lora_rank=rank), traits).parts["optimizer states"]

    assert adapter_parameters(LLAMA_8B, 16) == 32 * 16 * (4096 + 6144 + 2 * 4096 + 3 * (4096 + 14336))
    assert states(128) == pytest.approx(8 * states(16), rel=0.01)


def test_a_model_without_a_gate_needs_less() -> None:
    """In our own stack a gate is one more weight of each layer, and one more output that is kept."""
    plain = model_preset("gpt3-6.7b")
    gated = replace(plain, gated_mlp=True)
    layout = Layout(fsdp=8)
    without, with_gate = (memory(step(shape, layout, 2048, 1), STACKS["craton"]) for shape in (plain, gated))
    weight = plain.hidden * plain.ffn_hidden
    assert with_gate.parts["parameters"] - without.parts["parameters"] == 32 * 4 * weight / 8
    kept = 2 * 2048 * plain.ffn_hidden
    assert 31 * kept <= with_gate.parts["activations"] - without.parts["activations"] <= 32 * kept
    assert without.total_bytes < with_gate.total_bytes


def test_tied_embeddings_are_held_by_both_ends_of_a_pipeline() -> None:
    tied = replace(LLAMA_8B, tied_embeddings=True)
    assert memory_bytes(step(tied, Layout()), MEGATRON) < memory_bytes(step(LLAMA_8B, Layout()), MEGATRON)
    pipeline = Layout(pp=4)
    assert memory_bytes(step(tied, pipeline), MEGATRON) == memory_bytes(step(LLAMA_8B, pipeline), MEGATRON)


def test_offload_leaves_a_buffer() -> None:
    layout = Layout(fsdp=8, zero=1, micro_batch=2)
    all_here = memory(step(LLAMA_8B, layout), MEGATRON)
    optimizer = memory(step(LLAMA_8B, replace(layout, offload="optimizer")), MEGATRON)
    activations = memory(step(LLAMA_8B, replace(layout, offload="activations")), MEGATRON)
    assert optimizer.parts["optimizer states"] < 0.1 * all_here.parts["optimizer states"]
    assert activations.parts["activations"] == pytest.approx(2 / 32 * all_here.parts["activations"], rel=0.1)


def test_gradients_come_with_the_backward_pass() -> None:
    once = memory(step(LLAMA_8B, Layout(), micro_batches=1), Traits())
    accumulating = memory(step(LLAMA_8B, Layout(), micro_batches=2), Traits())
    start = "start of forward"
    assert accumulating.instants[start] - once.instants[start] == pytest.approx(2 * LLAMA_8B.parameters, rel=1e-4)


def test_a_chunked_head_never_holds_the_logits() -> None:
    work = step(model_preset("llama-3.2-1b"), Layout(micro_batch=8))
    assert memory(work, PLAIN).parts["logits"] > 40e9
    traits = replace(PLAIN, chunked_head=True)
    chunked = memory(work, traits)
    assert chunked.parts.get("logits", 0.0) < 3e9
    assert chunked.total_bytes == memory_bytes(work, traits)


def test_communicators_that_leave_the_node_cost_more() -> None:
    work = step(LLAMA_70B, Layout(fsdp=8, tp=8, zero=1))
    assert memory(work, MEGATRON, 4).parts[RUNTIME] > memory(work, MEGATRON, 8).parts[RUNTIME]
    assert memory(step(LLAMA_8B, Layout()), MEGATRON).parts[RUNTIME] == GIB


# --- published peaks

ONE_H200 = [  # (preset, batch, transformers GiB, transformers with Liger kernels GiB), torch 2.11, sequence 4096
    ("llama-3.1-8b", 1, 75, 63),
    ("llama-3.1-8b", 2, 106, 80),
    ("llama-3.2-3b", 4, 100, 60),
    ("llama-3.2-1b", 8, 109, 47),
]


@pytest.mark.parametrize(("preset", "batch", "plain", "liger"), ONE_H200)
def test_one_h200(preset: str, batch: int, plain: float, liger: float) -> None:
    """Weights and moments were bf16. Liger's kernels fuse what a compiler fuses and chunk the head."""
    shape = replace(model_preset(preset), tied_embeddings=False)
    work = step(shape, Layout(micro_batch=batch), micro_batches=1, weights="bf16")

    def peak(traits: Traits, chunked_head: bool) -> float:
        parts = memory(work, replace(traits, chunked_head=chunked_head)).parts
        return sum(size for name, size in parts.items() if name not in ("allocator slack", RUNTIME)) / GIB

    assert peak(PLAIN, False) == pytest.approx(plain, rel=0.02)
    assert peak(Traits(), True) == pytest.approx(liger, rel=0.04)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load_cases(RESULTS)[0]


def work_of(case: Case) -> Workload:
    return Workload(case.shape, case.layout, case.sequence, case.global_batch_sequences, case.lora)


def test_nanotron_peaks(cases: list[Case]) -> None:
    """Peaks printed in nanotron's benchmark figure. 1.34B on 512 GPUs prints 8.4 GB, less than its states, activations
    and logits in 16 bit; it is left out of the bound for single rows."""
    notes = {row["id"]: row.get("notes") or "" for row in json.loads(RESULTS.read_text())["cases"]}
    errors = {}
    for case in cases:
        peak = re.search(r"peak memory ([\d.]+)GB", notes[case.id])
        if peak:
            errors[case.id] = allocated_bytes(work_of(case), case.traits) / (float(peak[1]) * 1e9) - 1
    assert len(errors) == 14
    assert statistics.median(abs(error) for error in errors.values()) < 0.07
    assert abs(statistics.median(errors.values())) < 0.05
    del errors["nanotron-h100-1.34B-512g"]
    assert max(abs(error) for error in errors.values()) < 0.21


TORCHTITAN_PEAKS = [
    # (shape, layout, sequence, traits, reserved GiB, lowest and highest error); pytorch/torchtitan, benchmarks/:
    # llama3_8b_h200_2025-06_torchtitan.md, which compiles the loss
    (LLAMA_8B, Layout(fsdp=32, micro_batch=2, recompute="selective"), 8192, TORCHTITAN, 47.96, (0.0, 0.08)),
    (LLAMA_8B, Layout(fsdp=64, micro_batch=2, recompute="selective"), 8192, TORCHTITAN, 46.97, (0.0, 0.08)),
    # llama3_h100_202412_torchtitan.md, which does not
    (LLAMA_8B, Layout(fsdp=8, micro_batch=2, recompute="selective"), 8192, PLAIN, 82.4, (-0.15, 0.0)),
    (LLAMA_8B, Layout(fsdp=8, micro_batch=2, recompute="selective"), 8192, PLAIN, 77.0, (-0.10, 0.0)),
    (LLAMA_8B, Layout(fsdp=128, micro_batch=2, recompute="selective"), 8192, PLAIN, 67.0, (-0.12, 0.0)),
    (LLAMA_8B, Layout(fsdp=128, micro_batch=2, recompute="selective"), 8192, PLAIN, 62.0, (-0.05, 0.0)),
    (LLAMA_8B, Layout(fsdp=8, recompute="full"), 32768, PLAIN, 83.9, (-0.16, 0.0)),
    (LLAMA_8B, Layout(fsdp=2, cp=4, recompute="full"), 131072, PLAIN, 84.0, (-0.16, 0.0)),
    (LLAMA_70B, Layout(fsdp=32, tp=8, micro_batch=16, recompute="full"), 8192, PLAIN, 71.9, (-0.30, 0.0)),
    (LLAMA_405B, Layout(pp=8, fsdp=8, tp=8, recompute="full"), 32768, PLAIN, 75.3, (-0.10, 0.05)),
    (LLAMA_405B, Layout(pp=8, fsdp=2, cp=4, tp=8, recompute="full"), 131072, PLAIN, 77.1, (-0.10, 0.05)),
]


@pytest.mark.parametrize(("shape", "layout", "sequence", "traits", "reserved", "bounds"), TORCHTITAN_PEAKS)
def test_torchtitan_peaks(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    traits: Traits,
    reserved: float,
    bounds: tuple[float, float],
) -> None:
    work = step(shape, layout, sequence, micro_batches=8 if layout.pp > 1 else 1)
    error = allocated_bytes(work, replace(traits, selective="operators", master_gradients=True)) / (reserved * GIB) - 1
    assert bounds[0] <= error <= bounds[1]


MOONLIGHT = ModelShape(
    "Moonlight-16B-A3B",
    layers=27,
    hidden=2048,
    ffn_hidden=11264,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=163840,
    mla=MlaShape(q_lora=0, kv_lora=512, qk_nope=128, qk_rope=64, v_head=128),
    experts=64,
    top_k=6,
    moe_ffn_hidden=1408,
    shared_experts=2,
    dense_layers=1,
)


def test_megatron_bridge_peaks() -> None:
    """NVIDIA-NeMo/Megatron-Bridge at 067f987, skills/nemo-mbridge-perf-expert-parallel-overlap and
    -activation-recompute."""
    qwen = allocated_bytes(step(QWEN_30B, Layout(fsdp=16, ep=16, zero=1), micro_batches=64), MEGATRON)
    assert qwen == pytest.approx(62.166 * GIB, rel=0.06)
    # bf16 moments: eight bytes a parameter of optimizer instead of twelve, and no fp32 copy of the gradients
    moonlight = memory(step(MOONLIGHT, Layout(fsdp=4, tp=2, ep=8, zero=1), micro_batches=1), MEGATRON)
    fixed = moonlight.parts[RUNTIME] + moonlight.parts["optimizer states"] * 4 / 12
    assert moonlight.instants["loss"] - fixed == pytest.approx(36.618e9, rel=0.06)
    # the peak of the rank that prints, which has fewer micro-batches in flight than rank 0
    sft = Layout(pp=4, fsdp=2, tp=4, vpp=5, zero=1, schedule="interleaved", precision="fp8")
    assert 58.8e9 < allocated_bytes(step(LLAMA_70B, sft, micro_batches=16), MEGATRON) < 1.2 * 58.8e9


def over_the_card(case: Case, layout: Layout, traits: Traits) -> bool:
    needed = memory_bytes(replace(work_of(case), layout=layout), traits, case.machine.node_gpus)
    return needed > gpu(case.machine.gpu).memory_bytes


def test_runs_that_were_published_fit(cases: list[Case]) -> None:
    """Sources rarely state recompute; a run that fits with some is one that can have happened. Megatron-Bridge's
    benchmarks reduce gradients in 16 bit (perf_recipes/_common.py: grad_reduce_in_fp32 = False)."""
    stated = resolved = 0
    for case in cases:
        traits = replace(case.traits, master_gradients=False) if case.family == "megatron-bridge" else case.traits
        choices = [case.layout]
        if "recompute" in case.open_fields:
            choices += [replace(case.layout, recompute="selective"), replace(case.layout, recompute="full")]
        over = [over_the_card(case, layout, traits) for layout in choices]
        stated += over[0]
        resolved += all(over)
    assert len(cases) >= 470
    assert resolved <= 0.03 * len(cases)
    assert stated <= 0.08 * len(cases)


def test_runs_with_the_largest_micro_batch_are_near_the_card(cases: list[Case]) -> None:
    """llm-foundry's tables use the largest micro-batch that fitted: a model that is too kind would call them small."""
    shares = [
        memory_bytes(work_of(case), case.traits, case.machine.node_gpus) / gpu(case.machine.gpu).memory_bytes
        for case in cases
        if case.family == "llm-foundry" and case.layout.recompute == "none" and case.layout.micro_batch >= 8
    ]
    assert len(shares) > 40
    assert 0.75 < statistics.median(shares) < 1.0


NANOTRON_3B = ModelShape("3.57B", 28, 3072, 8192, 32, 32, 96, 131072, tied_embeddings=True)


@pytest.mark.parametrize(
    ("work", "traits", "card"),
    [
        # sixteen bytes a parameter do not fit a card of 80 GB
        (step(LLAMA_8B, Layout(recompute="full")), PLAIN, "H100-SXM"),
        # torchtitan's performance page of 2024 reports this one out of memory
        (step(LLAMA_405B, Layout(fsdp=128, recompute="full"), 8192, 1), TORCHTITAN, "H100-SXM-96-500W"),
        # huggingface/nanotron, scripts/scaling_benchmarks.py: "TP=1 OOMs"
        (step(NANOTRON_3B, Layout(), 4096, 1), replace(PLAIN, master_gradients=True), "H100-SXM"),
    ],
)
def test_runs_that_did_not_fit(work: Workload, traits: Traits, card: str) -> None:
    assert memory_bytes(work, traits) > gpu(card).memory_bytes


# --- properties

SHAPES = [LLAMA_8B, LLAMA_70B, QWEN_30B, DEEPSEEK_V3]
powers = st.sampled_from([1, 2, 4, 8])


@st.composite
def works(draw: st.DrawFn) -> Workload:
    shape = draw(st.sampled_from(SHAPES))
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    layout = Layout(
        pp=pp,
        replicate=draw(st.sampled_from([1, 2])),
        fsdp=draw(powers),
        cp=draw(st.sampled_from([1, 2])),
        tp=draw(powers),
        ep=draw(st.sampled_from([1, 2])) if shape.is_moe else 1,
        vpp=vpp,
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp8", "mxfp8", "nvfp4"])),
        zero=draw(st.sampled_from([1, 2, 3])),
        schedule="interleaved" if vpp > 1 else draw(st.sampled_from(["1f1b", "zero-bubble"])),
        offload=draw(st.sampled_from(["none", "none", "optimizer", "activations"])),
    )
    options = {"lora": draw(st.booleans())} if draw(st.booleans()) else {}
    return step(shape, layout, draw(st.sampled_from([2048, 8192])), draw(st.sampled_from([1, 8])), **options)


stacks = st.builds(
    Traits,
    attention=st.sampled_from(["best", "flash2", "unfused"]),
    compiled=st.booleans(),
    dispatcher=st.sampled_from(["nccl", "deepep"]),
    sequence_parallel=st.booleans(),
    selective=st.sampled_from(["attention", "operators", "every second layer", "modules"]),
    master_gradients=st.booleans(),
    chunked_head=st.booleans(),
)


@settings(max_examples=150)
@given(work=works(), traits=stacks)
def test_parts_add_up_and_the_total_is_the_worst_instant(work: Workload, traits: Traits) -> None:
    result = memory(work, traits)
    assert sum(result.parts.values()) == result.total_bytes
    assert max(result.instants.values()) == result.total_bytes
    assert tuple(result.instants) == INSTANTS
    assert all(size > 0 for size in [*result.parts.values(), *result.instants.values()])
    assert memory_bytes(work, traits) == result.total_bytes


@settings(max_examples=30)
@given(work=works(), others=st.lists(works(), max_size=5), traits=st.one_of(st.just(STACKS["craton"]), stacks))
def test_many_layouts_in_one_call_have_the_bytes_of_each(
    work: Workload, others: list[Workload], traits: Traits
) -> None:
    layouts = [each.layout for each in (work, *others) if work.shape.is_moe or each.layout.ep == 1]
    each = [memory(replace(work, layout=layout), traits).total_bytes for layout in layouts]
    assert memory_bytes_of(work, layouts, traits).tolist() == each


def change(work: Workload, **layout: Any) -> Workload:
    """Another layout with the same micro-batches in flight."""
    changed = replace(work.layout, **layout)
    return replace(
        work,
        layout=changed,
        global_batch_sequences=work.micro_batches * changed.data_parallel * changed.micro_batch,
    )


@settings(max_examples=150)
@given(work=works(), traits=stacks, name=st.sampled_from(["fsdp", "tp", "cp", "ep"]))
def test_more_ranks_never_need_more(work: Workload, traits: Traits, name: str) -> None:
    """But for NCCL's buffers. From one shard to two weights change their form (fp32 shards and gathered copies), which
    pays only where there is something to shard: the test of the ZeRO paper's figure covers it."""
    layout = work.layout
    if name == "ep" and (not work.shape.is_moe or layout.ep * 2 > layout.replicate * layout.fsdp * layout.cp):
        name = "tp"
    if layout.fsdp == 1 and name in ("fsdp", "cp"):
        work = change(work, fsdp=2)
    more = change(work, **{name: getattr(work.layout, name) * 2})
    assert allocated_bytes(more, traits) <= allocated_bytes(work, traits)


@settings(max_examples=100)
@given(work=works(), traits=stacks)
def test_more_stages_never_need_more(work: Workload, traits: Traits) -> None:
    """1F1B with stages of equal size, where no more than the optimizer is sharded; but for what stages send."""
    shape = replace(LLAMA_70B, layers=64)
    work = change(replace(work, shape=shape), vpp=1, ep=1, zero=1, schedule="1f1b", offload="none")
    tokens = work.layout.micro_batch * work.sequence / work.layout.cp
    sends = 1.05 * 4 * 4 * tokens * shape.hidden
    more = change(work, pp=work.layout.pp * 2)
    assert allocated_bytes(more, traits) <= allocated_bytes(work, traits) + sends


@settings(max_examples=100)
@given(work=works(), traits=stacks)
def test_more_recompute_never_needs_more_and_a_larger_micro_batch_never_less(work: Workload, traits: Traits) -> None:
    none, selective, full = (memory_bytes(change(work, recompute=r), traits) for r in ("none", "selective", "full"))
    assert full <= selective <= none
    assert memory_bytes(work, traits) <= memory_bytes(change(work, micro_batch=2 * work.layout.micro_batch), traits)


@settings(max_examples=60)
@given(work=works(), traits=stacks)
def test_sharding_more_of_the_states_never_needs_more(work: Workload, traits: Traits) -> None:
    """But for the allocator's slack on the layer whose gradients are being scattered."""
    one, two, three = (memory_bytes(change(work, pp=1, vpp=1, fsdp=8, zero=zero), traits) for zero in (1, 2, 3))
    assert three <= 1.001 * two
    assert two <= 1.001 * one


@pytest.mark.parametrize(("name", "most_calls"), [("megatron-lm", 50), ("craton", 55)])  # half as many again as today
def test_a_search_can_ask_often(name: str, most_calls: int) -> None:
    """A layout costs few calls; `benchmarks/plan_speed.py` has the seconds of whole plans."""
    layouts = [
        Layout(
            pp=pp, fsdp=fsdp, tp=tp, vpp=vpp, micro_batch=rows, zero=1, schedule="interleaved" if vpp > 1 else "1f1b"
        )
        for pp in (1, 4, 16)
        for fsdp in (1, 8, 64)
        for tp in (1, 4, 8)
        for vpp in ((1, 2) if pp > 1 else (1,))
        for rows in (1, 2, 4, 8)
    ]
    work, traits = step(LLAMA_405B, Layout(), 8192), STACKS[name]
    memory_bytes_of(work, layouts, traits)  # what is computed once for a model is not counted
    with counted_calls() as calls:
        memory_bytes_of(work, layouts, traits)
    assert calls.number / len(layouts) < most_calls
