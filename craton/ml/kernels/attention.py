"""Causal attention inside documents: the fastest kernel the device has, the same numbers on every one.

Rows without document boundaries take the dense causal kernel (cuDNN on Hopper). Packed rows take a variable-length
kernel on CUDA, and a mask on the CPU, where none exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# Tried in this order; cuDNN is twice as fast as flash on Hopper (docs/measurements.md).
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Documents:
    """Which tokens of the rows belong together, as numbers and as offsets, made on the host before the step."""

    numbers: Tensor  # int32 [rows, sequence]
    offsets: Tensor  # int32 [documents + 1], where each begins in the flattened rows, and the end
    longest: int

    @classmethod
    def of(cls, numbers: Tensor | Documents | None) -> Documents | None:
        """From document numbers; waits for the device when they are not on the host."""
        if numbers is None or isinstance(numbers, Documents):
            return numbers
        host = numbers.cpu()
        changes = torch.ones_like(host, dtype=torch.bool)
        changes[:, 1:] = host[:, 1:] != host[:, :-1]
        starts = changes.flatten().nonzero().flatten()
        offsets = torch.cat([starts, starts.new_tensor([host.numel()])]).to(torch.int32)
        return cls(numbers, offsets.to(numbers.device), int(offsets.diff().max()))

    def to(self, device: torch.device | str) -> Documents:
        numbers, offsets = (tensor.to(device, non_blocking=True) for tensor in (self.numbers, self.offsets))
        return Documents(numbers, offsets, self.longest)

    def pin(self) -> Documents:
        return Documents(self.numbers.pin_memory(), self.offsets.pin_memory(), self.longest)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None = None,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """query [rows, sequence, heads, d], key [.., kv_heads, d], value [.., kv_heads, dv] → [rows, sequence, heads, dv].

    A token sees itself and those before it in its document, at most `window` of them when that is not 0.
    """
    sequence = query.shape[1]
    window = 0 if window >= sequence else window
    if documents is None and not window:
        return _dense(query, key, value, None, scale)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]:
        return _packed(query, key, value, documents, scale, window)
    mask = _mask(sequence, window, None if documents is None else documents.numbers, query.device)
    return _dense(query, key, value, mask, scale)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if grouped and not query.is_cuda:
        # the CPU's fast kernel knows no groups
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        grouped = False
    if query.is_cuda and not torch.compiler.is_compiling():
        with sdpa_kernel(BACKENDS, set_priority=True):
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
    else:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, scale: float | None, window: int
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, sequence, heads, _ = query.shape
    if documents is None:
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * sequence
        longest = sequence
    else:
        offsets, longest = documents.offsets, documents.longest
    if key.shape[2] != heads:
        # torch 2.11 knows no groups here
        repeats = heads // key.shape[2]
        key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    seen = (window - 1 if window else -1, 0)  # how far a token sees to the left and to the right
    out = varlen_attn(query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=seen)
    return cast(Tensor, out).view(rows, sequence, heads, -1)


def _mask(sequence: int, window: int, numbers: Tensor | None, device: torch.device) -> Tensor:
    """True where a token may look: [rows or 1, 1, sequence, sequence]."""
    place = torch.arange(sequence, device=device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0
    if window:
        mask &= distance < window
    mask = mask[None, None]
    if numbers is not None:
        mask = mask & (numbers[:, None, :, None] == numbers[:, None, None, :])
    return mask
