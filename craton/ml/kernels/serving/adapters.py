"""Low-rank adapters (arXiv:2106.09685) of tokens that each ask for another: out += B · A · x, with each one's A and B.

Many tokens are multiplied with the A and B of all slots stacked, and what a token did not ask for is set to zero in
between; few take what is theirs alone.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from craton.ml.kernels import elementwise
from craton.ml.kernels.serving.paged import FEW_ROWS


def add_adapters(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, of_tokens: Tensor, absent: Tensor, slots: int, rank: int
) -> Tensor:
    """Adds to out [tokens, outs] in place, and returns it.

    x [tokens, in]; a [parts · slots · rank, in]; b [outs, parts · slots · rank]; of_tokens int32 [tokens], the slot of
    each, -1 for none; absent bool [tokens, slots · rank], where a column is not of the token's slot.
    """
    if elementwise.is_fused(x) and len(x) <= FEW_ROWS:
        from craton.ml.kernels.triton import adapters as triton_adapters

        return triton_adapters.add_adapters(out, x, a, b, of_tokens, slots, rank)
    narrow = linear(x, a).unflatten(1, (-1, absent.shape[1]))  # [tokens, parts, slots · rank]
    # not multiplied by zero: what overflows in one adapter would reach requests that have nothing to do with it
    narrow.masked_fill_(absent.unsqueeze(1), 0.0)
    return out.addmm_(narrow.flatten(1), b.t())
