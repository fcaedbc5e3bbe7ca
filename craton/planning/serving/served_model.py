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


def kv_bytes_per_token(shape: ModelShape, value_bytes: float) -> float:
    """Return κ, the KV cache bytes of one token: 2 · layers · key-value heads · width · bytes. Latent attention (MLA)
    caches a latent and a rotated key in each layer, which all heads share."""
    mla = shape.mla
    if mla is None:
        return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes
    return float(shape.layers * (mla.kv_lora + mla.qk_rope) * value_bytes)


def plain_in_int4(shape: ModelShape, tp: int) -> float:
    """Return the parameters of linear layers on one rank that precision int4 leaves in bf16: the expansion of MLA's
    latents, and with tp the layers whose inputs are sharded, if these were grouped by activation."""
    mla, form = shape.mla, shape.int4 or ROUNDED_AT_LOAD
    plain = _expansion_parameters(shape)
    if form.by_activation and tp > 1:
        width = shape.heads * (shape.head_dim if mla is None else mla.v_head)
        ffn = (shape.layers - shape.moe_layers) * shape.ffn_hidden
        ffn += shape.moe_layers * shape.shared_experts * shape.moe_ffn_hidden
        plain += shape.hidden * (shape.layers * width + ffn)
    return plain / tp


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
        """Weight bytes in memory; the scales of fp8 weights are a thousandth of it, and not counted."""
        tables = (1 if self.shape.tied_embeddings else 2) * self.shape.embedding_parameters / self.tp
        if self.precision == "int4":
            blocks = self.int4_parameters * self.int4_bytes
            blocks += (self.block_parameters - self.int4_parameters + self.expert_parameters) * PLAIN_BYTES["int4"]
        else:
            wider = PLAIN_BYTES[self.precision] - BLOCK_BYTES[self.precision]
            blocks = (self.block_parameters + self.expert_parameters) * BLOCK_BYTES[self.precision]
            blocks += _expansion_parameters(self.shape) / self.tp * wider
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


def _expansion_parameters(shape: ModelShape) -> int:
    """Return the parameters that expand MLA's latents, which are never quantized."""
    mla = shape.mla
    return 0 if mla is None else shape.layers * mla.kv_lora * shape.heads * (mla.qk_nope + mla.v_head)
