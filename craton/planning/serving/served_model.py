"""A model in the memory of Craton's own engine: bytes of its weights and KV cache, and the tokens of KV cache that fit.

Guarantees: pure functions of plain numbers, as the engine allocates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from craton.job.model import ROUNDED_AT_LOAD, ModelShape

# Bytes of a weight: of the blocks, and of tensors that are never quantized (tables, head, norms, KV cache). Weights in
# int4 have a format of their own.
BLOCK_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
PLAIN_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2, "int4": 2}


def kv_bytes_per_token(shape: ModelShape, value_bytes: float, *, expanded: bool = False) -> float:
    """Return κ, the KV cache bytes of one token: 2 · layers · key-value heads · width · bytes. Latent attention (MLA)
    caches the latents; `expanded`: every head's keys and values, as Craton's engine does."""
    mla = shape.mla
    if mla is None:
        return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes
    if expanded:
        return 2.0 * shape.layers * shape.heads * (mla.qk_nope + mla.qk_rope) * value_bytes
    return float(shape.layers * (mla.kv_lora + mla.qk_rope) * value_bytes)


def plain_in_int4(shape: ModelShape, tp: int) -> float:
    """Return the parameters of linear layers on one rank that precision int4 leaves in bf16: the expansion of MLA's
    latents, and with tp the layers whose inputs are sharded, if these were grouped by activation."""
    mla, form = shape.mla, shape.int4 or ROUNDED_AT_LOAD
    plain = 0 if mla is None else shape.layers * mla.kv_lora * shape.heads * (mla.qk_nope + mla.v_head)
    if form.by_activation and tp > 1:
        width = shape.heads * (shape.head_dim if mla is None else mla.v_head)
        ffn = (shape.layers - shape.moe_layers) * shape.ffn_hidden
        ffn += shape.moe_layers * shape.shared_experts * shape.moe_ffn_hidden
        plain += shape.hidden * (shape.layers * width + ffn)
    return plain / tp


@dataclass(frozen=True)
class ServedModel:
    """A model on one of `tp` ranks. Routed experts are replicated on every rank; everything else is sharded."""

    shape: ModelShape
    precision: str = "bf16"
    kv_precision: str = "auto"  # auto: as the model computes
    tp: int = 1

    @cached_property
    def block_parameters(self) -> float:
        """Parameters of attention, MLPs and shared experts, which every token passes."""
        shape = self.shape
        dense = (shape.layers - shape.moe_layers) * shape.dense_mlp_parameters
        shared = shape.moe_layers * (shape.shared_expert_parameters + shape.router_parameters)
        return (shape.layers * shape.attention_parameters + dense + shared) / self.tp

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters of all routed experts."""
        return float(self.shape.moe_layers * self.shape.experts * self.shape.expert_parameters)

    @cached_property
    def weight_bytes(self) -> float:
        """Weight bytes in memory; the scales of fp8 weights are a thousandth of it, and not counted."""
        tables = (1 if self.shape.tied_embeddings else 2) * self.shape.embedding_parameters / self.tp
        if self.precision == "int4":
            blocks = self.int4_parameters * self.int4_bytes
            blocks += (self.block_parameters - self.int4_parameters + self.expert_parameters) * PLAIN_BYTES["int4"]
        else:
            blocks = (self.block_parameters + self.expert_parameters) * BLOCK_BYTES[self.precision]
        return blocks + tables * PLAIN_BYTES[self.precision]

    @cached_property
    def int4_parameters(self) -> float:
        """Parameters that precision int4 keeps in 4 bits."""
        routers = self.shape.moe_layers * self.shape.router_parameters / self.tp
        return self.block_parameters - routers - plain_in_int4(self.shape, self.tp)

    @property
    def int4_bytes(self) -> float:
        """Bytes of a weight in 4 bits with its share of scale and zero point."""
        return (self.shape.int4 or ROUNDED_AT_LOAD).bytes_per_weight(self.shape.hidden)

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """κ of one rank. Latent attention (MLA) caches expanded keys and values."""
        size = 1 if self.kv_precision == "fp8" else PLAIN_BYTES[self.precision]
        return kv_bytes_per_token(self.shape, size, expanded=True) / self.tp

    def kv_tokens(
        self, memory_bytes: float, workspace_bytes: float, page: int, draft: ServedModel | None = None
    ) -> int:
        """Return the KV cache tokens that fit into this memory beside the weights, in whole pages; 0: none. A draft
        model has weights and a KV cache, too."""
        models = [self] if draft is None else [self, draft]
        left = memory_bytes - sum(model.weight_bytes for model in models) - workspace_bytes
        return max(0, int(left / (sum(model.kv_bytes_per_token for model in models) * page))) * page
