"""Matmuls, transfers and weights of one rank for one micro-batch, as sizes: the only place where they are counted.

`compute` and `training` turn these sizes into seconds, `own_memory` into memory, and `step_inventory` into the list
that a trace of the real step is compared with, so that trace checks all of them. A transfer's size is that of the whole
tensor, the larger side of its collective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.rates import OUTPUT_BYTES, flops_per_score
from craton.planning.software import Traits

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]
Dimension = Literal["pp", "replicate", "fsdp", "cp", "tp", "cp·tp", "ep", "all"]

# Logits that a chunked head holds at once (craton/ml/training/head.py).
HEAD_CHUNK_BYTES = 2.0 * 2**30
COUNT_BYTES = 4.0  # per expert: the number of rows, exchanged before the rows


class Repeated(NamedTuple):
    """Shares of a layer's forward pass that are recomputed in the backward pass."""

    products: float
    attention: float
    elements: float  # everything element-wise
    collectives: float
    sums: float  # reduce-scatters among them


# By `recompute`, "selective" by the stack's trait.
RECOMPUTED: dict[str, Repeated] = {
    "none": Repeated(0.0, 0.0, 0.0, 0.0, 0.0),
    "full": Repeated(1.0, 1.0, 1.0, 1.0, 1.0),
    "attention": Repeated(0.0, 1.0, 0.0, 0.0, 0.0),
    "operators": Repeated(0.5, 0.0, 0.5, 0.5, 0.5),
    "every second layer": Repeated(0.5, 0.5, 0.5, 0.5, 0.5),
    "modules": Repeated(0.08, 0.0, 0.08, 0.08, 0.08),  # norms, activations, up-projections
    "element-wise": Repeated(0.0, 0.0, 1.0, 1.0, 0.0),  # outputs of matmuls, attention and sums over ranks are saved
}


def repeated(layout: Layout, traits: Traits) -> Repeated:
    return RECOMPUTED[traits.selective if layout.recompute == "selective" else layout.recompute]


@dataclass(frozen=True, slots=True)
class Product:
    """`groups` matmuls [rows, k] × [k, n]."""

    rows: float
    n: float
    k: float
    groups: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of fused attention; `keys` is the number of keys before causal masking."""

    batch: float
    queries: float
    keys: float
    heads: float
    kv_heads: float
    query_dim: float
    value_dim: float
    causal: bool

    def flops(self, *, backward: bool) -> float:
        """Return the FLOPs; a causal query attends to half of the keys on average."""
        scores = self.batch * self.heads * self.queries * self.keys * (0.5 if self.causal else 1.0)
        return scores * flops_per_score(self.query_dim, self.value_dim, backward=backward)


@dataclass(frozen=True, slots=True)
class Transfer:
    operation: Operation
    dimension: Dimension
    size_bytes: float  # of one call
    count: float = 1.0
    for_weights: bool = False  # not needed for frozen weights, which have no gradient


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of one rank before FSDP. FSDP shards rows; of `stacked` matrices whole ones if they divide, else the
    same part of each (craton/ml/training/parallel/mesh.py)."""

    rows: float
    columns: float
    stacked: float = 0.0  # 0: no experts
    is_partial: bool = False  # replicated on tensor-parallel ranks, each with the gradient of its own tokens only
    is_router: bool = False
    cuts_columns: bool = False  # tensor parallelism shards columns, where it shards others by rows

    @property
    def size(self) -> float:
        return self.rows * self.columns * (self.stacked or 1.0)

    def shard(self, ranks: int) -> float:
        """Return the elements on each of `ranks` ranks, with the last rows padded."""
        if not self.stacked:
            return math.ceil(self.rows / ranks) * self.columns
        if any(size % ranks == 0 for size in (self.stacked, self.rows, self.columns)):
            return self.size / ranks
        return math.ceil(self.stacked / ranks) * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of one layer, or of embedding and head; backward matmuls are the gradients of input and weight."""

    projections: tuple[Product, ...]  # of attention
    mlp: tuple[Product, ...]  # dense, shared experts, router; or the head
    experts: tuple[Product, ...]  # grouped
    again: tuple[Product, ...]  # projections that the backward pass always recomputes
    attention: tuple[tuple[AttentionCall, float], ...]  # each with the share of layers that have it
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]

    @property
    def products(self) -> tuple[Product, ...]:
        return (*self.projections, *self.mlp)


def layer_operations(shape: ModelShape, layout: Layout, sequence: int, traits: Traits, *, moe: bool) -> Operations:
    """Return the operations of one transformer layer on one rank. Only tp, cp, ep, micro_batch and precision matter."""
    tp, hidden = layout.tp, shape.hidden
    tokens = layout.micro_batch * sequence / layout.cp  # tokens per tensor-parallel group in one micro-batch
    own_tokens = tokens / tp if traits.sequence_parallel else tokens
    ups = 2.0 if shape.gated_mlp else 1.0
    experts: tuple[Product, ...] = ()
    mlp: tuple[Product, ...] = ()
    if moe:
        local_experts = max(1, shape.experts // layout.ep)
        rows = tokens * shape.top_k / tp / local_experts  # per expert with balanced routing
        inner = shape.moe_ffn_hidden
        experts = (Product(rows, ups * inner, hidden, local_experts), Product(rows, hidden, inner, local_experts))
        width = shape.shared_experts * inner / tp
        mlp = (Product(tokens / tp, shape.experts, hidden),)  # router
    else:
        width = shape.ffn_hidden / tp
    if width:
        mlp = (Product(tokens, ups * width, hidden), Product(tokens, hidden, width), *mlp)
    projections = attention_products(shape, tp, tokens, own_tokens)
    if _expands_all(shape, layout, traits):
        keys_values = projections[-2]
        projections = (*projections[:-2], replace(keys_values, rows=tokens * layout.cp), projections[-1])
    forward, backward = _tensor_transfers(shape, layout, tokens, traits, has_mlp=width > 0)
    for more_forward, more_backward in (
        _context_transfers(shape, layout, sequence, traits),
        _expert_transfers(shape, layout, tokens, traits) if moe else ((), ()),
    ):
        forward, backward = (*forward, *more_forward), (*backward, *more_backward)
    again = (projections[-2],) if _expands_all(shape, layout, traits) else ()
    return Operations(projections, mlp, experts, again, _attention(shape, layout, sequence), forward, backward)


def head_operations(
    shape: ModelShape, layout: Layout, sequence: int, traits: Traits, *, embeds: bool = True, predicts: bool = True
) -> Operations:
    """Return embedding and final projection with loss, on the stages that hold them. Vocabulary-parallel with tp."""
    tokens = layout.micro_batch * sequence / layout.cp
    width = shape.vocab / layout.tp
    stream = OUTPUT_BYTES[layout.precision] * tokens * shape.hidden
    forward: list[Transfer] = []
    backward: list[Transfer] = []
    if layout.tp > 1:
        if embeds and traits.sequence_parallel:
            forward.append(Transfer("reduce_scatter", "tp", stream))
            backward.append(Transfer("all_gather", "tp", stream, for_weights=True))
        elif embeds:
            forward.append(Transfer("all_reduce", "tp", stream))
        if predicts:
            forward += [Transfer("all_gather", "tp", stream)] if traits.sequence_parallel else []
            if traits.chunked_head:  # the sum of exponentials and the label's logit of every token, by every rank
                chunks = head_chunks(tokens, width, layout)
                forward.append(Transfer("all_gather", "tp", 2.0 * 4.0 * tokens * layout.tp / chunks, chunks))
            else:  # the maximum logit too, reduced as well
                forward.append(Transfer("all_reduce", "tp", 4.0 * tokens, 3.0))
            backward.append(Transfer("reduce_scatter" if traits.sequence_parallel else "all_reduce", "tp", stream))
    projection = (Product(tokens, width, shape.hidden),) if predicts else ()
    return Operations((), projection, (), (), (), tuple(forward), tuple(backward))


def head_chunk_bytes(layout: Layout) -> float:
    """Return the bytes of logits that a chunked head holds at once: less with a sharded vocabulary and fp32 copies."""
    return HEAD_CHUNK_BYTES / 4.0 if layout.tp > 1 else HEAD_CHUNK_BYTES


def head_chunks(tokens: float, width: float, layout: Layout) -> float:
    largest = max(1.0, head_chunk_bytes(layout) // (width * OUTPUT_BYTES[layout.precision]))
    return float(math.ceil(tokens / largest))


def boundary_bytes(shape: ModelShape, layout: Layout, sequence: int) -> float:
    """Return the bytes that one micro-batch sends from a pipeline stage to the next."""
    tokens = layout.micro_batch * sequence / layout.cp / layout.tp
    return OUTPUT_BYTES[layout.precision] * tokens * shape.hidden


def attention_products(shape: ModelShape, tp: int, tokens: float, own_tokens: float) -> tuple[Product, ...]:
    """Return the projections of one rank. Fewer key/value heads than tp are replicated, not split. Latents are computed
    from the rank's own part of the sequence (`own_tokens`), if it has one."""
    hidden, mla = shape.hidden, shape.mla
    if mla is None:
        kv_heads = max(shape.kv_heads / tp, 1.0)
        width = (shape.heads / tp + 2.0 * kv_heads) * shape.head_dim
        return (Product(tokens, width, hidden), Product(tokens, hidden, shape.heads * shape.head_dim / tp))
    query = shape.heads * (mla.qk_nope + mla.qk_rope) / tp
    if mla.q_lora:
        queries: tuple[Product, ...] = (Product(own_tokens, mla.q_lora, hidden), Product(tokens, query, mla.q_lora))
    else:
        queries = (Product(tokens, query, hidden),)
    return (
        *queries,
        Product(own_tokens, mla.kv_lora + mla.qk_rope, hidden),
        Product(tokens, shape.heads * (mla.qk_nope + mla.v_head) / tp, mla.kv_lora),
        Product(tokens, hidden, shape.heads * mla.v_head / tp),
    )


@lru_cache(maxsize=1024)
def layer_weights(shape: ModelShape, tp: int, ep: int, *, moe: bool) -> tuple[Weight, ...]:
    """Return the parameters of one layer on one rank, without biases."""
    hidden, mla = shape.hidden, shape.mla
    weights = [Weight(hidden, 1.0, is_partial=True)] * 2  # norms
    if mla is None:
        kv_heads = max(shape.kv_heads / tp, 1.0)
        weights.append(Weight((shape.heads / tp + 2.0 * kv_heads) * shape.head_dim, hidden))
        weights.append(Weight(hidden, shape.heads * shape.head_dim / tp, cuts_columns=True))
        weights += [Weight(shape.head_dim, 1.0, is_partial=True)] * (2 if shape.qk_norm else 0)
    else:
        query = shape.heads * (mla.qk_nope + mla.qk_rope) / tp
        if mla.q_lora:
            weights += [Weight(mla.q_lora, hidden, is_partial=True), Weight(mla.q_lora, 1.0, is_partial=True)]
        weights.append(Weight(query, mla.q_lora or hidden))
        weights.append(Weight(mla.kv_lora + mla.qk_rope, hidden, is_partial=True))
        weights.append(Weight(mla.kv_lora, 1.0, is_partial=True))
        weights.append(Weight(shape.heads * (mla.qk_nope + mla.v_head) / tp, mla.kv_lora))
        weights.append(Weight(hidden, shape.heads * mla.v_head / tp, cuts_columns=True))
    ups = 2 if shape.gated_mlp else 1
    if moe:
        local_experts, inner = max(1, shape.experts // ep), shape.moe_ffn_hidden
        weights += [Weight(inner, hidden, local_experts)] * ups + [Weight(hidden, inner, local_experts)]
        weights.append(Weight(shape.experts, hidden, is_partial=True, is_router=True))
        width = shape.shared_experts * inner / tp
    else:
        width = shape.ffn_hidden / tp
    if width:
        weights += [Weight(width, hidden)] * ups + [Weight(hidden, width, cuts_columns=True)]
    return tuple(weights)


@lru_cache(maxsize=1024)
def table_weights(shape: ModelShape, tp: int, *, embeds: bool, predicts: bool) -> tuple[Weight, ...]:
    """Return embedding, last norm and head. Tied tables count once if both are on one rank."""
    tables = 1 if embeds != predicts or shape.tied_embeddings else 2
    weights = [Weight(shape.vocab / tp, shape.hidden)] * (tables if embeds or predicts else 0)
    return (*weights, *([Weight(shape.hidden, 1.0, is_partial=True)] if predicts else []))


def _attention(shape: ModelShape, layout: Layout, sequence: int) -> tuple[tuple[AttentionCall, float], ...]:
    heads, kv_heads = max(shape.heads / layout.tp, 1.0), max(shape.kv_heads / layout.tp, 1.0)
    query_dim = shape.mla.qk_nope + shape.mla.qk_rope if shape.mla else shape.head_dim
    value_dim = shape.mla.v_head if shape.mla else shape.head_dim

    def kernel(keys: float, causal: bool) -> AttentionCall:
        queries = sequence / layout.cp
        return AttentionCall(layout.micro_batch, queries, keys, heads, kv_heads, query_dim, value_dim, causal)

    share = shape.sliding_layers / shape.layers if 0 < shape.sliding_window < sequence else 0.0
    full = (kernel(sequence, shape.causal), 1.0 - share)
    return (full, (kernel(shape.sliding_window, False), share)) if share else (full,)


def _tensor_transfers(
    shape: ModelShape, layout: Layout, tokens: float, traits: Traits, *, has_mlp: bool
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return the tensor-parallel transfers of one layer, forward and backward.

    With sequence parallelism the input of column-parallel matmuls is gathered and the output of row-parallel ones
    scattered. Backward has the transposes, and gathers the input again, because a rank saves its own part only. Routed
    experts are not sharded: their tokens stay on their rank.
    """
    if layout.tp == 1:
        return (), ()
    value, mla = OUTPUT_BYTES[layout.precision], shape.mla
    stream = value * tokens * shape.hidden
    blocks = 2.0 if has_mlp else 1.0
    if not traits.sequence_parallel:
        reduce = (Transfer("all_reduce", "tp", stream, blocks),)
        return reduce, reduce
    out = Transfer("reduce_scatter", "tp", stream, blocks)
    gradient_of_out = Transfer("all_gather", "tp", stream, blocks)
    inputs = [stream] if has_mlp else []
    again = [stream] if has_mlp else []
    if mla is None:
        inputs.append(stream)
        again.append(stream)
    else:  # latents, narrower than the stream; the rotary part of the keys enters no matmul
        query = value * tokens * (mla.q_lora or shape.hidden)
        inputs.append(query)
        again.append(query)
        if not _expands_all(shape, layout, traits):
            inputs += [value * tokens * mla.kv_lora, value * tokens * mla.qk_rope]
            again.append(value * tokens * mla.kv_lora)
    forward = (*(Transfer("all_gather", "tp", size) for size in inputs), out)
    backward = (
        gradient_of_out,
        *(Transfer("all_gather", "tp", size, for_weights=True) for size in again),
        *(Transfer("reduce_scatter", "tp", size) for size in inputs),
    )
    return forward, backward


def _expands_all(shape: ModelShape, layout: Layout, traits: Traits) -> bool:
    """Return whether latents of the whole sequence are gathered over all their ranks, and every rank expands all of
    them to keys and values of its heads, forward and again backward."""
    return shape.mla is not None and layout.cp > 1 and traits.own_layers


def _context_transfers(
    shape: ModelShape, layout: Layout, sequence: int, traits: Traits
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return transfers of keys and values of the whole sequence: gathered forward and again backward, gradients
    reduced."""
    if layout.cp == 1:
        return (), ()
    per_width = OUTPUT_BYTES[layout.precision] * layout.micro_batch * sequence
    if shape.mla is None:
        size, calls = per_width * max(shape.kv_heads / layout.tp, 1.0) * shape.head_dim, 2.0
    else:
        size, calls = per_width * (shape.mla.kv_lora + shape.mla.qk_rope), 1.0
    dimension: Dimension = "cp·tp" if _expands_all(shape, layout, traits) and layout.tp > 1 else "cp"
    gather = Transfer("all_gather", dimension, size, calls)
    return (gather,), (gather, Transfer("reduce_scatter", dimension, size, calls))


def _expert_transfers(
    shape: ModelShape, layout: Layout, tokens: float, traits: Traits
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return the all-to-alls of token rows to their experts and back, forward and backward."""
    if layout.ep == 1:
        return (), ()
    rows = OUTPUT_BYTES[layout.precision] * tokens / layout.tp * shape.top_k * shape.hidden
    both_ways = Transfer("all_to_all", "ep", rows, 2.0)
    counts = (Transfer("all_to_all", "ep", COUNT_BYTES * shape.experts),) if traits.dispatcher == "nccl" else ()
    return (*counts, both_ways), (both_ways,)


def flops_per_token(shape: ModelShape, sequence: int, lora: bool = False) -> float:
    """Return the model FLOPs per token, for MFU: without recomputation or other overhead of the stack.

    Forward and backward: 6 FLOPs per weight it passes (4 if weights are frozen), without the input embedding, plus
    attention over half the sequence, or all of it if attention is not causal."""
    passed = shape.active_parameters - (0 if shape.tied_embeddings else shape.embedding_parameters)
    return (4.0 if lora else 6.0) * passed + 3.0 * attention_flops_per_token(shape, sequence)


def attention_flops_per_token(shape: ModelShape, sequence: int) -> float:
    """Return FLOPs of forward scores and values of one token over all layers; a window counts only if it is shorter."""
    width = shape.mla.qk_nope + shape.mla.qk_rope + shape.mla.v_head if shape.mla else 2 * shape.head_dim
    windowed = shape.sliding_layers if shape.sliding_window and sequence > shape.sliding_window else 0
    keys = (shape.layers - windowed) * sequence / (2 if shape.causal else 1) + windowed * shape.sliding_window
    if windowed:
        whole = shape.layers * sequence / (2 if shape.causal else 1)
        keys = min(keys, whole)  # a window longer than half the sequence saves nothing on average
    return 2.0 * shape.heads * width * keys
