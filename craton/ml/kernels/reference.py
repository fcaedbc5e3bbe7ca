"""Plain PyTorch twins of every fused kernel: the test reference, the CPU path, and what torch.compile fuses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

Norms = tuple[Tensor, Tensor, float]  # weights of the query and key norms, and their epsilon


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + delta, root-mean-square norm of it)."""
    total = x if delta is None else x + delta
    return total, torch_rms_norm(total, (total.shape[-1],), weight, epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [..., heads, head_dim] with tables [..., turning / 2]: rotate the first half of the rotary dimensions against
    the second; the other dimensions pass unchanged."""
    half = cosine.shape[-1]
    first, second, still = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat((*(part.to(x.dtype) for part in turned), still), dim=-1)


def split_heads(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [..., rows grouped by key/value head] → query [..., heads, d], key and value [..., kv_heads, d]."""
    grouped = qkv.unflatten(-1, (kv_heads, heads // kv_heads + 2, head_dim))
    query, key, value = grouped.split((heads // kv_heads, 1, 1), dim=-2)
    return query.flatten(-3, -2), key.squeeze(-2), value.squeeze(-2)


def split_and_rotate(
    qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, kv_heads: int, head_dim: int, norms: Norms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [..., rows grouped by key/value head] → rotated query and key, normed before that if they have norms, and
    value."""
    query, key, value = split_heads(qkv, heads, kv_heads, head_dim)
    if norms is not None:
        query_weight, key_weight, epsilon = norms
        query = torch_rms_norm(query, (head_dim,), query_weight, epsilon)
        key = torch_rms_norm(key, (head_dim,), key_weight, epsilon)
    return rotate(query, cosine, sine), rotate(key, cosine, sine), value


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) · up, gradient of gate, gradient of up)."""
    sigmoid = gate.sigmoid()
    silu_of_gate = gate * sigmoid
    return silu_of_gate * up, gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * silu_of_gate


def log_probs_and_gradient(logits: Tensor, labels: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each label, d Σ coefficient · log p / d logits); labels of -100 are ignored."""
    known = labels >= 0
    index = labels.clamp(min=0).unsqueeze(-1)
    log_softmax = logits.float().log_softmax(-1)
    log_probs = log_softmax.gather(-1, index).squeeze(-1) * known
    gradient = -log_softmax.exp_()
    gradient.scatter_add_(-1, index, torch.ones_like(index, dtype=gradient.dtype))
    gradient *= (coefficients * known).unsqueeze(-1)
    return log_probs, gradient.to(logits.dtype)
