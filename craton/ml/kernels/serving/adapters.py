"""LoRA adapters (arXiv:2106.09685), any mix of them among the tokens of a step: out += B · A · x, without gradients.

All slots are stacked: a [parts · slots · rank, in], b [outs, parts · slots · rank]. A fused projection has one part for
each layer it fuses. On CUDA, Triton kernels read only the slots in use, so room for adapters costs little. Elsewhere
all tokens are multiplied with all slots, and the columns of other slots are zeroed in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear

from craton.ml.kernels import elementwise
from craton.ml.kernels.serving.paged import FEW_ROWS, skinny_linear


class SlotsOfTokens(NamedTuple):
    """The adapter slot of each token of a step. The kernel that writes `of_tokens` must not be one of the two before
    the first that uses it, because these may still run then."""

    of_tokens: Tensor  # int32 [tokens]; -1: no adapter
    absent: Tensor  # bool [tokens, slots · rank]: the column is not of the token's slot
    slots: int
    rank: int


def add_adapters(outs: Sequence[Tensor], x: Tensor, a: Tensor, b: Sequence[Tensor], tokens: SlotsOfTokens) -> None:
    """Add to one or two layers' outputs of the same x [tokens, in], in place; their rows of A follow each other."""
    if elementwise.is_fused(x):
        from craton.ml.kernels.triton import adapters

        adapters.add_adapters(outs, x, a, b, tokens.of_tokens, tokens.slots, tokens.rank)
        return
    narrow = linear(x, a).unflatten(1, (-1, tokens.absent.shape[1]))  # [tokens, parts, slots · rank]
    # not multiplied by zero: an overflow in one adapter would reach requests that do not use it
    narrow.masked_fill_(tokens.absent.unsqueeze(1), 0.0)
    for out, own_b, part in zip(outs, b, narrow.flatten(1).chunk(len(outs), dim=1), strict=True):
        out.addmm_(part, own_b.t())


def adapted_skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, a: Tensor, b: Tensor, tokens: SlotsOfTokens
) -> Tensor:
    """`skinny_linear` with adapters, which are added to its sums."""
    if elementwise.is_fused(x) and len(x) <= FEW_ROWS:
        from craton.ml.kernels.triton import adapters, skinny

        narrow = adapters.multiply_a(x, a, tokens.of_tokens, tokens.slots, tokens.rank)
        return skinny.linear(x, weight, bias, scale, narrow, b)
    out = skinny_linear(x, weight, bias, scale)
    add_adapters((out,), x, a, (b,), tokens)
    return out


def adapted_skinny_gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    a: Tensor,
    gate_b: Tensor,
    up_b: Tensor,
    tokens: SlotsOfTokens,
) -> Tensor:
    """`skinny_gated` with adapters; the rows of A of gate and up follow each other."""
    if elementwise.is_fused(x) and len(x) <= FEW_ROWS:
        from craton.ml.kernels.triton import adapters, skinny

        narrow = adapters.multiply_a(x, a, tokens.of_tokens, tokens.slots, tokens.rank)
        return skinny.gated(x, gate, up, gate_scale, up_scale, narrow, gate_b, up_b)
    gated, lifted = skinny_linear(x, gate, None, gate_scale), skinny_linear(x, up, None, up_scale)
    add_adapters((gated, lifted), x, a, (gate_b, up_b), tokens)
    return elementwise.swiglu(gated, lifted)
