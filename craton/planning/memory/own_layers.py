"""Tensors that the layers of craton/ml/models save for the backward pass, and those alive inside one layer.

Bytes are per token of a tensor-parallel group, as in `footprint.LayerBytes`. Two tensors pass between layers: the
residual stream and the pending addition to it; with tensor parallelism a rank holds its share of both. A trace of the
real step is compared with these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from craton.job.model import ModelShape
from craton.planning.step import adapter_weights, layer_weights

INDEX_BYTES = 8.0  # per sorted token-expert pair: its position and the inverse are saved, two each


@dataclass(frozen=True, slots=True)
class OwnLayer:
    saved: float  # saved without activation checkpointing
    kept: float  # saved with the layout's recompute setting
    again: float  # recomputed in the backward pass
    work: float  # gradients and gathered tensors at the peak of the backward pass
    work_bytes: float  # the part independent of tokens: weight gradients that FSDP has not reduced yet
    forward: float  # the largest temporary tensors of the forward pass
    late: float  # for deferred weight gradients: inputs of matmuls and gradients of their outputs


@lru_cache(maxsize=4096)
def own_layers(
    shape: ModelShape, tp: int, ep: int, cp: int, precision: str, recompute: str, *, lora_rank: int = 0
) -> tuple[OwnLayer, OwnLayer]:
    """Return the dense layer and the layer with experts of one rank; `lora_rank`: of adapters on all its matmuls."""
    dense = _layer(shape, tp, ep, cp, precision, recompute, lora_rank, moe=False)
    return dense, _layer(shape, tp, ep, cp, precision, recompute, lora_rank, moe=True) if shape.is_moe else dense


def _layer(
    shape: ModelShape, tp: int, ep: int, cp: int, precision: str, recompute: str, lora_rank: int, *, moe: bool
) -> OwnLayer:
    value = 4.0 if precision == "fp32" else 2.0
    stream, whole = value * shape.hidden / tp, value * shape.hidden
    shared_by = tp > 1
    attention = _attention(shape, tp, cp, value)
    mlp = _experts(shape, tp, ep, value) if moe else _dense(shape, tp, value)
    statistics = 2.0 * 4.0 / tp
    saved = 2.0 * stream + statistics + attention.saved + mlp.saved
    saved += stream + (stream if mlp.keeps_input else 0.0)  # outputs of the norms
    narrow = _between_adapters(shape, tp, ep, value, lora_rank, moe=moe)
    saved += narrow
    if recompute == "none":
        kept, again = saved, 0.0
    elif recompute == "full":
        kept, again = 2.0 * stream, saved - stream
    else:
        # the layer's input, and the output of every matmul; those summed over ranks before and after
        kept = stream + (3.0 * stream if shared_by else 0.0) + attention.products + mlp.products
        if lora_rank:  # an adapter's outputs are matmul outputs too
            kept += attention.outputs + mlp.outputs + narrow
            kept += 0.0 if shared_by else stream  # the sum of both, which enters the next layer, is not saved
        again = saved - stream - attention.shared - mlp.shared - narrow
    incoming = stream
    return OwnLayer(
        saved=saved,
        kept=kept,
        again=again,
        work=incoming + max(mlp.work, attention.work - mlp.freed),
        work_bytes=mlp.work_bytes,
        forward=max(whole if shared_by else stream, mlp.forward),
        late=attention.late + mlp.late,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    saved: float
    products: float  # outputs of matmuls and attention, which selective recompute keeps
    shared: float  # those of them that are also saved without recompute
    outputs: float  # those that an adapter can be added to
    work: float
    work_bytes: float = 0.0
    freed: float = 0.0  # of the saved tensors, once the backward pass no longer needs them
    keeps_input: bool = True
    forward: float = 0.0
    late: float = 0.0


def _between_adapters(shape: ModelShape, tp: int, ep: int, value: float, rank: int, *, moe: bool) -> float:
    """Return the bytes of all adapters' rank-wide tensors; of all tokens where they are gathered."""
    adapters = adapter_weights(layer_weights(shape, tp, ep, moe=moe), rank) if rank else ()
    return sum(value * rank / (tp if wide.is_partial else 1.0) for _, wide in adapters)


def _attention(shape: ModelShape, tp: int, cp: int, value: float) -> _Part:
    heads, whole = shape.heads / tp, value * shape.hidden
    if shape.mla is None:
        query, key = value * heads * shape.head_dim, value * max(shape.kv_heads / tp, 1.0) * shape.head_dim
        projected = query + 2.0 * key  # rotated queries and keys, and values
        produced = projected
        out = query
        shared = 0.0
        if shape.qk_norm:  # the projection, from which the backward pass computes the norms again
            projected += produced
            shared = produced
        both = 2.0 * key
        late = whole + query + 2.0 * key
    else:
        mla = shape.mla
        query = value * heads * (mla.qk_nope + mla.qk_rope)
        expanded = value * heads * (mla.qk_nope + mla.v_head)
        latents = value * (2.0 * mla.q_lora + 2.0 * mla.kv_lora + mla.qk_rope) / tp  # before and after their norms
        out = value * heads * mla.v_head
        both = query + expanded
        shared = latents - value * (mla.q_lora + mla.kv_lora) / tp
        if cp > 1:  # keys and values are re-expanded in the backward pass
            projected = latents + value * (mla.kv_lora + mla.qk_rope) / tp + query
            produced = shared + query
        else:
            projected = latents + query + both
            produced = shared + query + expanded
            shared += expanded
        # normed stream and latents, gathered where their matmul is sharded; gradients of their results
        late = whole / tp + value * (mla.q_lora + mla.kv_lora + mla.qk_rope) / tp + query
        late += value * mla.q_lora + cp * (value * mla.kv_lora + expanded)
    statistics = 4.0 * heads
    kept = out + statistics
    gradients = out + 2.0 * query + 2.0 * both
    if cp > 1:  # of the whole sequence: gathered, reordered, and its gradients
        gradients += 4.0 * cp * both
    return _Part(
        saved=projected + kept,
        products=produced + kept + whole,
        shared=shared + kept,
        outputs=produced + whole / tp,
        work=gradients + (2.0 * whole if tp > 1 else 0.0),
        late=late + out + whole,
    )


def _dense(shape: ModelShape, tp: int, value: float, width: float | None = None) -> _Part:
    """An MLP; `width`: of shared experts."""
    width = value * (shape.ffn_hidden if width is None else width) / tp
    whole, ups = value * shape.hidden, _ups(shape)
    weights = shape.hidden * width
    gathered = 2.0 * whole if tp > 1 else 0.0  # gradient and input of all tokens
    last = whole + (whole / tp if tp > 1 else 0.0)  # gradient of the input
    return _Part(
        saved=ups * width,
        products=ups * width + whole,
        shared=ups * width,
        outputs=ups * width + whole / tp,
        # the matmul output and its gradient, or the gradient of the input beside those of all weights
        work=gathered + max(width, last),
        work_bytes=(ups + 1.0) * weights,
        freed=ups * width,
        forward=gathered / 2.0 + width + whole,
        late=2.0 * whole + (ups + 1.0) * width,
    )


def _experts(shape: ModelShape, tp: int, ep: int, value: float) -> _Part:
    """Return the bytes of routed experts with balanced routing, and of shared ones."""
    pairs = shape.top_k / tp
    rows, inner = value * pairs * shape.hidden, value * pairs * shape.moe_ffn_hidden
    tokens = 1.0 / tp
    router = tokens * (4.0 * shape.hidden + 4.0 * shape.experts + 16.0 * shape.top_k)  # fp32: input and scores
    indices = INDEX_BYTES * pairs * (4.0 if ep > 1 else 2.0)
    width = shape.shared_experts * shape.moe_ffn_hidden
    shared = _dense(shape, tp, value, width) if width else None
    weights = value * sum(weight.size for weight in layer_weights(shape, tp, ep, moe=True) if weight.stacked)
    up = _ups(shape) * inner
    saved = router + indices + up + 2.0 * rows  # input rows of the experts, and their outputs until they are weighted
    products = 4.0 * tokens * shape.experts + up + rows + value * tokens * shape.hidden + indices
    # after the outputs are weighted: gradients of rows in and out, and of the weights
    work = rows + max(rows, inner)
    return _Part(
        saved=saved + (shared.saved if shared else 0.0),
        products=products + (shared.products if shared else 0.0),
        shared=up + (shared.shared if shared else 0.0),
        outputs=shared.outputs if shared else 0.0,
        work=work,
        work_bytes=weights,
        freed=up + 2.0 * rows,
        keeps_input=shared is not None,
        forward=3.0 * rows + inner,
        late=2.0 * rows + up + inner + (shared.late if shared else 0.0),
    )


def _ups(shape: ModelShape) -> float:
    """Return the number of up-projections: a gated MLP has two."""
    return 2.0 if shape.gated_mlp else 1.0
