"""Attention over part of the keys: returns the log-sum-exp that joins parts, and has a separate backward pass.

A token's attention over all its keys is a mean of its attention over disjoint parts of them, weighted by their sums of
exponentials. Given the output and the log-sum-exp over all keys, the backward pass of a part gives that part's share of
every gradient. Tensors are [rows, tokens, heads, d], the log-sum-exp is fp32 [rows, heads, queries].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from craton.ml.kernels.documents import PieceOffsets

# Tried in this order; cuDNN is twice as fast as flash on Hopper (docs/measurements.md).
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


class Kernel(Protocol):
    """`causal` requires as many keys as queries. Key and value may have fewer heads than the query."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients: ...


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Kernel:
    """Return the fastest kernel for these tensors, which must still know whether they require gradients."""
    same_width = query.shape[-1] == value.shape[-1]
    if not query.is_cuda:
        return CpuFlash(scale, mask) if same_width else Formula(scale, mask)
    if mask is not None or query.dtype not in (torch.bfloat16, torch.float16):
        return Formula(scale, mask)
    if cudnn_takes(query, key, value):
        return Cudnn(scale)
    return Flash(scale) if flash_takes(query) else Formula(scale)


def flash_takes(query: Tensor) -> bool:
    width = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def cudnn_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch would use cuDNN for the causal attention of these tensors."""
    grouped = query.shape[2] != key.shape[2]
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with sdpa_kernel(BACKENDS, set_priority=True):
        choice = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=grouped)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of all parts."""
    out, lse = parts[0]
    for other_out, other_lse in parts[1:]:
        share = torch.sigmoid(other_lse - lse).transpose(1, 2).unsqueeze(-1)  # [rows, queries, heads, 1]
        out = torch.lerp(out.float(), other_out.float(), share).to(out.dtype)
        lse = torch.logaddexp(lse, other_lse)
    return out, lse


@dataclass(frozen=True)
class Formula:
    """The textbook formula: any dtype and width, with all scores in memory."""

    scale: float
    mask: Tensor | None = None  # bool, True where a query sees a key

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, causal)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1)).to(query.dtype)
        return torch.matmul(weights, _heads_first(value, query.shape[2])).transpose(1, 2), lse

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        kv_heads, heads = key.shape[2], query.shape[2]
        weights = torch.exp(self._scores(query, key, causal) - lse.unsqueeze(-1))
        slope = gradient.transpose(1, 2)
        through_weights = torch.matmul(slope, _heads_first(value, heads).transpose(2, 3)).float()
        mean = (slope.float() * out.transpose(1, 2).float()).sum(-1, keepdim=True)
        of_scores = (weights * (through_weights - mean) * self.scale).to(query.dtype)
        of_query = torch.matmul(of_scores, _heads_first(key, heads)).transpose(1, 2)
        of_key = torch.matmul(of_scores.transpose(2, 3), query.transpose(1, 2)).transpose(1, 2)
        of_value = torch.matmul(weights.to(query.dtype).transpose(2, 3), slope).transpose(1, 2)
        return of_query, _sum_groups(of_key, kv_heads), _sum_groups(of_value, kv_heads)

    def _scores(self, query: Tensor, key: Tensor, causal: bool) -> Tensor:
        """[rows, heads, queries, keys], fp32."""
        keys = _heads_first(key, query.shape[2])
        scores = torch.matmul(query.transpose(1, 2), keys.transpose(2, 3)).float() * self.scale
        if causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores if self.mask is None else scores.masked_fill(~self.mask, -torch.inf)


@dataclass(frozen=True)
class CpuFlash:
    """PyTorch's blocked kernel for the CPU."""

    scale: float
    mask: Tensor | None = None  # bool, True where a query sees a key

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        tensors = (query.transpose(1, 2), *(_heads_first(tensor, query.shape[2]) for tensor in (key, value)))
        out, lse = kernel(*tensors, 0.0, causal, attn_mask=self._bias(query), scale=self.scale)
        return out.transpose(1, 2), lse

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = (query.transpose(1, 2), *(_heads_first(tensor, query.shape[2]) for tensor in (key, value)))
        bias = self._bias(query)
        of_query, of_key, of_value = kernel(
            gradient.transpose(1, 2), *tensors, out.transpose(1, 2), lse, 0.0, causal, attn_mask=bias, scale=self.scale
        )
        kv_heads = key.shape[2]
        of_key, of_value = (_sum_groups(tensor.transpose(1, 2), kv_heads) for tensor in (of_key, of_value))
        return of_query.transpose(1, 2), of_key, of_value

    def _bias(self, query: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        return torch.zeros(self.mask.shape, dtype=query.dtype).masked_fill_(~self.mask, -torch.inf)


@dataclass(frozen=True)
class Cudnn:
    """cuDNN's kernel. It draws no random numbers here, so the placeholder for their state is never read."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = kernel(query, key, value, None, True, 0.0, causal, False, scale=self.scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        query, key, value, out, gradient = (tensor.transpose(1, 2) for tensor in (query, key, value, out, gradient))
        state = query.new_empty((), dtype=torch.int64)
        lengths = (query.shape[2], key.shape[2])
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, out, lse.unsqueeze(-1), state, state, None, None, None, *lengths,
            0.0, causal, scale=self.scale,
        )  # fmt: skip
        return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)


@dataclass(frozen=True)
class Flash:
    """The flash kernel of CUDA; values narrower than keys are padded with zeros."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        tensors = [tensor.transpose(1, 2) for tensor in (query, key, _widen(value, key))]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = kernel(*tensors, 0.0, causal, False, scale=self.scale)
        return out.transpose(1, 2)[..., : value.shape[-1]], lse

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        wide = (_widen(gradient, key), query, key, _widen(value, key), _widen(out, key))
        tensors = [tensor.transpose(1, 2) for tensor in wide]
        state = query.new_empty(2, dtype=torch.uint64)
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *tensors, lse, None, None, query.shape[1], key.shape[1], 0.0, causal, state, state, scale=self.scale
        )
        return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)[..., : value.shape[-1]]


@dataclass(frozen=True)
class PackedFlash:
    """The variable-length flash kernel of CUDA for the documents of one piece. `key` covers the rows up to the piece's
    end, the last query of a document is at its last key, and lse has the kernel's own shape."""

    scale: float
    window: int
    offsets: PieceOffsets

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        assert not causal, "document offsets define the visible keys"
        tensors = [query.flatten(0, 1), *(self._seen(tensor) for tensor in (key, _widen(value, key)))]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*tensors, *self._bounds(), False, **self._options())
        return out.view(query.shape)[..., : value.shape[-1]], lse

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        flat_query, flat_gradient, flat_out = (
            tensor.flatten(0, 1) for tensor in (query, _widen(gradient, key), _widen(out, key))
        )
        seen_key, seen_value = (self._seen(tensor) for tensor in (key, _widen(value, key)))
        state, unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            flat_gradient, flat_query, seen_key, seen_value, flat_out, lse, *self._bounds(), state, unused,
            **self._options(),
        )  # fmt: skip
        of_value = of_value[..., : value.shape[-1]]
        return of_query.view(query.shape), self._unseen(of_key, key), self._unseen(of_value, value)

    def _bounds(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        offsets = self.offsets
        return offsets.queries, offsets.keys, offsets.most_queries, offsets.most_keys, 0.0, self.window == 0

    def _options(self) -> dict[str, float | int]:
        left = self.window - 1 if self.window else -1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}

    def _seen(self, tensor: Tensor) -> Tensor:
        """Concatenate the rows, each from its first key on."""
        rows = [row[first:] for row, first in zip(tensor, self.offsets.first_keys, strict=True)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def _unseen(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of all keys from that of the visible ones."""
        whole = torch.zeros_like(like)
        lengths = [like.shape[1] - first for first in self.offsets.first_keys]
        for row, first, part in zip(whole, self.offsets.first_keys, gradient.split(lengths), strict=True):
            row[first:] = part
        return whole


def _heads_first(tensor: Tensor, heads: int) -> Tensor:
    """[rows, tokens, kv_heads, d] → [rows, heads, tokens, d], every head repeated for its group."""
    repeats = heads // tensor.shape[2]
    return (tensor.repeat_interleave(repeats, dim=2) if repeats > 1 else tensor).transpose(1, 2)


def _sum_groups(tensor: Tensor, kv_heads: int) -> Tensor:
    """[rows, tokens, heads, d] → [rows, tokens, kv_heads, d]."""
    return tensor if tensor.shape[2] == kv_heads else tensor.unflatten(2, (kv_heads, -1)).sum(3)


def _widen(tensor: Tensor, key: Tensor) -> Tensor:
    missing = key.shape[-1] - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor
