"""Roofline of a serving step (its minimum time), and the tokens of KV cache that fit beside the weights.

A step reads the weights once, whatever the number of requests, and the KV cache of all requests; every token is
multiplied with every weight it passes. With measured rates:

    step ≥ max(bytes / bytes per second, FLOPs / FLOPs per second) + bytes sent to other ranks / link's bytes per second

    bytes = weights without the input table + κ · context        κ: KV cache bytes per token
    FLOPs = 2 · parameters · tokens + 2 · (query and value width) · heads · layers · pairs of query and key

Guarantees: pure functions of plain numbers; more tokens, more context, slower devices never make a step shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from craton.infrastructure import Gpu
from craton.job.model import ModelShape
from craton.planning.rates import rates_of

# Bytes of a weight: of the blocks, and of tensors that are never quantized (tables, head, norms, KV cache).
BLOCK_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
PLAIN_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
COLLECTIVES_PER_LAYER = 4  # gathered before attention and MLP, summed and scattered after each


@dataclass(frozen=True)
class DevicePeaks:
    """Maximum rates of one rank's device: measured, or from the catalog (`peaks_of`)."""

    bytes_per_second: float  # a long pass over memory
    flops: float  # per second, matmuls with the served weights
    link_bytes_per_second: float = 0.0  # to the other ranks of tp; 0: not counted


def peaks_of(gpu: Gpu, precision: str = "bf16", link_bytes_per_second: float = 0.0) -> DevicePeaks:
    """Return the best measured rates of this kind of GPU."""
    rates = rates_of(gpu)
    return DevicePeaks(rates.streaming_bytes_per_second, rates.matrix_flops[precision], link_bytes_per_second)


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
    def head_parameters(self) -> float:
        return self.shape.embedding_parameters / self.tp

    @cached_property
    def weight_bytes(self) -> float:
        """Weight bytes in memory; scales of quantized weights are a thousandth of it, and not counted."""
        tables = (1 if self.shape.tied_embeddings else 2) * self.head_parameters
        return self.block_bytes + self.expert_bytes + tables * PLAIN_BYTES[self.precision]

    @cached_property
    def block_bytes(self) -> float:
        return self.block_parameters * BLOCK_BYTES[self.precision]

    @cached_property
    def expert_bytes(self) -> float:
        return self.expert_parameters * BLOCK_BYTES[self.precision]

    @cached_property
    def head_bytes(self) -> float:
        return self.head_parameters * PLAIN_BYTES[self.precision]

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """κ = 2 · layers · key-value heads · width · bytes. Latent attention (MLA) caches expanded keys and values."""
        shape = self.shape
        heads, width = (shape.heads, shape.mla.qk_nope + shape.mla.qk_rope) if shape.mla else (shape.kv_heads, 0)
        size = 1 if self.kv_precision == "fp8" else PLAIN_BYTES[self.precision]
        return 2.0 * shape.layers * heads / self.tp * (width or shape.head_dim) * size

    @cached_property
    def flops_per_pair(self) -> float:
        """FLOPs of score and value of one query with one key, over all heads and layers."""
        mla = self.shape.mla
        width = mla.qk_nope + mla.qk_rope + mla.v_head if mla else 2 * self.shape.head_dim
        return 2.0 * self.shape.layers * self.shape.heads / self.tp * width

    def kv_tokens(
        self, memory_bytes: float, workspace_bytes: float, page: int, draft: ServedModel | None = None
    ) -> int:
        """Return the KV cache tokens that fit into this memory beside the weights, in whole pages; 0: none. A draft
        model has weights and a KV cache, too."""
        models = [self] if draft is None else [self, draft]
        left = memory_bytes - sum(model.weight_bytes for model in models) - workspace_bytes
        return max(0, int(left / (sum(model.kv_bytes_per_token for model in models) * page))) * page


class Roofline:
    """The minimum time of a step on given hardware limits (`DevicePeaks`). A call costs about a microsecond."""

    def __init__(self, model: ServedModel, roofs: DevicePeaks) -> None:
        shape = model.shape
        self.model, self.roofs = model, roofs
        self._tp = model.tp
        self._window = shape.sliding_window if shape.sliding_layers else 0
        share = shape.sliding_layers / shape.layers if self._window else 0.0
        self._windowed_bytes = model.kv_bytes_per_token * share  # of a token, in layers with a window
        self._kv_bytes = model.kv_bytes_per_token - self._windowed_bytes
        self._missed = 1.0 - shape.top_k / shape.experts if shape.is_moe else 1.0  # share of unused experts
        active = shape.moe_layers * shape.top_k * shape.expert_parameters / model.tp
        self._token_flops = 2.0 * (model.block_parameters + active)
        self._sampled_flops = 2.0 * model.head_parameters
        sent = COLLECTIVES_PER_LAYER * shape.layers * shape.hidden * PLAIN_BYTES[model.precision]
        self._sent_bytes = sent * (model.tp - 1) / model.tp

    def step_seconds(
        self, tokens: int, context_tokens: int, sampled: int, pairs: float = 0.0, shared_tokens: int = 0
    ) -> float:
        """Return the time of a step that computes `tokens`, with `context_tokens` of KV cache over all requests, and
        samples `sampled` next tokens. `pairs`: of queries and keys in prefill; every context token is in at least
        one. `shared_tokens` of the context are not read again, because another request of the batch shares them."""
        if tokens <= 0:
            return 0.0
        roofs = self.roofs
        memory = self.read_bytes(tokens, context_tokens, sampled, shared_tokens) / roofs.bytes_per_second
        compute = self.step_flops(tokens, context_tokens, sampled, pairs) / roofs.flops
        sent = self._sent_bytes * tokens / roofs.link_bytes_per_second if roofs.link_bytes_per_second else 0.0
        return max(memory, compute) + sent

    def read_bytes(self, tokens: int, context_tokens: int, sampled: int, shared_tokens: int = 0) -> float:
        """Return bytes of weights and KV cache; of routed experts those that this many tokens hit with even routing.
        Layers with a sliding window do not share reads."""
        model = self.model
        read = model.block_bytes + self._kv_bytes * (context_tokens - shared_tokens)
        if self._window:
            read += self._windowed_bytes * min(context_tokens, self._window * max(sampled, 1))
        if sampled:
            read += model.head_bytes
        if model.expert_parameters:
            read += model.expert_bytes * (1.0 - self._missed ** -(-tokens // self._tp))
        return read

    def step_flops(self, tokens: int, context_tokens: int, sampled: int, pairs: float = 0.0) -> float:
        attention = self.model.flops_per_pair * max(pairs, context_tokens)
        return self._token_flops * tokens + self._sampled_flops * sampled + attention

    def decode_seconds(self, batch: int, mean_context: float) -> float:
        """Return the time of one decode step: one more token for each of `batch` requests."""
        return self.step_seconds(batch, round(batch * mean_context), batch)

    def prefill_seconds(self, tokens: int, sequence: float) -> float:
        """Return the prefill time of `tokens` of prompts of this length: a token attends to half of its prompt on
        average."""
        sampled = max(1, round(tokens / max(sequence, 1.0)))
        return self.step_seconds(tokens, tokens, sampled, pairs=0.5 * tokens * sequence)

    @property
    def balanced_batch(self) -> float:
        """Batch size with short context from which a step is compute-bound: (F / BW) · bytes / (2 · parameters)."""
        ratio = self.roofs.flops / self.roofs.bytes_per_second
        return ratio * self.model.block_bytes / self._token_flops
