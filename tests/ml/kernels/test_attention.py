"""Attention stays inside documents and windows, on every device by the kernel that device has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from craton.ml.kernels import Documents, attention

LENGTHS = ((5, 1, 10), (16,), (8, 8))  # documents of each row


def inputs(kv_heads: int = 2, head_dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 16, 4, head_dim, generator=generator)
    key, value = (torch.randn(3, 16, kv_heads, head_dim, generator=generator) for _ in range(2))
    return query, key, value


def numbers() -> Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
    return torch.stack(rows).to(torch.int32)


def by_hand(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, window: int = 0) -> Tensor:
    repeats = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    scores = torch.einsum("rshd,rthd->rhst", query, key) * query.shape[-1] ** -0.5
    place = torch.arange(query.shape[1])
    sees = place[:, None] >= place[None, :]
    if window:
        sees &= place[:, None] - place[None, :] < window
    sees = sees & (documents[:, :, None] == documents[:, None, :])
    weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhst,rthd->rshd", weights, value)


def test_documents_know_where_they_begin() -> None:
    documents = Documents.of(numbers())
    assert documents is not None
    assert documents.offsets.tolist() == [0, 5, 6, 16, 32, 40, 48]
    assert documents.longest == 16


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_is_what_the_formula_says(packed: bool, window: int) -> None:
    documents = numbers() if packed else torch.zeros_like(numbers())
    out = attention(*inputs(), Documents.of(documents) if packed else None, window=window)
    torch.testing.assert_close(out, by_hand(*inputs(), documents, window), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_the_gpu_path_equals_the_cpu_path(packed: bool, window: int) -> None:
    """The variable-length and cuDNN kernels in bf16 against the mask in fp32, forwards and backwards."""
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        tensors = [tensor.to(torch.bfloat16).to(device, dtype).requires_grad_() for tensor in inputs(head_dim=64)]
        documents = Documents.of(numbers().to(device)) if packed else None
        out = attention(*tensors, documents, window=window)
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, dtype)
        gradients = torch.autograd.grad(out, tensors, slope)
        results.append([tensor.float().cpu() for tensor in (out.detach(), *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0.05, atol=0.03)
