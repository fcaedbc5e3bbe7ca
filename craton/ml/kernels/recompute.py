"""Selective activation checkpointing: keep the outputs of chosen operations, recompute all others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

ATTENTION_OPERATIONS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
)

# Inside a layer, FSDP adds profiler marks, and not always as many in the recomputation as in the first pass. torch
# would take the difference for a different computation.
SAC_IGNORED_OPS.update(
    (torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction)
)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keeping(operations: Collection[str]) -> Callable[[], Contexts]:
    """Return the `context_fn` for torch's checkpoint that keeps the outputs of these operations and recomputes all
    others."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, operations))


def _policy(
    operations: Collection[str], _context: Any, operation: Any, *_arguments: Any, **_options: Any
) -> CheckpointPolicy:
    name = operation.name() if hasattr(operation, "name") else str(operation)
    kept = name.partition(".")[0] in operations
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
