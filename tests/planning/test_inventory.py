"""The list of collectives and FLOPs of a step: by hand where a hand can count, and the same sizes as the seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from craton.infrastructure import cluster_of
from craton.job.layout import Layout, stage_layers
from craton.job.model import MlaShape, ModelShape, model_preset
from craton.planning.calibration import STACKS
from craton.planning.rates import machine_of
from craton.planning.step import (
    StageInventory,
    Weight,
    Workload,
    flops_per_token,
    inventory,
    layer_weights,
    num_layers,
    padded_size,
)
from craton.planning.step.compute import COLLECTIVES, layer_terms
from craton.planning.step.operations import Transfer, layer_operations

OWN = STACKS["craton"]
EIGHT_B = model_preset("llama-3.1-8b")
DEEPSEEK = model_preset("deepseek-v3")
TINY = ModelShape("tiny", 4, 64, 160, 4, 2, 16, 320)
EXPERTS = replace(TINY, name="experts", experts=8, top_k=2, moe_ffn_hidden=32, shared_experts=1, dense_layers=1)
LATENT = replace(TINY, name="latent", kv_heads=4, mla=MlaShape(24, 16, 8, 8, 8))


def stage_of(
    shape: ModelShape, layout: Layout, sequence: int = 64, micro_batches: int = 2, rank: int = 0
) -> StageInventory:
    batch = micro_batches * layout.data_parallel * layout.micro_batch
    return inventory(Workload(shape, layout, sequence, batch), OWN).of_rank(rank)


def test_one_rank_talks_to_nobody() -> None:
    assert stage_of(TINY, Layout()).entries == ()


@pytest.mark.parametrize("shape", [EIGHT_B, DEEPSEEK, model_preset("qwen3-30b-a3b")], ids=lambda shape: shape.name)
def test_flops_are_those_of_the_model(shape: ModelShape) -> None:
    """Two forward and five backward products of attention for the three and six that MFU counts."""
    stage = stage_of(shape, Layout(), 4096, 1)
    products = stage.flops["gemm"] + stage.flops["experts"] + stage.flops["head"]
    model = flops_per_token(shape, 4096) * 4096
    assert products + stage.flops["attention"] * 6 / 7 == pytest.approx(model, rel=0.01)


def test_fsdp_moves_weights_twice_and_gradients_once_a_micro_batch() -> None:
    layer = sum(weight.size for weight in layer_weights(TINY, 1, 1, moe=False))
    tables = 2 * 320 * 64 + 64
    assert 4 * layer + tables == TINY.parameters
    stage = stage_of(TINY, Layout(fsdp=4))
    assert stage.count("all_gather", "fsdp") == 2 * 2 * 4 + 1  # the tables stay until the last micro-batch is through
    assert stage.size_bytes("all_gather", "fsdp") == 2 * (2 * 2 * 4 * layer + tables)
    assert stage.size_bytes("reduce_scatter", "fsdp") == 2 * 4 * TINY.parameters


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_what_is_kept_moves_less_often(zero: int, gathers: int, scatters: int) -> None:
    stage = stage_of(TINY, Layout(fsdp=4, zero=zero))  # type: ignore[arg-type]
    assert stage.count("all_gather", "fsdp") == 4 * gathers + 1
    assert stage.count("reduce_scatter", "fsdp") == 5 * scatters


def test_context_ranks_are_shards_too() -> None:
    """FSDP2 shards over fsdp · cp together, also where fsdp is 1."""
    both, context = stage_of(TINY, Layout(fsdp=2, cp=2)), stage_of(TINY, Layout(cp=4))
    assert {entry.ranks for entry in (*both.entries, *context.entries) if entry.dimension == "fsdp"} == {4}
    assert both.size_bytes("all_gather", "fsdp") == context.size_bytes("all_gather", "fsdp")
    assert context.size_bytes("all_reduce", "replicate") == 0
    keys_and_values = 2 * 64 * 2 * 16 * 2  # bytes, tokens, heads, head_dim, two tensors
    assert both.size_bytes("all_gather", "cp") == 2 * 4 * 2 * keys_and_values
    assert both.size_bytes("reduce_scatter", "cp") == 2 * 4 * keys_and_values


def test_copies_reduce_shards_once_a_step() -> None:
    stage = stage_of(TINY, Layout(replicate=2, fsdp=4))
    assert stage.size_bytes("all_reduce", "replicate") == 4 * TINY.parameters / 4
    assert stage_of(TINY, Layout(replicate=4)).size_bytes("all_reduce", "replicate") == 4 * TINY.parameters


def test_rows_that_do_not_divide_are_padded() -> None:
    """48 ranks: 64 rows of 64 numbers become 96."""
    stage, even = stage_of(TINY, Layout(fsdp=48)), stage_of(TINY, Layout(fsdp=16))
    assert stage.size_bytes("all_gather", "fsdp") > 1.2 * even.size_bytes("all_gather", "fsdp")


def test_tensor_parallel_gathers_and_scatters_the_stream() -> None:
    stage = stage_of(TINY, Layout(tp=2), micro_batches=1)
    stream = 2 * 64 * 64
    layers = 4 * (2 + 4) * stream  # two inputs forward; gradients and inputs backward
    sums = 2 * 4 * 64 * 2  # two numbers of every token from both ranks, for the loss
    assert stage.size_bytes("all_gather", "tp") == layers + 2 * stream + sums
    assert stage.size_bytes("reduce_scatter", "tp") == (4 * 4 + 2) * stream
    assert stage.size_bytes("all_reduce", "tp") == 4 * (2 * 4 + 1) * 64  # norms


def test_latents_are_gathered_instead_of_the_stream() -> None:
    dense, latent = (stage_of(shape, Layout(tp=2), micro_batches=1) for shape in (TINY, LATENT))
    token = 2 * 64 * 4
    saved = (2 * 64 - (24 + 16)) + (64 - (24 + 16 + 8)) - 64
    assert dense.size_bytes("all_gather", "tp") - latent.size_bytes("all_gather", "tp") == token * saved


def test_experts_exchange_rows_and_stay_whole_under_tp() -> None:
    stage = stage_of(EXPERTS, Layout(fsdp=4, tp=2, ep=2), micro_batches=1)
    rows = 2 * 64 / 2 * 2 * 64
    counts = 4 * 8
    assert stage.size_bytes("all_to_all", "ep") == 3 * (4 * rows + counts)
    shards = {
        entry.ranks for entry in stage.entries if entry.operation == "reduce_scatter" and entry.dimension == "fsdp"
    }
    assert shards == {4}  # 4 ranks of fsdp; of fsdp · tp = 8 ep leaves 4
    assert stage.flops["experts"] == 3 * 3 * 2 * (64 / 2 * 2) * 3 * 64 * 32


def test_a_pipeline_moves_weights_once_and_hands_on_one_tensor() -> None:
    layout = Layout(pp=2, fsdp=2)
    first, last = (stage_of(TINY, layout, micro_batches=4, rank=rank) for rank in (0, 1))
    assert first.count("all_gather", "fsdp") == first.count("reduce_scatter", "fsdp") == 3
    assert first.count("send", "pp") == first.count("recv", "pp") == 4
    assert first.size_bytes("send", "pp") == last.size_bytes("recv", "pp") == 4 * 2 * 64 * 64
    assert first.flops["head"] == 0 < last.flops["head"]
    interleaved = stage_of(TINY, replace(layout, vpp=2, schedule="interleaved"), micro_batches=4)
    assert interleaved.count("send", "pp") == 4 * 3


@pytest.mark.parametrize("layout", [Layout(fsdp=2, tp=2), Layout(cp=2, fsdp=2), Layout(fsdp=4, ep=4)], ids=str)
def test_full_recompute_repeats_the_forward_pass_with_its_collectives(layout: Layout) -> None:
    plain, full = (stage_of(EXPERTS, replace(layout, recompute=recompute)) for recompute in ("none", "full"))  # type: ignore[arg-type]
    assert full.flops["gemm"] == pytest.approx(4 / 3 * plain.flops["gemm"])
    assert full.flops["experts"] == pytest.approx(4 / 3 * plain.flops["experts"])
    assert full.flops["attention"] == pytest.approx(9 / 7 * plain.flops["attention"])
    dimension = "tp" if layout.tp > 1 else "cp" if layout.cp > 1 else "ep"
    operation = "all_to_all" if dimension == "ep" else "all_gather"
    assert full.size_bytes(operation, dimension) > 1.3 * plain.size_bytes(operation, dimension)  # type: ignore[arg-type]
    assert full.size_bytes("all_gather", "fsdp") == plain.size_bytes("all_gather", "fsdp")


def test_stages_that_do_the_same_are_listed_once() -> None:
    work = Workload(EIGHT_B, Layout(pp=8, fsdp=2), 4096, 64)
    assert [stage.pipeline_rank for stage in inventory(work, OWN).stages] == [0, 1, 7]


def test_every_layer_is_on_one_stage_and_the_first_ones_take_what_is_over() -> None:
    assert [layer for stage in stage_layers(126, 8, 2) for layer in stage] == list(range(126))
    assert [len(stage) for stage in stage_layers(30, 4, 1)] == [8, 8, 7, 7]


@pytest.mark.parametrize("ranks", [64, 256, 512])
def test_experts_that_ranks_do_not_divide_are_cut_through_and_not_padded(ranks: int) -> None:
    shape = model_preset("qwen3-30b-a3b")
    layout = Layout(fsdp=ranks)
    weights = layer_weights(shape, 1, 1, moe=True)
    assert padded_size(weights, layout, OWN, experts=True) == shape.experts * shape.expert_parameters
    assert Weight(50, 30, stacked=6).shard(4) == 2 * 50 * 30  # nothing divides: two experts each, the last rank none


def test_our_loop_trains_no_multi_token_layers() -> None:
    assert num_layers(DEEPSEEK, OWN) == 61
    assert num_layers(DEEPSEEK, STACKS["megatron-bridge"]) == 62


def test_seconds_are_made_of_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a byte a second, a layer's collectives take as many seconds as the list has bytes."""
    for operation in COLLECTIVES:
        monkeypatch.setitem(COLLECTIVES, operation, lambda size_bytes, _group, _network: size_bytes)
    place, layout = machine_of(cluster_of("p5.48xlarge", 8)), Layout(fsdp=4, cp=2, tp=4, ep=4)
    terms = layer_terms(DEEPSEEK, layout, 4096, place.rates, place.network, OWN, moe=True, expert_stride=4)
    operations = layer_operations(DEEPSEEK, layout, 4096, OWN, moe=True)

    def listed(*dimensions: str) -> tuple[float, float]:
        def total(transfers: tuple[Transfer, ...]) -> float:
            return sum(each.count * each.size_bytes for each in transfers if each.dimension in dimensions)

        return total(operations.forward), total(operations.backward)

    assert min(*terms.tensor, *terms.context, *terms.exchange) > 0
    assert (terms.tensor, terms.context, terms.exchange) == (listed("tp"), listed("cp", "cp·tp"), listed("ep"))
    assert {each.dimension for each in (*operations.forward, *operations.backward)} <= {"tp", "cp", "cp·tp", "ep"}
