"""What a trace catches and analysis cannot: each fault is made on purpose, and named with its module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from real_step import small_job
from torch import Tensor, nn

from craton.job.layout import Layout
from craton.ml.collectives import Peers
from craton.ml.models import Decoder
from craton.ml.models.decoder import Block
from craton.ml.trace.comparison import compare
from craton.ml.trace.records import Trace
from craton.ml.trace.trace import trace
from craton.ml.training.parallel import mesh

FSDP = Layout(fsdp=8)
TENSOR = Layout(fsdp=4, tp=2)


def traced(layout: Layout, model: str = "dense", lora: str = "") -> Trace:
    return trace(small_job(layout, model, layout.pp, lora), layout)


def texts(layout: Layout, model: str = "dense", lora: str = "") -> str:
    found = traced(layout, model, lora)
    compared = compare(small_job(layout, model, layout.pp, lora), layout, found)
    return "\n".join(each.text for each in (*found.findings, *compared.findings))


@pytest.fixture
def sharding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`sharding(skipped)` leaves block number `skipped` out of FSDP2."""
    fully_shard = mesh.fully_shard

    def skip(skipped: int, whole: bool) -> None:
        blocks: list[nn.Module] = []

        def shard(module: nn.Module, **options: Any) -> Any:
            if isinstance(module, Block):
                blocks.append(module)
                if len(blocks) - 1 == skipped:
                    return module
            if isinstance(module, Decoder):
                left_out = set(blocks[skipped].parameters()) if whole else set()
                blocks.clear()
                return fully_shard(module, ignored_params=left_out, **options)
            return fully_shard(module, **options)

        monkeypatch.setattr(mesh, "fully_shard", shard)

    return skip


def test_a_sound_model_has_no_findings() -> None:
    for layout in (FSDP, TENSOR):
        assert texts(layout) == ""


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(pp=2), "dense"),
        (Layout(tp=2), "dense"),
        pytest.param(Layout(cp=2), "dense", marks=pytest.mark.slow),
        pytest.param(Layout(fsdp=2), "dense", marks=pytest.mark.slow),
        pytest.param(Layout(replicate=2), "dense", marks=pytest.mark.slow),
        pytest.param(Layout(replicate=2, fsdp=2), "dense", marks=pytest.mark.slow),
        pytest.param(Layout(fsdp=2, ep=2), "experts", marks=pytest.mark.slow),
        pytest.param(Layout(cp=2, tp=2), "latents", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_groups_that_span_the_world_have_their_own_names(layout: Layout, model: str) -> None:
    """Where one group is all there is, it must not be taken for the sums over all ranks. The memory of models this
    small is not planned to 5%."""
    assert [line for line in texts(layout, model).splitlines() if not line.startswith("memory")] == []


def test_attention_without_a_fused_kernel_is_named_once() -> None:
    found = texts(Layout(cp=2, precision="fp32"))
    assert "attention runs as plain matmuls" in found
    assert "gemm" not in found


@pytest.mark.slow
def test_memory_that_is_off_names_the_part_and_the_place(sharding: Any) -> None:
    sharding(1, whole=True)
    assert "memory reaches" in texts(FSDP)
    assert "the largest difference is" in texts(FSDP)


def test_a_layer_that_is_not_sharded_is_named(sharding: Any) -> None:
    sharding(2, whole=True)
    found = traced(FSDP).findings
    weights = [each for each in found if each.text.startswith("blocks.2.mlp.gate.weight is whole on this rank")]
    assert weights
    assert weights[0].module == "blocks.2.mlp.gate"
    assert "fully_shard" in weights[0].relief
    assert not any(each.module.startswith("blocks.1") for each in found)


@pytest.mark.parametrize("lora", ["", pytest.param("lora: {rank: 4}", marks=pytest.mark.slow)])
def test_a_layer_that_shards_with_another_is_named(sharding: Any, lora: str) -> None:
    sharding(1, whole=False)
    found = texts(FSDP, lora=lora)
    assert "blocks.1 has 0 all_gather over fsdp in its forward pass; the equal layers beside it have 1" in found
    assert "all_gather over fsdp 8 is called" in found


def test_a_collective_that_one_layer_forgot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    scatter, forward = Peers.start_scatter_sum, Decoder.forward

    def counted(decoder: Decoder, *inputs: Any, **options: Any) -> Any:
        nonlocal calls
        calls = 0  # of this step: a trace runs one for each depth
        return forward(decoder, *inputs, **options)

    def forgetful(peers: Peers, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x[: len(x) // peers.size] * 1 if calls == 5 else scatter(peers, x)

    monkeypatch.setattr(Decoder, "forward", counted)
    monkeypatch.setattr(Peers, "start_scatter_sum", forgetful)
    assert "blocks.1 has 1 reduce_scatter over tp in its forward pass; the equal layers beside it have 2" in texts(
        TENSOR
    )


@pytest.mark.slow
def test_a_collective_that_all_layers_forgot_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "start_scatter_sum", lambda peers, x: x[: len(x) // peers.size] * 1)
    assert "reduce_scatter over tp 2 is called 0 times a step" in texts(TENSOR)


def test_a_stage_that_does_more_is_named() -> None:
    found = texts(Layout(pp=4, fsdp=2))  # six layers on four stages
    assert "stage 0 (2 layers) computes" in found
    assert "stage 3" not in found
