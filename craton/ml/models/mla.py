"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1; unchanged in V3).

Queries and keys/values pass through narrow latents with a norm in between. Position enters through a few extra
dimensions that all heads' keys share. For training, the latents are expanded and the usual attention kernel runs.

For serving, the KV cache holds the normed latent and the rotated key of a token, once for all heads. The expansion is
absorbed into queries and outputs, so that attention runs over the latents as if they were one key/value head:

    key = [W_k · latent, rotated]     query · key = [W_kᵀ · query, rotated query] · [latent, rotated]
    value = W_v · latent              Σ weight · value = W_v · Σ weight · latent

Both matmuls use the rows of `kv_b` where they are, so an update of the weights leaves nothing stale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from craton.ml.collectives import ALONE, Connections, gather, own_part
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
        if isinstance(documents, Past):
            return self._serve(x, rope, documents)
        cosine, sine = rope
        mla, tensor = self.mla, self.connections.tensor
        places = x.shape[:2] if tensor is None else cosine.shape[:2]
        query_still, query_turning = self._query(x, places)
        query = torch.cat((query_still, reference.rotate(query_turning, cosine, sine)), dim=-1)

        latent, key_turning = self.kv_a(x).split((mla.kv_lora, mla.qk_rope), dim=-1)
        latent = self.kv_a_norm(latent)
        if self.connections.context is not None:
            mixed = self._mix_across(query, latent, key_turning, rope, documents)
        else:
            if tensor is not None:
                key_turning = gather(key_turning, tensor).unflatten(0, places)
            key_turning = reference.rotate(key_turning.unsqueeze(-2), cosine, sine)
            key, value = self._expand(latent, key_turning)
            if documents is not None and x.is_cuda:  # the variable-length kernel needs values as wide as keys
                value = pad(value, (0, key.shape[-1] - mla.v_head))
            mixed = attention(query, key, value, documents, scale=self.scale)[..., : mla.v_head]
        out: Tensor = self.output(mixed.flatten(2) if tensor is None else mixed.flatten(2).flatten(0, 1))
        return out

    def _query(self, x: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the two parts of the queries, [*places, heads, …], before rotation; with tensor parallelism of this
        rank's heads."""
        mla = self.mla
        query = self.q_b(self.q_a_norm(self.q_a(x))) if mla.q_lora else self.q(x)
        still, turning = query.view(*places, -1, mla.qk_nope + mla.qk_rope).split((mla.qk_nope, mla.qk_rope), dim=-1)
        return still, turning

    def _serve(self, x: Tensor, rope: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """Attention over the KV cache, whose tokens are those of `rope` in one dimension.

        Prefill is absorbed too. Expanding the cached latents costs fewer FLOPs for chunks of more than kv_lora ·
        (qk_nope + v_head) / (2 · kv_lora - qk_nope - v_head) tokens (171 of DeepSeek), which attend to them with 320
        numbers per head instead of 1088. But it needs memory for every head's keys and values of whole contexts, the
        merge of partial results, and the absorbed path for shorter chunks beside it."""
        cosine, sine = (table.flatten(0, 1) for table in rope)
        tensor = self.connections.tensor
        still, turning = self._query(x, cosine.shape[:1])
        query = torch.cat((self._into_latents(still), reference.rotate(turning, cosine, sine)), dim=-1)
        compressed = self.kv_a(x)
        compressed = compressed.flatten(0, -2) if tensor is None else tensor.gather(compressed)
        weight = own_part(self.kv_a_norm.weight)
        latents = past.attend_latents(self.layer, query, compressed, rope, weight, LATENT_NORM_EPSILON, self.scale)
        out: Tensor = self.output(self._out_of_latents(latents).flatten(1))
        return out.view(x.shape)

    def _into_latents(self, still: Tensor) -> Tensor:
        """W_kᵀ · query of each head: still [tokens, heads, qk_nope] → [tokens, heads, kv_lora]."""
        rows = slice(0, self.mla.qk_nope)
        absorbed = (still.transpose(0, 1) @ self._rows_of_heads(self.kv_b.weight, rows)).transpose(0, 1)
        if (low_rank := self.kv_b.low_rank) is None:
            return absorbed
        narrow = (still.transpose(0, 1) @ self._rows_of_heads(low_rank.b, rows)).transpose(0, 1)
        return absorbed + low_rank.used(narrow) @ low_rank.a

    def _out_of_latents(self, latents: Tensor) -> Tensor:
        """W_v · latent of each head: latents [tokens, heads, kv_lora] → [tokens, heads, v_head]."""
        rows = slice(self.mla.qk_nope, None)
        mixed = latents.transpose(0, 1) @ self._rows_of_heads(self.kv_b.weight, rows).transpose(1, 2)
        if (low_rank := self.kv_b.low_rank) is not None:
            narrow = low_rank.used(latents @ low_rank.a.t()).transpose(0, 1)
            mixed = mixed + narrow @ self._rows_of_heads(low_rank.b, rows).transpose(1, 2)
        return mixed.transpose(0, 1)

    def _rows_of_heads(self, weight: Tensor, rows: slice) -> Tensor:
        """Return a view of rows of each head: weight [heads · (qk_nope + v_head), width] → [heads, rows, width]."""
        heads: Tensor = own_part(weight).unflatten(0, (-1, self.mla.qk_nope + self.mla.v_head))
        return heads[:, rows]

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
