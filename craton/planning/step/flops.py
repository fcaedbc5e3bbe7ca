"""Model FLOPs of a token, for MFU: what the model needs, whatever the stack repeats or wastes."""

from __future__ import annotations

from craton.job.model import ModelShape


def flops_per_token(shape: ModelShape, sequence: int, lora: bool = False) -> float:
    """Forward and backward of one token: 6 FLOPs a weight it passes (4 where weights are frozen), the input embedding
    not counted, plus attention over half the sequence, or all of it where attention is not causal."""
    passed = shape.active_parameters - (0 if shape.tied_embeddings else shape.embedding_parameters)
    return (4.0 if lora else 6.0) * passed + 3.0 * attention_flops_per_token(shape, sequence)


def attention_flops_per_token(shape: ModelShape, sequence: int) -> float:
    """Forward scores and values of one token over all layers; a window counts only where it is shorter."""
    width = shape.mla.qk_nope + shape.mla.qk_rope + shape.mla.v_head if shape.mla else 2 * shape.head_dim
    windowed = shape.sliding_layers if shape.sliding_window and sequence > shape.sliding_window else 0
    keys = (shape.layers - windowed) * sequence / (2 if shape.causal else 1) + windowed * shape.sliding_window
    if windowed:
        whole = shape.layers * sequence / (2 if shape.causal else 1)
        keys = min(keys, whole)  # a window longer than half the sequence saves nothing on average
    return 2.0 * shape.heads * width * keys
