"""A model in the memory of Craton's own engine: bytes of its weights and KV cache, and the tokens of KV cache that fit.

Guarantees: pure functions of plain numbers, as the engine allocates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from craton.job.model import ModelShape

# Bytes of a weight: of the blocks, and of tensors that are never quantized (tables, head, norms, KV cache).
BLOCK_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
PLAIN_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}


def kv_bytes_per_token(shape: ModelShape, value_bytes: float) -> float:
    """Return κ, the KV cache bytes of one token: 2 · layers · key-value heads · width · bytes. Latent attention (MLA)
    caches a latent and a rotated key in each layer, which all heads share."""
    mla = shape.mla
    if mla is None:
        return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes
    return float(shape.layers * (mla.kv_lora + mla.qk_rope) * value_bytes)


@dataclass(frozen=True)
class ServedModel:
    """A model on one of `tp` ranks. Of the routed experts a rank holds one in `ep`, of MLA's latents all; everything
    else is sharded."""

    shape: ModelShape
    precision: str = "bf16"
    kv_precision: str = "auto"  # auto: as the model computes
    tp: int = 1
    ep: int = 1

    @cached_property
    def block_parameters(self) -> float:
        """Parameters of attention, MLPs and shared experts, which every token passes."""
        shape = self.shape
        dense = (shape.layers - shape.moe_layers) * shape.dense_mlp_parameters
        shared = shape.moe_layers * (shape.shared_expert_parameters + shape.router_parameters)
        return (shape.layers * shape.attention_parameters + dense + shared) / self.tp

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters of one rank's routed experts."""
        return self.shape.moe_layers * self.shape.experts * self.shape.expert_parameters / self.ep

    @cached_property
    def weight_bytes(self) -> float:
        """Weight bytes in memory; scales of quantized weights are a thousandth of it, and not counted."""
        tables = (1 if self.shape.tied_embeddings else 2) * self.shape.embedding_parameters / self.tp
        blocks = (self.block_parameters + self.expert_parameters) * BLOCK_BYTES[self.precision]
        wider = PLAIN_BYTES[self.precision] - BLOCK_BYTES[self.precision]
        return blocks + self._expansion_parameters * wider + tables * PLAIN_BYTES[self.precision]

    @property
    def _expansion_parameters(self) -> float:
        """Parameters that expand latents, which are never quantized."""
        shape, mla = self.shape, self.shape.mla
        return 0.0 if mla is None else shape.layers * mla.kv_lora * shape.heads * (mla.qk_nope + mla.v_head) / self.tp

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """κ of one rank: grouped heads are sharded, and latents (MLA) are not."""
        size = 1 if self.kv_precision == "fp8" else PLAIN_BYTES[self.precision]
        return kv_bytes_per_token(self.shape, size) / (self.tp if self.shape.mla is None else 1)

    def kv_tokens(
        self, memory_bytes: float, workspace_bytes: float, page: int, draft: ServedModel | None = None
    ) -> int:
        """Return the KV cache tokens that fit into this memory beside the weights, in whole pages; 0: none. A draft
        model has weights and a KV cache, too."""
        models = [self] if draft is None else [self, draft]
        left = memory_bytes - sum(model.weight_bytes for model in models) - workspace_bytes
        return max(0, int(left / (sum(model.kv_bytes_per_token for model in models) * page))) * page
