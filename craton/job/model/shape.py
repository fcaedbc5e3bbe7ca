"""The shape of a decoder-only transformer, for planning, training and serving, and its parameter counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from craton.job.model.quantization import Int4Format


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank projections of queries, keys and values."""

    q_lora: int  # 0: queries are projected directly
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int


@dataclass(frozen=True)
class ModelShape:
    """One decoder-only transformer; experts == 0 means dense."""

    name: str
    layers: int
    hidden: int
    ffn_hidden: int  # of the dense layers
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    mla: MlaShape | None = None
    experts: int = 0
    top_k: int = 0
    moe_ffn_hidden: int = 0  # of one expert
    shared_experts: int = 0  # each as wide as one routed expert
    dense_layers: int = 0  # leading layers without experts
    mtp_layers: int = 0  # multi-token-prediction layers after the last layer
    sliding_window: int = 0  # 0: every layer attends to the whole sequence
    sliding_layers: int = 0  # number of layers that use the window
    linear_layers: int = 0  # of those with a window: linear attention, whose state costs as much as the window
    qk_norm: bool = False
    causal: bool = True  # False: every token attends to all others
    max_sequence: int = 0  # 0: not stated
    source: str = ""
    int4: Int4Format | None = None  # of weights that are stored in 4 bits

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.is_moe else 0

    @cached_property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention projections."""
        if self.mla is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mla = self.mla
        qk = mla.qk_nope + mla.qk_rope
        query = self.hidden * mla.q_lora + mla.q_lora * self.heads * qk if mla.q_lora else self.hidden * self.heads * qk
        key_value = self.hidden * (mla.kv_lora + mla.qk_rope) + mla.kv_lora * self.heads * (mla.qk_nope + mla.v_head)
        return query + key_value + self.heads * mla.v_head * self.hidden

    @cached_property
    def dense_mlp_parameters(self) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden * self.ffn_hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.moe_ffn_hidden

    @cached_property
    def shared_expert_parameters(self) -> int:
        return self.shared_experts * self.expert_parameters

    @property
    def router_parameters(self) -> int:
        return self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding table, vocabulary × hidden; the head is a second table unless tied."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All trained weights, with norms, without multi-token-prediction layers."""
        norms = (2 * self.layers + 1) * self.hidden
        moe_layer = self.router_parameters + self.shared_expert_parameters + self.experts * self.expert_parameters
        return (
            self.layers * self.attention_parameters
            + (self.layers - self.moe_layers) * self.dense_mlp_parameters
            + self.moe_layers * moe_layer
            + (1 if self.tied_embeddings else 2) * self.embedding_parameters
            + norms
        )

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token uses."""
        return self.parameters - self.moe_layers * (self.experts - self.top_k) * self.expert_parameters
