"""Bytes of one parameter and of one layer on one rank; `memory` sums them for a GPU.

Tensors are counted one by one after Korthikanti et al. 2022 (arXiv:2205.05198, section 4), extended to fused
attention, grouped and latent attention, gated MLPs, experts and low precision. Both functions are cached: a search has
few different ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from craton.job.model import ModelShape
from craton.planning.software import Traits

MASTER_BYTES = 4.0  # fp32 weights
MOMENT_BYTES = 8.0  # Adam's two moments, fp32
BF16_MOMENT_BYTES = 4.0  # the same in bf16
BUCKET_PARAMETERS = 40e6  # per gradient bucket (Megatron's default); two are alive
# Transformer Engine keeps a weight twice in the low precision, by rows and by columns (on Hopper a transposed copy);
# block scales are a byte in 32 (mxfp8) or in 16 values (nvfp4). An assumption: these are the weights, with no 16-bit
# copy beside the optimizer's fp32 one, as in Megatron-Bridge's recipes (fp8_param_gather, fp4_param_gather).
WEIGHT_COPY_BYTES = {"fp8": 2.0, "mxfp8": 2.0 * 33 / 32, "nvfp4": 2.0 * 9 / 16}
# Bytes per element of a matmul's input that it saves for the backward pass.
INPUT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 33 / 32, "nvfp4": 9 / 16}
# Peak bytes per logit. A fused loss: one copy in 16 bit, one in fp32. Separate operators: softmax, gradient of the loss
# and gradient of the logits, all fp32, at the start of the backward pass.
LOGIT_BYTES = 6.0
PLAIN_LOGIT_BYTES = 12.0


class ParameterBytes(NamedTuple):
    """Bytes on a rank per parameter, counted before sharding; `expert_…` where experts differ."""

    table: float  # weights: embedding and head
    weight: float
    expert_weight: float
    optimizer: float
    expert_optimizer: float
    gradient: float
    expert_gradient: float
    temporary: float  # in the optimizer step
    expert_temporary: float
    bucket: float  # during a reduction
    gathered_table: float  # unsharded for the whole step
    gathered: float
    fetched: float  # of the largest layer: unsharded for that layer only
    summed: float  # unsharded gradients until the last micro-batch
    reduced: float  # of the largest layer: its gradients before they are scattered
    keeps_gradients: bool  # buffers exist from the start


@lru_cache(maxsize=4096)
def parameter_bytes(
    precision: str,
    zero: int,
    pipeline: bool,
    replicas: bool,
    fsdp: int,
    cp: int,
    tp: int,
    ep: int,
    trained: float,
    offloaded: bool,
    master_gradients: bool,
    weights: str = "fp32",
) -> ParameterBytes:
    """Return the bytes per parameter by sharding and precision. `pipeline`: pp > 1; `replicas`: replicate > 1;
    `trained`: the trained share with adapters; `offloaded`: the optimizer and its fp32 weights are in host memory;
    `weights` bf16: no fp32 weights, and states in bf16."""
    shards = fsdp * cp
    # Without fsdp, context-parallel ranks still reduce gradients once per step: for the same network traffic they can
    # shard the optimizer, but neither parameters nor gradients.
    zero = zero if fsdp > 1 else 1 if cp > 1 else 0
    # experts are sharded over the ranks outside expert parallelism
    share = expert_share = 1.0
    if zero:
        share, expert_share = 1.0 / shards, 1.0 / max(1.0, shards * tp / ep)
    value = 4.0 if precision == "fp32" else 2.0
    copy = WEIGHT_COPY_BYTES.get(precision, 0.0)
    gradient = trained * (4.0 if master_gradients or precision == "fp32" else 2.0)
    narrow = weights == "bf16"
    moment_bytes = BF16_MOMENT_BYTES if narrow else MOMENT_BYTES
    if zero == 3:  # FSDP2: fp32 shards are weight and master in one, gathered in 16 bit
        weight = value if trained != 1.0 or offloaded or narrow else MASTER_BYTES
        moments, landed = trained * moment_bytes, gradient if offloaded or narrow else trained * MASTER_BYTES
        # in a pipeline: gathered once per step, gradients accumulated before the reduce-scatter; else the tables stay
        # gathered, one layer is being computed and one prefetched
        return ParameterBytes(
            table=weight * share,
            weight=weight * share,
            expert_weight=weight * expert_share,
            optimizer=moments * share,
            expert_optimizer=moments * expert_share,
            gradient=landed * share,
            expert_gradient=landed * expert_share,
            temporary=0.0,
            expert_temporary=0.0,
            bucket=0.0,
            gathered_table=value,
            gathered=copy or value if pipeline else 0.0,
            fetched=0.0 if pipeline else 2.0 * value + copy,
            summed=gradient if pipeline else 0.0,
            reduced=0.0 if pipeline else trained * value + gradient,
            keeps_gradients=False,
        )
    states = trained * (moment_bytes if precision == "fp32" or narrow else MASTER_BYTES + moment_bytes)
    scattered = zero == 2 and not pipeline  # a pipeline accumulates its gradients first
    # a sharded optimizer copies its shard of 16-bit gradients
    fp32 = 4.0 * trained if gradient < 4.0 * trained and not offloaded and not narrow else 0.0
    return ParameterBytes(
        table=value,
        weight=copy or value,
        expert_weight=copy or value,
        optimizer=states * share,
        expert_optimizer=states * expert_share,
        gradient=gradient * share if scattered else gradient,
        expert_gradient=gradient * expert_share if scattered else gradient,
        temporary=fp32 * share if share < 1.0 else 0.0,
        expert_temporary=fp32 * expert_share if expert_share < 1.0 else 0.0,
        bucket=gradient if replicas or shards > 1 else 0.0,
        gathered_table=0.0,
        gathered=0.0,
        fetched=0.0,
        summed=0.0,
        reduced=gradient if scattered else 0.0,
        # buffers of a sharded optimizer (Megatron, nanotron) and of accumulation in fp32
        keeps_gradients=zero == 1 or (zero == 0 and gradient == 4.0 * trained),
    )


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One layer on one rank; bytes are per token of a tensor-parallel group."""

    parameters: float  # experts not included
    expert_parameters: float
    saved: float  # from the forward to the backward pass, mean of the layers
    kept: float  # the same of the layer in its backward pass
    work: float  # only during the layer's backward pass: recomputed tensors and gradients
    buffers: float  # of collectives during the layer
    ring: float  # keys and values of context parallelism


@dataclass(frozen=True, slots=True)
class HeadBytes:
    parameters: float  # one table of vocabulary × hidden
    tables_alone: float  # tables with a single stage
    tables_last: float
    width: float  # logits of a token
    logit_bytes: float
    saved: float
    sends: float  # received and sent between stages, two each way


@lru_cache(maxsize=4096)
def layer_bytes(
    shape: ModelShape,
    traits: Traits,
    tp: int,
    ep: int,
    precision: str,
    recompute: str,
    sequence: int,
    imbalance: float,
) -> tuple[LayerBytes, LayerBytes, HeadBytes]:
    """Return the dense layer, the layer with experts and the head of one rank."""
    value = 4.0 if precision == "fp32" else 2.0
    dense = _layer(shape, traits, tp, ep, precision, recompute, sequence, imbalance, moe=False)
    moe = _layer(shape, traits, tp, ep, precision, recompute, sequence, imbalance, moe=True) if shape.is_moe else dense
    stream = value * shape.hidden / (tp if traits.sequence_parallel else 1)
    head = HeadBytes(
        parameters=shape.vocab * shape.hidden / tp,
        tables_alone=1.0 if shape.tied_embeddings else 2.0,
        # multi-token prediction has another embedding
        tables_last=2.0 if shape.mtp_layers and not shape.tied_embeddings else 1.0,
        width=shape.vocab / tp,
        logit_bytes=PLAIN_LOGIT_BYTES if _plain(shape, traits) else LOGIT_BYTES,
        saved=2.0 * stream + (value * shape.hidden if tp > 1 else 0.0),  # norm's input and output, the latter gathered
        sends=4.0 * stream,
    )
    return dense, moe, head


def _plain(shape: ModelShape, traits: Traits) -> bool:
    """Return whether norms, activations and the loss run as separate PyTorch operators: gated models without
    compilation. The stacks of GPT-type models (Megatron, llm-foundry) have fused kernels."""
    return not traits.compiled and shape.gated_mlp


def _layer(
    shape: ModelShape,
    traits: Traits,
    tp: int,
    ep: int,
    precision: str,
    recompute: str,
    sequence: int,
    imbalance: float,
    *,
    moe: bool,
) -> LayerBytes:
    value = 4.0 if precision == "fp32" else 2.0
    kept_input = INPUT_BYTES[precision]  # of a matmul's input, saved for its weight gradient
    hidden, heads = shape.hidden, shape.heads / tp
    stream = hidden / (tp if traits.sequence_parallel else 1)
    unfused, plain = traits.attention == "unfused", _plain(shape, traits)

    if shape.mla:
        mla = shape.mla
        query = key = heads * (mla.qk_nope + mla.qk_rope)
        out = heads * mla.v_head
        latent = value * (mla.q_lora + mla.kv_lora + mla.qk_rope) + kept_input * (mla.q_lora + mla.kv_lora)
        parameters = hidden * (mla.q_lora + mla.kv_lora + mla.qk_rope) + (mla.q_lora or hidden) * query
        parameters += mla.kv_lora * heads * (mla.qk_nope + mla.v_head) + out * hidden
        keys_values = value * (key + out)
        projected = value * query + keys_values
    else:
        query = out = heads * shape.head_dim
        key = max(shape.kv_heads / tp, 1.0) * shape.head_dim  # replicated if there are fewer heads than tp
        latent = 0.0
        parameters = 2.0 * hidden * (query + key)
        keys_values = value * 2.0 * key
        projected = value * query + keys_values + (value * (query + key) if shape.qk_norm else 0.0)
    attended = value * out + (kept_input * out if kept_input < value else 0.0)  # the kernel's copy and the matmul's
    scores = (2.0 * value + 1.0) * heads * sequence if unfused else 0.0  # softmax, dropout mask, dropped softmax
    statistics = 0.0 if unfused else 4.0 * heads
    norm_inputs, norm_outputs = 2.0 * value * stream, 2.0 * kept_input * stream
    masks = 2.0 * stream if unfused else 0.0  # of the dropout after attention and after the MLP
    if unfused:
        attention_gradients = 2.0 * value * heads * sequence
    else:  # of the output, of queries, keys and values, and the kernel's fp32 sum
        attention_gradients = value * out + value * query + keys_values + 4.0 * query

    parameters += 2.0 * hidden  # norms
    expert_parameters = routed = routing = 0.0
    if moe:
        routed = shape.top_k * imbalance / tp  # assignments per token of the group on this rank
        width = routed * shape.moe_ffn_hidden + shape.shared_experts * shape.moe_ffn_hidden / tp
        expert_parameters = shape.experts / ep * shape.expert_parameters
        parameters += shape.router_parameters + shape.shared_expert_parameters / tp
        routing = 8.0 * shape.experts * stream / hidden + kept_input * routed * hidden  # fp32 scores, experts' inputs
        if traits.dispatcher in ("nccl", "loop"):  # outputs are saved for the gradient of their weights; others fuse it
            routing += value * routed * hidden
    else:
        width = shape.ffn_hidden / tp
        parameters += shape.dense_mlp_parameters / tp
    ups = 2.0 if shape.gated_mlp else 1.0
    up, product = ups * value * width, kept_input * width
    mlp_gradients = (ups + 1.0) * value * width + 2.0 * value * routed * hidden
    if traits.repeats_gate:
        mlp_gradients, product = mlp_gradients + product, 0.0
    # fp32 input of both norms, output of the activation before its gate
    separate = 2.0 * 4.0 * stream + value * width if plain else 0.0

    total = norm_inputs + norm_outputs + masks + latent + projected + attended + statistics + scores
    total += routing + up + product + separate
    kept = saved = total
    if recompute == "full":
        kept = saved = value * stream
    elif recompute == "selective":
        if traits.selective == "attention":
            kept = saved = total - scores
        elif traits.selective == "operators":  # the layer's input, attention's output, every other matmul's output
            attention = 0.5 * (latent + projected) if shape.mla else value * (query + key)
            mlp = 0.5 * (routing + up + product) if moe else value * width
            kept = saved = attention + value * out + statistics + mlp + 2.0 * value * stream
        elif traits.selective == "every second layer":
            kept = value * stream
            saved = 0.5 * (total + kept)
        else:  # norms, activations and latent attention's projections are cheap to recompute
            kept = saved = total - norm_outputs - product - (projected if shape.mla else 0.0)
    return LayerBytes(
        parameters=parameters,
        expert_parameters=expert_parameters,
        saved=saved,
        kept=kept,
        work=total - kept + max(attention_gradients, mlp_gradients) + value * stream,
        # gathered input and output before its reduction; to and from the experts
        buffers=2.0 * value * (hidden * (tp > 1) + routed * hidden),
        ring=2.0 * keys_values,
    )


class StageBytes(NamedTuple):
    """Bytes of one pipeline rank, at the instants of `memory.INSTANTS`; numbers, or arrays of many ranks."""

    parameters: Any
    optimizer: Any
    runtime: Any
    gradients: Any  # after the first backward pass
    gradients_forward: Any
    gradients_backward: Any  # at the first backward layer
    gradients_step: Any  # in the optimizer step
    activations: Any  # of every micro-batch in flight
    first_activations: Any  # at the first backward layer
    later_activations: Any  # when one of them has finished its backward pass except for a layer
    head_activations: Any
    logits: Any
    unsharded: Any
    unsharded_loss: Any
    unsharded_backward: Any  # with the gradients of the current layer
    layer_in_work: Any  # recomputed tensors and gradients of one layer
    later_in_work: Any
    buffers: Any
    buffers_backward: Any
    temporaries: Any  # on top of the gradients at the end: those not yet reduced, copies for the optimizer
