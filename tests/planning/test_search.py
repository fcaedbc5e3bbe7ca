"""The search: every layout it offers is valid, the first is really the best, and more memory never hurts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.infrastructure import cluster_of
from craton.job.layout import Layout, layout_is_valid
from craton.job.model import ModelShape, model_preset
from craton.planning.calibration import find_profile
from craton.planning.rates import MachineRates, machine_of
from craton.planning.search import SAFE_SHARE, Candidate, Search, evaluate, layouts, search
from craton.planning.step import StepModel

DENSE = ModelShape("dense", 8, 1024, 4096, 8, 4, 128, 32000)
EXPERTS = ModelShape("experts", 8, 1024, 4096, 8, 8, 128, 32000, experts=6, top_k=2, moe_ffn_hidden=1024)
GIB = 2.0**30


def place(instance: str, nodes: int, memory_bytes: float | None = None) -> MachineRates:
    machine = machine_of(cluster_of(instance, nodes))
    return replace(machine, gpu=replace(machine.gpu, memory_bytes=memory_bytes)) if memory_bytes else machine


def model_on(
    machine: MachineRates, shape: ModelShape, batch: int, software: str = "craton", sequence: int = 4096
) -> StepModel:
    profile = find_profile(software, machine.gpu)
    return StepModel(shape, sequence, batch, machine.rates, machine.network, profile.traits)


def find(
    machine: MachineRates,
    shape: ModelShape,
    world: int,
    batch: int,
    like: Layout | None = None,
    software: str = "craton",
) -> Search:
    profile = find_profile(software, machine.gpu)
    return search(model_on(machine, shape, batch, software), machine, profile, world, "bf16", like)


def by_brute_force(machine: MachineRates, shape: ModelShape, world: int, batch: int, tight: bool) -> Candidate:
    """Every layout of the documented space, found without the search's own loops, where it is tight with every
    recompute."""
    model = model_on(machine, shape, batch)
    profile = find_profile("craton", machine.gpu)
    found = []
    for layout in whole_space(world, machine.network.nvlink_domain, shape):
        if layout_is_valid(layout, shape, world, batch, 4096, trained=True) and 4096 // layout.cp >= 1024:
            if layout.schedule == "zero-bubble" and not model.traits.zero_bubble:
                continue
            for recompute in ("none", "selective", "full") if tight else ("none",):
                candidate = evaluate(model, machine, profile, replace(layout, recompute=recompute))
                if candidate.memory_bytes <= SAFE_SHARE * machine.gpu.memory_bytes:
                    found.append(candidate)
    return min(found, key=lambda candidate: candidate.rank)


def whole_space(world: int, domain: int, shape: ModelShape) -> Iterator[Layout]:
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    powers = [size for size in (1, 2, 4, 8, 16, 32) if size <= world]
    for pp, replicate, fsdp, cp, tp in itertools.product(sizes, sizes, sizes, powers, powers):
        if pp * replicate * fsdp * cp * tp != world or tp > 2 * domain:
            continue
        if replicate > 1 and fsdp > 1 and fsdp * cp * tp != domain:
            continue
        zeros = (3,) if fsdp == 1 else (1, 2) if pp > 1 else (3,) if replicate > 1 else (1, 2, 3)
        if replicate > 1 and fsdp > 1:
            zeros = (2,) if pp > 1 else (3,)
        experts = [1, *(ep for ep in range(2, shape.experts + 1))]
        pipelines = [(1, "1f1b"), (1, "zero-bubble"), *((vpp, "interleaved") for vpp in (2, 4, 8))] if pp > 1 else []
        for zero, ep, (vpp, schedule), micro_batch in itertools.product(
            zeros, experts, pipelines or [(1, "1f1b")], (1, 2, 4, 8, 16)
        ):
            yield Layout(
                pp=pp,
                replicate=replicate,
                fsdp=fsdp,
                cp=cp,
                tp=tp,
                ep=ep,
                vpp=vpp,
                micro_batch=micro_batch,
                zero=zero,  # type: ignore[arg-type]
                schedule=schedule,  # type: ignore[arg-type]
            )


@pytest.mark.parametrize(
    ("shape", "memory_gib"), [(DENSE, 5), (DENSE, 12), (EXPERTS, 80)], ids=["tight", "roomy", "experts"]
)
def test_the_search_finds_the_minimum(shape: ModelShape, memory_gib: float) -> None:
    """16 GPUs in two nodes, 24 sequences: a batch with a factor of three, so that not every dp is a power of two."""
    machine = place("p5.48xlarge", 2, memory_gib * GIB)
    best = by_brute_force(machine, shape, 16, 24, tight=memory_gib < 10)
    found = find(machine, shape, 16, 24).candidates[0]
    assert found.rank == pytest.approx(best.rank, rel=1e-9), f"{found.layout} against {best.layout}"


@settings(max_examples=20)
@given(
    shape=st.sampled_from([DENSE, EXPERTS, model_preset("llama-3.1-8b"), model_preset("qwen3-30b-a3b")]),
    nodes=st.sampled_from([1, 2, 3, 4, 12]),
    batch=st.sampled_from([1, 7, 24, 48, 96, 256]),
    sequence=st.sampled_from([1024, 3072, 4096, 8190, 32768]),
)
def test_every_layout_of_the_search_is_valid(shape: ModelShape, nodes: int, batch: int, sequence: int) -> None:
    machine = place("p5.48xlarge", nodes)
    seen = set()
    for layout in layouts(shape, 8 * nodes, batch, sequence, "bf16", machine, zero_bubble=True):
        assert layout_is_valid(layout, shape, 8 * nodes, batch, sequence), layout
        assert layout not in seen, f"twice: {layout}"
        seen.add(layout)


def test_candidates_are_in_order_fit_and_are_what_they_say() -> None:
    machine = place("p5.48xlarge", 2, 12 * GIB)
    found = find(machine, DENSE, 16, 32)
    ranks = [candidate.rank for candidate in found.candidates]
    assert ranks == sorted(ranks)
    assert all(candidate.memory_bytes <= machine.gpu.memory_bytes for candidate in found.candidates)
    assert all(candidate.fits for candidate in found.candidates)
    assert not any(candidate.fits for candidate in found.too_large)
    assert found.evaluated >= len(found.candidates)
    profile, model = find_profile("craton", machine.gpu), model_on(machine, DENSE, 32)
    for candidate in found.candidates[::25]:
        alone = evaluate(model, machine, profile, candidate.layout)
        assert alone.step_seconds == pytest.approx(candidate.step_seconds, rel=1e-9)
        assert alone.memory_bytes == candidate.memory_bytes
        assert layout_is_valid(candidate.layout, DENSE, 16, 32, 4096)


def test_what_is_called_too_large_is_too_large() -> None:
    """Nothing that the card could hold is shown to a user as something that does not fit."""
    for memory_gib in (5, 6, 8, 12, 20):
        machine = place("p5.48xlarge", 2, memory_gib * GIB)
        found = find(machine, DENSE, 16, 32)
        assert all(candidate.memory_bytes > machine.gpu.memory_bytes for candidate in found.too_large)


def test_a_layout_gets_the_least_recompute_with_which_it_fits() -> None:
    roomy = find(place("p5.48xlarge", 2), DENSE, 16, 32)
    assert {candidate.layout.recompute for candidate in roomy.candidates} == {"none"}
    tight = find(place("p5.48xlarge", 2, 5 * GIB), DENSE, 16, 32)
    assert {candidate.layout.recompute for candidate in tight.candidates} > {"none"}


def test_more_memory_never_makes_the_best_layout_slower() -> None:
    """A sweep from where nothing fits to where everything does; sizes at which it fits only just are left out."""
    model = model_preset("llama-3.1-8b")
    machine = place("p5.48xlarge", 1)
    bests = []
    for step in range(12):
        memory_bytes = 4 * GIB * 1.3**step
        found = find(replace(machine, gpu=replace(machine.gpu, memory_bytes=memory_bytes)), model, 8, 64)
        if found.candidates and found.candidates[0].memory_bytes <= SAFE_SHARE * memory_bytes:
            bests.append((memory_bytes / GIB, found.candidates[0]))
    assert bests[0][0] > 5
    assert bests[0][1].rank > 1.3 * bests[-1][1].rank
    for (small, before), (large, after) in itertools.pairwise(bests):
        assert after.rank <= before.rank * (1 + 1e-9), (
            f"{before.layout} on {small:.1f} GiB is faster than {after.layout} on {large:.1f} GiB"
        )


def test_nothing_divides() -> None:
    found = find(place("p5.48xlarge", 125), DENSE, 1000, 7)
    assert found.candidates == found.too_large == []


def test_nothing_fits_and_the_nearest_is_named() -> None:
    found = find(place("p5.48xlarge", 1), model_preset("llama-3.1-405b"), 8, 64)
    assert found.candidates == []
    assert found.too_large
    sizes = [candidate.memory_bytes for candidate in found.too_large]
    assert sizes == sorted(sizes)
    assert sizes[0] > 405e9 * 16 / 8  # eight GPUs share at least the weights and their states


def test_offload_is_the_last_resort() -> None:
    """Where nothing fits otherwise, the optimizer goes to host memory; where there is room, the best keeps it."""
    shape = model_preset("llama-3.1-70b")
    tight = find(place("p5.48xlarge", 1), shape, 8, 64, software="megatron-bridge")
    assert tight.candidates
    assert {candidate.layout.offload for candidate in tight.candidates} == {"optimizer"}
    roomy = find(place("p5.48xlarge", 16), shape, 128, 128, software="megatron-bridge")
    assert roomy.candidates[0].layout.offload == "none"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_only_what_can_be_trained_is_chosen(name: str) -> None:
    """Key-value heads are cut and not copied, experts divide, the optimizer stays; other stacks may do otherwise."""
    shape, machine = model_preset(name), place("p5en.48xlarge", 4)
    found = find(machine, shape, 32, 64)
    layouts = [candidate.layout for candidate in (*found.candidates, *found.too_large)]
    assert layouts
    assert all(layout_is_valid(layout, shape, 32, 64, 4096, trained=True) for layout in layouts)
    assert {layout.offload for layout in layouts} == {"none"}


def test_a_scaling_curve_keeps_the_kind_of_layout() -> None:
    like = Layout(fsdp=4, tp=4, cp=2)
    found = find(place("p5.48xlarge", 4), DENSE, 32, 32, like)
    assert found.candidates
    assert {(candidate.layout.tp, candidate.layout.cp) for candidate in found.candidates} == {(4, 2)}
    assert find(place("p5.48xlarge", 1), DENSE, 2, 32, like).candidates == []  # eight ranks do not fit two GPUs


def test_equals_go_to_the_simpler_layout() -> None:
    plain, busy = (
        Candidate(layout, None, 1.0, 0.0, True)  # type: ignore[arg-type]
        for layout in (Layout(fsdp=8), Layout(pp=2, replicate=2, fsdp=2))
    )
    assert plain.rank < busy.rank < 1.03


def test_micro_batches_reach_sixteen_short_sequences() -> None:
    """Short sequences need many of them to fill a card."""
    sizes = {layout.micro_batch for layout in layouts(DENSE, 8, 256, 512, "bf16", place("p5.48xlarge", 1))}
    assert sizes == {1, 2, 4, 8, 16}


def test_tensor_parallelism_stays_where_heads_and_tokens_divide() -> None:
    odd = replace(DENSE, heads=6, kv_heads=3)
    sizes = {layout.tp for layout in layouts(odd, 16, 16, 4096, "bf16", place("p5.48xlarge", 2))}
    assert sizes == {1}  # tp 2 would split three key-value heads, tp 4 six heads
    sizes = {layout.tp for layout in layouts(DENSE, 16, 16, 4096, "bf16", place("p5.48xlarge", 2))}
    assert sizes == {1, 2, 4, 8}
