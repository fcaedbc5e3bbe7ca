"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1; unchanged in V3).

Queries and keys/values pass through narrow latents with a norm in between. Position enters through a few extra
dimensions that all heads' keys share. For training, the latents are expanded and the usual attention kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from craton.ml.collectives import ALONE, Connections, gather
from craton.ml.kernels import ATTENTION_OPERATIONS, Documents, attention, gather_in_order, keeping, reference
from craton.ml.kernels.serving import Past
from craton.ml.models.config import DecoderConfig
from craton.ml.models.linear import Linear, Norm
from craton.ml.models.rope import yarn_mscale

# The published models use this for the norms of the latents, whatever their other norms use.
LATENT_NORM_EPSILON = 1e-6


class LatentAttention(nn.Module):
    """x [rows, sequence, hidden] → the same; with tensor parallelism [rows · sequence / tp, hidden], where each rank
    computes the latents of its share of the tokens and gathers them."""

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.connections: Connections = ALONE
        self.layer = layer
        shape = config.shape
        mla = shape.mla
        assert mla is not None, "latent attention needs shape.mla"
        self.mla = mla
        self.heads = shape.heads
        query_width = shape.heads * (mla.qk_nope + mla.qk_rope)
        if mla.q_lora:
            self.q_a = Linear(shape.hidden, mla.q_lora)
            self.q_a_norm = Norm(mla.q_lora, eps=LATENT_NORM_EPSILON)
            self.q_b = Linear(mla.q_lora, query_width, cut=0)
        else:
            self.q = Linear(shape.hidden, query_width, cut=0)
        self.kv_a = Linear(shape.hidden, mla.kv_lora + mla.qk_rope)
        self.kv_a_norm = Norm(mla.kv_lora, eps=LATENT_NORM_EPSILON)
        self.kv_b = Linear(mla.kv_lora, shape.heads * (mla.qk_nope + mla.v_head), cut=0)
        self.output = Linear(shape.heads * mla.v_head, shape.hidden, cut=1)
        self.scale = (mla.qk_nope + mla.qk_rope) ** -0.5
        if config.rope.scaling != "none" and config.rope.mscale_all_dim:
            # DeepSeek applies YaRN's temperature to the scores, where it also affects dimensions without rotation
            self.scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Documents | Past | None = None) -> Tensor:
        cosine, sine = rope
        mla, tensor = self.mla, self.connections.tensor
        places = x.shape[:2] if tensor is None else cosine.shape[:2]
        query = self.q_b(self.q_a_norm(self.q_a(x))) if mla.q_lora else self.q(x)
        query = query.view(*places, -1, mla.qk_nope + mla.qk_rope)  # with tensor parallelism: some of the heads
        query_still, query_turning = query.split((mla.qk_nope, mla.qk_rope), dim=-1)
        query = torch.cat((query_still, reference.rotate(query_turning, cosine, sine)), dim=-1)

        latent, key_turning = self.kv_a(x).split((mla.kv_lora, mla.qk_rope), dim=-1)
        latent = self.kv_a_norm(latent)
        if self.connections.context is not None:
            assert not isinstance(documents, Past), "context parallelism is for training"
            mixed = self._mix_across(query, latent, key_turning, rope, documents)
        else:
            if tensor is not None:
                key_turning = gather(key_turning, tensor).unflatten(0, places)
            key_turning = reference.rotate(key_turning.unsqueeze(-2), cosine, sine)
            key, value = self._expand(latent, key_turning)
            if isinstance(documents, Past) or (documents is not None and x.is_cuda):
                # the variable-length kernel, and the KV cache, need values as wide as keys
                value = pad(value, (0, key.shape[-1] - mla.v_head))
            if isinstance(documents, Past):
                query, key, value = (part.flatten(0, 1) for part in (query, key, value))
                mixed = documents.attend_expanded(self.layer, query, key, value, self.scale).unflatten(0, places)
            else:
                mixed = attention(query, key, value, documents, scale=self.scale)
            mixed = mixed[..., : mla.v_head]
        out: Tensor = self.output(mixed.flatten(2) if tensor is None else mixed.flatten(2).flatten(0, 1))
        return out

    def _expand(self, latent: Tensor, key_turning: Tensor) -> tuple[Tensor, Tensor]:
        """Expand key and value of every head from the latents and the rotated key part that all heads share, [rows,
        sequence, 1, qk_rope]."""
        mla = self.mla
        expanded = self.kv_b(latent).view(*key_turning.shape[:2], -1, mla.qk_nope + mla.v_head)
        key_still, value = expanded.split((mla.qk_nope, mla.v_head), dim=-1)
        return torch.cat((key_still, key_turning.expand(*key_still.shape[:-1], -1)), dim=-1), value

    def _mix_across(
        self,
        query: Tensor,
        latent: Tensor,
        key_turning: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: Documents | None,
    ) -> Tensor:
        """Attention of this rank's pieces over the whole sequence. Latents are far narrower than keys and values, so
        they are gathered, over all ranks that hold tokens of these rows, and every rank expands them for its heads. The
        backward pass does both again, so a rank keeps only its own latents."""
        tensor = self.connections.tensor
        cosine, sine = rope
        if tensor is not None:  # this rank's share of the tokens
            cosine, sine = (table.flatten(0, 1).chunk(tensor.size)[tensor.rank] for table in rope)
        turned = reference.rotate(key_turning.unsqueeze(-2), cosine, sine).squeeze(-2)
        mixed: Tensor = checkpoint(
            self._mix_gathered,
            query,
            torch.cat((latent, turned), dim=-1),
            documents,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=keeping(ATTENTION_OPERATIONS),
        )
        return mixed

    def _mix_gathered(self, query: Tensor, narrow: Tensor, documents: Documents | None) -> Tensor:
        """narrow: latent and rotated key of this rank's tokens."""
        mla, context, holders = self.mla, self.connections.context, self.connections.rows
        assert context is not None
        assert holders is not None
        whole = gather_in_order(narrow, holders, context.size, rows=query.shape[0])
        latent, key_turning = whole.split((mla.kv_lora, mla.qk_rope), dim=-1)
        key, value = self._expand(latent, key_turning.unsqueeze(-2))
        return attention(query, key, value, documents, scale=self.scale, context=context, gathered=True)
