"""Causal attention inside documents: the fastest kernel of the device, with the same result on every device.

Rows without document boundaries use the dense causal kernel (cuDNN on Hopper). Packed rows use a variable-length kernel
on CUDA, and a mask on the CPU, where none exists.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from craton.ml.collectives import Peers
from craton.ml.kernels.context import context_attention
from craton.ml.kernels.documents import Documents, visible
from craton.ml.kernels.partial_attention import BACKENDS


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None = None,
    scale: float | None = None,
    window: int = 0,
    context: Peers | None = None,
    gathered: bool = False,
) -> Tensor:
    """query [rows, sequence, heads, d], key [.., kv_heads, d], value [.., kv_heads, dv] → [rows, sequence, heads, dv].

    A token sees itself and the tokens before it in its document, at most `window` of them unless that is 0. With
    `context` the tokens are this rank's two pieces of the sequence; `gathered` means that keys and values are already
    whole.
    """
    if context is not None:
        return context_attention(query, key, value, documents, scale, window, context, gathered)
    sequence = query.shape[1]
    window = 0 if window >= sequence else window
    if documents is None and not window:
        return _dense(query, key, value, None, scale)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]:
        return _packed(query, key, value, documents, scale, window)
    mask = visible(0, sequence, window, None if documents is None else documents.numbers, query.device)
    return _dense(query, key, value, mask, scale)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if grouped and not query.is_cuda:
        # the fast CPU kernel does not support grouped-query attention
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
        # torch 2.11 does not support grouped-query attention here
        repeats = heads // key.shape[2]
        key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    window_size = (window - 1 if window else -1, 0)  # how far a token sees to the left and to the right
    out = varlen_attn(query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=window_size)
    return cast(Tensor, out).view(rows, sequence, heads, -1)
