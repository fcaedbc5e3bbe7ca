"""What a step of serving costs at least, and how much text fits beside the weights.

A step reads the weights once, whatever the number of requests, and the keys and values of all their pasts; it
multiplies every token with every weight it passes. So, with measured rates,

    step ≥ max(bytes / bytes per second, FLOPs / FLOPs per second) + bytes sent to other ranks / link's bytes per second

    bytes = weights without the input table + κ · context        κ: bytes of one token's keys and values
    FLOPs = 2 · parameters · tokens + 2 · (query and value width) · heads · layers · pairs of query and key

Guarantees: pure functions of plain numbers; more tokens, more context, slower devices never make a step shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from craton.infrastructure import Gpu
from craton.job.model import ModelShape
from craton.planning.rates import rates_of

# Bytes of a weight: of the blocks, and of what is never quantized (tables, head, norms, keys and values).
BLOCK_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
PLAIN_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
COLLECTIVES_PER_LAYER = 4  # gathered before attention and MLP, summed and scattered after each


@dataclass(frozen=True)
class Roofs:
    """What the device of one rank reaches at best; measured, or `roofs_of` the catalog."""

    bytes_per_second: float  # a long pass over memory
    flops: float  # per second, products with the served weights
    link_bytes_per_second: float = 0.0  # to the other ranks of tp; 0: not counted


def roofs_of(gpu: Gpu, precision: str = "bf16", link_bytes_per_second: float = 0.0) -> Roofs:
    """The best that was measured on cards of this kind."""
    rates = rates_of(gpu)
    return Roofs(rates.streaming_bytes_per_second, rates.matrix_flops[precision], link_bytes_per_second)


@dataclass(frozen=True)
class ServedModel:
    """A model as one of `tp` ranks holds it. Routed experts are whole on every rank; all else is cut."""

    shape: ModelShape
    precision: str = "bf16"
    kv_precision: str = "auto"  # auto: as the model computes
    tp: int = 1

    @cached_property
    def block_parameters(self) -> float:
        """Of attention, MLPs and shared experts: what every token passes."""
        shape = self.shape
        dense = (shape.layers - shape.moe_layers) * shape.dense_mlp_parameters
        shared = shape.moe_layers * (shape.shared_expert_parameters + shape.router_parameters)
        return (shape.layers * shape.attention_parameters + dense + shared) / self.tp

    @cached_property
    def expert_parameters(self) -> float:
        """Of all routed experts."""
        return float(self.shape.moe_layers * self.shape.experts * self.shape.expert_parameters)

    @cached_property
    def head_parameters(self) -> float:
        return self.shape.embedding_parameters / self.tp

    @cached_property
    def weight_bytes(self) -> float:
        """What is kept in memory; scales of quantized weights are a thousandth of it, and not counted."""
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
        """κ = 2 · layers · key-value heads · width · bytes. Latent attention keeps its keys and values expanded."""
        shape = self.shape
        heads, width = (shape.heads, shape.mla.qk_nope + shape.mla.qk_rope) if shape.mla else (shape.kv_heads, 0)
        size = 1 if self.kv_precision == "fp8" else PLAIN_BYTES[self.precision]
        return 2.0 * shape.layers * heads / self.tp * (width or shape.head_dim) * size

    @cached_property
    def flops_per_pair(self) -> float:
        """Score and value of one query with one key, over all heads and layers."""
        mla = self.shape.mla
        width = mla.qk_nope + mla.qk_rope + mla.v_head if mla else 2 * self.shape.head_dim
        return 2.0 * self.shape.layers * self.shape.heads / self.tp * width

    def kv_tokens(self, memory_bytes: float, workspace_bytes: float, page: int) -> int:
        """Tokens whose keys and values fit into so much memory beside the weights, in whole pages; 0: none do."""
        left = memory_bytes - self.weight_bytes - workspace_bytes
        return max(0, int(left / (self.kv_bytes_per_token * page))) * page


class Roofline:
    """The shortest a step can be on given roofs. Made once: a call costs about a microsecond."""

    def __init__(self, model: ServedModel, roofs: Roofs) -> None:
        shape = model.shape
        self.model, self.roofs = model, roofs
        self._tp = model.tp
        self._window = shape.sliding_window if shape.sliding_layers else 0
        share = shape.sliding_layers / shape.layers if self._window else 0.0
        self._windowed_bytes = model.kv_bytes_per_token * share  # of a token, in layers with a window
        self._kv_bytes = model.kv_bytes_per_token - self._windowed_bytes
        self._missed = 1.0 - shape.top_k / shape.experts if shape.is_moe else 1.0  # share of experts a token passes by
        active = shape.moe_layers * shape.top_k * shape.expert_parameters / model.tp
        self._token_flops = 2.0 * (model.block_parameters + active)
        self._sampled_flops = 2.0 * model.head_parameters
        sent = COLLECTIVES_PER_LAYER * shape.layers * shape.hidden * PLAIN_BYTES[model.precision]
        self._sent_bytes = sent * (model.tp - 1) / model.tp

    def step_seconds(self, tokens: int, context_tokens: int, sampled: int, pairs: float = 0.0) -> float:
        """Of a step that computes `tokens`, whose requests have a past of `context_tokens` together, and that chooses
        `sampled` next tokens. `pairs`: of queries and keys, where prompts are read; every token of context is at least
        in one."""
        if tokens <= 0:
            return 0.0
        roofs = self.roofs
        memory = self.read_bytes(tokens, context_tokens, sampled) / roofs.bytes_per_second
        compute = self.step_flops(tokens, context_tokens, sampled, pairs) / roofs.flops
        sent = self._sent_bytes * tokens / roofs.link_bytes_per_second if roofs.link_bytes_per_second else 0.0
        return max(memory, compute) + sent

    def read_bytes(self, tokens: int, context_tokens: int, sampled: int) -> float:
        """Weights and pasts; with routed experts those that this many tokens meet, if they choose evenly."""
        model = self.model
        read = model.block_bytes + self._kv_bytes * context_tokens
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
        """One more token for each of `batch` requests."""
        return self.step_seconds(batch, round(batch * mean_context), batch)

    def prefill_seconds(self, tokens: int, sequence: float) -> float:
        """Reading `tokens` of prompts of this length: each token sees half of its prompt in the mean."""
        sampled = max(1, round(tokens / max(sequence, 1.0)))
        return self.step_seconds(tokens, tokens, sampled, pairs=0.5 * tokens * sequence)

    @property
    def balanced_batch(self) -> float:
        """Requests with short pasts from which on a step is bound by computing: (F / BW) · bytes / (2 · parameters)."""
        ratio = self.roofs.flops / self.roofs.bytes_per_second
        return ratio * self.model.block_bytes / self._token_flops
