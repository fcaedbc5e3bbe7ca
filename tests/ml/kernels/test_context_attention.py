"""Attention of a context group is that of one process: outputs and gradients, for every mask and every number of ranks.

The kernels of CUDA do not run here; that they are called as PyTorch declares them is tried on tensors without content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gang import Gang
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from craton.ml.collectives import Peers
from craton.ml.kernels import ContextSlice, Documents, attention, gather_in_order
from craton.ml.kernels.documents import PieceOffsets, visible
from craton.ml.kernels.partial_attention import Cudnn, Flash, Formula, Kernel, PackedFlash, choose_kernel

SEQUENCE = 32
LENGTHS = ((5, 1, 10, 16), (32,), (3, 29))  # documents of each row
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


@dataclass(frozen=True)
class Case:
    rows: int = 2
    packed: bool = False
    window: int = 0
    heads: int = 4
    kv_heads: int = 2
    value_width: int = 8
    gathered: bool = False  # keys and values are whole on every rank, as latent attention has them
    scale: float | None = None


CASES = {
    "causal": Case(),
    "causal, one row": Case(rows=1, kv_heads=4, scale=0.5),
    "documents": Case(rows=3, packed=True),
    "documents, one row, one key head": Case(rows=1, packed=True, kv_heads=1),
    "window": Case(window=5),
    "window over pieces and documents": Case(rows=3, packed=True, window=9),
    "window as long as the sequence": Case(window=SEQUENCE),
    "narrow values": Case(kv_heads=4, value_width=6),
    "narrow values, documents": Case(rows=3, packed=True, kv_heads=4, value_width=6),
    "gathered": Case(kv_heads=4, value_width=6, gathered=True),
    "gathered, documents": Case(packed=True, gathered=True),
}


def numbers(rows: int) -> Tensor:
    each = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS[:rows]]
    return torch.stack(each).to(torch.int32)


def inputs(case: Case) -> list[Tensor]:
    """Query, key, value and the slope of what is made of them."""
    generator = torch.Generator().manual_seed(case.rows)
    shapes = ((case.heads, 8), (case.kv_heads, 8), (case.kv_heads, case.value_width), (case.heads, case.value_width))
    return [torch.randn(case.rows, SEQUENCE, *shape, generator=generator) for shape in shapes]


def alone(case: Case) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    *tensors, slope = inputs(case)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    documents = Documents.of(numbers(case.rows)) if case.packed else None
    out = attention(*tensors, documents, case.scale, case.window)
    return [out.detach(), *torch.autograd.grad(out, tensors, slope)]


def together(cases: list[Case]) -> list[list[Tensor]]:
    """The same for this rank's pieces."""
    context = Peers(dist.group.WORLD)
    place = ContextSlice(context.rank, context.size)
    found = []
    for case in cases:
        *tensors, slope = inputs(case)
        cut = [place.cut(tensors[0]), *(each if case.gathered else place.cut(each) for each in tensors[1:])]
        cut = [tensor.requires_grad_() for tensor in cut]
        documents = Documents.of(numbers(case.rows)) if case.packed else None
        documents = documents.cut(place) if documents else None
        out = attention(*cut, documents, case.scale, case.window, context, case.gathered)
        found.append([out.detach(), *torch.autograd.grad(out, cut, place.cut(slope))])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_context_group_attends_as_one_process_does(gang: Gang, ranks: int) -> None:
    results = gang.run(together, list(CASES.values()), ranks=ranks)
    for index, (name, case) in enumerate(CASES.items()):
        out, *gradients = alone(case)
        for rank, found in enumerate(results):
            place = ContextSlice(rank, ranks)
            torch.testing.assert_close(found[index][0], place.cut(out), **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
            wanted = gradients[:1] if case.gathered else gradients
            for mine, whole in zip(found[index][1:], wanted, strict=False):
                torch.testing.assert_close(mine, place.cut(whole), **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
        if case.gathered:  # every rank has the share of its queries in the gradient of all keys
            for which in (2, 3):
                total = sum(found[index][which] for found in results)
                torch.testing.assert_close(total, gradients[which - 1], **TOLERANCE)


def silenced(case: Case, operation: str) -> list[Tensor]:
    """`together` when nobody else says anything."""
    silent = {
        "start_gather": lambda peers, x: torch.cat([x] * peers.size),
        "start_scatter_sum": lambda peers, x: x.chunk(peers.size)[peers.rank].clone(),
    }
    with mock.patch.object(Peers, operation, silent[operation]):
        return together([case])[0]


@pytest.mark.parametrize(("operation", "wrong"), [("start_gather", [0, 1, 2, 3]), ("start_scatter_sum", [2, 3])])
def test_without_the_other_ranks_it_goes_wrong(gang: Gang, operation: str, wrong: list[int]) -> None:
    for case in (CASES["causal"], CASES["documents"]):
        expected = [ContextSlice(1, 2).cut(each) for each in alone(case)]
        found = gang.run(silenced, case, operation)[1]
        differs = [index for index in range(4) if not torch.allclose(found[index], expected[index], rtol=1e-3)]
        assert differs == wrong


def gathered_latents(rows: int) -> tuple[Tensor, Tensor]:
    """Ranks in pairs: two context ranks, whose tokens are split over two tensor ranks each."""
    world = Peers(dist.group.WORLD)
    whole = torch.arange(rows * 16.0).view(rows, 16, 1) * torch.ones(3)
    share = ContextSlice(world.rank // 2, 2).cut(whole).flatten(0, 1).chunk(2)[world.rank % 2].requires_grad_()
    out = gather_in_order(share, world, 2, rows)
    out.backward(whole * (world.rank + 1))
    assert share.grad is not None
    torch.testing.assert_close(share.grad, share.detach() * 10)  # 1 + 2 + 3 + 4
    return whole, out.detach()


def test_latents_come_in_order_from_context_and_tensor_ranks_together(gang: Gang) -> None:
    for rows in (1, 2):
        for whole, out in gang.run(gathered_latents, rows, ranks=4):
            torch.testing.assert_close(out, whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_pieces_of_all_ranks_are_the_sequence_and_cost_the_same(size: int) -> None:
    places = [ContextSlice(rank, size) for rank in range(size)]
    assert sorted(piece for place in places for piece in place.pieces) == list(range(2 * size))
    assert {sum(place.pieces) for place in places} == {2 * size - 1}
    whole = torch.arange(SEQUENCE).expand(2, -1)
    assert torch.equal(torch.cat([place.cut(whole) for place in places], dim=1).sort(dim=1)[0], whole)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [0, 6])
def test_the_offsets_of_a_piece_say_what_its_mask_says(size: int, window: int) -> None:
    """The variable-length kernel aligns the last query of a document with its last key."""
    documents = Documents.of(numbers(3))
    assert documents is not None
    length = SEQUENCE // (2 * size)
    for rank in range(size):
        place = ContextSlice(rank, size)
        for piece, offsets in zip(place.pieces, documents.cut(place).pieces, strict=True):
            end = (piece + 1) * length
            mask = visible(end - length, end, window, documents.numbers, torch.device("cpu"))[:, 0]
            torch.testing.assert_close(_mask_of(offsets, end, length, window), mask)
            assert offsets.most_queries == offsets.queries.diff().max()
            assert offsets.most_keys == offsets.keys.diff().max()


def _mask_of(offsets: PieceOffsets, end: int, length: int, window: int) -> Tensor:
    """What flash attention sees with these offsets, as a mask over all keys."""
    rows = len(offsets.first_keys)
    places = [(row, key) for row, first in enumerate(offsets.first_keys) for key in range(first, end)]
    mask = torch.zeros(rows, length, end, dtype=torch.bool)
    spans = zip(offsets.queries, offsets.queries[1:], offsets.keys, offsets.keys[1:], strict=False)
    for first_query, after_query, first_key, after_key in torch.tensor(list(spans)).tolist():
        for query in range(first_query, after_query):
            last = after_key - (after_query - query)
            for flat in range(max(first_key, last - window + 1) if window else first_key, last + 1):
                row, key = places[flat]
                assert row == query // length
                mask[row, query % length, key] = True
    return mask


def test_offsets_travel_with_the_documents() -> None:
    documents = Documents.of(numbers(2))
    assert documents is not None
    moved = documents.cut(ContextSlice(0, 2)).to("meta")
    assert {piece.queries.device.type for piece in moved.pieces} == {"meta"}
    assert [piece.first_keys for piece in moved.pieces] == [(0, 0), (16, 0)]
    assert moved.numbers.shape == (2, SEQUENCE)


def cuda_kernels() -> dict[str, tuple[Kernel, int]]:
    offsets = Documents.of(numbers(2)).cut(ContextSlice(1, 2)).pieces[0]  # type: ignore[union-attr]
    return {
        "cudnn": (Cudnn(0.5), 16),
        "flash": (Flash(0.5), 16),
        "flash, narrow values": (Flash(0.5), 8),
        "packed": (PackedFlash(0.5, 0, offsets), 16),
        "packed, narrow values and a window": (PackedFlash(0.5, 4, offsets), 8),
    }


@pytest.mark.parametrize("name", cuda_kernels())
def test_kernels_of_cuda_are_called_as_declared(name: str) -> None:
    kernel, width = cuda_kernels()[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 8, 4, 16, dtype=torch.bfloat16)
        key = torch.empty(2, 16, 2, 16, dtype=torch.bfloat16)
        value = torch.empty(2, 16, 2, width, dtype=torch.bfloat16)
        out, lse = kernel.forward(query, key, value, False)
        assert out.shape == (2, 8, 4, width)
        assert lse.dtype == torch.float32
        assert lse.numel() == 2 * 8 * 4
        gradients = kernel.backward(torch.empty_like(out), query, key, value, out, lse, False)
    assert [each.shape for each in gradients] == [query.shape, key.shape, value.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*cuda_kernels(), "chosen"])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_cuda_give_what_the_formula_gives(name: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    width, documents = 64, Documents.of(numbers(2))
    assert documents is not None
    place = ContextSlice(1, 2)
    query = torch.randn(2, 8, 4, width, generator=generator)
    key, value = (torch.randn(2, 8 if causal else 16, 2, width, generator=generator) for _ in range(2))
    packed = name.startswith("packed")
    if packed and causal:
        pytest.skip("documents bound what is seen")
    window = 4 if name.endswith("window") else 0
    mask = visible(8, 16, window, documents.numbers, torch.device("cpu")) if packed else None
    on_gpu = [tensor.to("cuda", torch.bfloat16) for tensor in (query, key, value)]
    kernel: Any
    if name == "chosen":
        kernel = choose_kernel(*on_gpu, 0.5)
    else:
        kernel = cuda_kernels()[name][0]
    if packed:
        kernel = PackedFlash(0.5, window, documents.cut(place).to("cuda").pieces[0])
    rounded = [tensor.float().cpu() for tensor in on_gpu]
    wanted_out, wanted_lse = Formula(0.5, mask).forward(*rounded, causal)
    out, lse = kernel.forward(*on_gpu, causal)
    torch.testing.assert_close(out.float().cpu(), wanted_out, rtol=0.05, atol=0.03)
    gradients = kernel.backward(torch.ones_like(out), *on_gpu, out, lse, causal)
    wanted = Formula(0.5, mask).backward(torch.ones_like(wanted_out), *rounded, wanted_out, wanted_lse, causal)
    for found, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.05)
