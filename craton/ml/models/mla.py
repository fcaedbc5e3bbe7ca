"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; unchanged in V3).

Queries and keys/values pass through narrow latents with a norm in between; position enters through a few extra
dimensions that every head's key shares. For training the latents are expanded and the usual attention kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from craton.ml.kernels import Documents, attention, reference
from craton.ml.models.config import DecoderConfig
from craton.ml.models.rope import yarn_mscale

# The published models leave the norms of the latents at this, whatever their other norms use.
LATENT_NORM_EPSILON = 1e-6


class LatentAttention(nn.Module):
    """x [rows, sequence, hidden] → the same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape = config.shape
        mla = shape.mla
        assert mla is not None, "latent attention needs shape.mla"
        self.mla = mla
        self.heads = shape.heads
        query_width = shape.heads * (mla.qk_nope + mla.qk_rope)
        if mla.q_lora:
            self.q_a = nn.Linear(shape.hidden, mla.q_lora, bias=False)
            self.q_a_norm = nn.RMSNorm(mla.q_lora, eps=LATENT_NORM_EPSILON)
            self.q_b = nn.Linear(mla.q_lora, query_width, bias=False)
        else:
            self.q = nn.Linear(shape.hidden, query_width, bias=False)
        self.kv_a = nn.Linear(shape.hidden, mla.kv_lora + mla.qk_rope, bias=False)
        self.kv_a_norm = nn.RMSNorm(mla.kv_lora, eps=LATENT_NORM_EPSILON)
        self.kv_b = nn.Linear(mla.kv_lora, shape.heads * (mla.qk_nope + mla.v_head), bias=False)
        self.output = nn.Linear(shape.heads * mla.v_head, shape.hidden, bias=False)
        self.scale = (mla.qk_nope + mla.qk_rope) ** -0.5
        if config.rope.scaling != "none" and config.rope.mscale_all_dim:
            # DeepSeek puts YaRN's temperature into the scores, where it also reaches dimensions that do not turn
            self.scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Documents | None = None) -> Tensor:
        cosine, sine = rope
        mla, heads = self.mla, self.heads
        query = self.q_b(self.q_a_norm(self.q_a(x))) if mla.q_lora else self.q(x)
        query = query.unflatten(-1, (heads, mla.qk_nope + mla.qk_rope))
        query_still, query_turning = query.split((mla.qk_nope, mla.qk_rope), dim=-1)
        query = torch.cat((query_still, reference.rotate(query_turning, cosine, sine)), dim=-1)

        latent, key_turning = self.kv_a(x).split((mla.kv_lora, mla.qk_rope), dim=-1)
        expanded = self.kv_b(self.kv_a_norm(latent)).unflatten(-1, (heads, mla.qk_nope + mla.v_head))
        key_still, value = expanded.split((mla.qk_nope, mla.v_head), dim=-1)
        key_turning = reference.rotate(key_turning.unsqueeze(-2), cosine, sine)  # one for all heads
        key = torch.cat((key_still, key_turning.expand(*key_still.shape[:-1], -1)), dim=-1)

        if documents is not None and x.is_cuda:
            # the variable-length kernel wants values as wide as keys
            value = pad(value, (0, key.shape[-1] - mla.v_head))
        mixed = attention(query, key, value, documents, scale=self.scale)[..., : mla.v_head]
        out: Tensor = self.output(mixed.flatten(2))
        return out
