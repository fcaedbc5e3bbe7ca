"""The cost of an operator, from its name and its tensors: FLOPs of matmuls and attention, bytes of collectives.

Causal attention counts half of the scores. Its backward pass counts five matmuls against two in the forward pass,
because the kernel recomputes the scores. The planner counts the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

# Names in c10d and in the functional collectives, without namespace and trailing underscores.
OPERATIONS = {
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
}
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Collective(NamedTuple):
    operation: str
    group: ProcessGroup
    dtype: torch.dtype
    bytes: int  # of the full tensor, the larger side


def collective_of(function: Any, arguments: tuple[Any, ...], result: Any) -> Collective | None:
    """Return the collective that an operator performs; None for any other operator, including waits and barriers."""
    namespace, _, name = function._schema.name.partition("::")
    if namespace not in NAMESPACES:
        return None
    operation = OPERATIONS.get(name.rstrip("_"))
    if operation is None:
        return None
    sides = [list(tensors_in(argument)) for argument in (*arguments, result)]
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return Collective(operation, _group(arguments), sides[largest][0].dtype, sizes[largest])


def flops_of(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Return the FLOPs of a matmul or an attention kernel; 0 for any other operator."""
    formula = FORMULAS.get(function._schema.name)
    if formula is None:
        return 0.0
    names = [argument.name for argument in function._schema.arguments]
    return formula({**dict(zip(names, arguments, strict=False)), **options})


def is_attention(function: Any) -> bool:
    return "attention" in function._schema.name or "attn" in function._schema.name


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of an argument or a result, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _group(arguments: tuple[Any, ...]) -> ProcessGroup:
    """c10d collectives carry their group as an object, functional ones by name, as their last string argument."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(argument)
            except RuntimeError:  # the other object is the reduction
                continue
        if isinstance(argument, ProcessGroup):
            return argument
    name = [argument for argument in arguments if isinstance(argument, str)][-1]
    return _resolve_process_group(cast("Any", name))


def _of(first: str, second: str) -> Callable[[dict[str, Any]], float]:
    return lambda named: _product(named[first], named[second])


def _product(left: Tensor, right: Tensor) -> float:
    """[..., m, k] · [..., k, n]; with a batch dimension on one side only, it is one matmul over all rows."""
    rows = left.shape[-2] * (left.shape[0] if left.dim() == right.dim() == 3 else 1)
    return 2.0 * rows * left.shape[-1] * right.shape[-1]


def _attention(named: dict[str, Any]) -> float:
    """query [rows, heads, queries, d], key and value [rows, kv_heads, keys, d or dv]."""
    rows, heads, queries, _ = named["query"].shape
    scores = rows * heads * queries * named["key"].shape[2] * (0.5 if named.get("is_causal", False) else 1.0)
    return float(scores * _flops_per_score(named))


def _packed(named: dict[str, Any]) -> float:
    """query [tokens, heads, d]: every token sees half of the longest document, or its window if that is shorter."""
    tokens, heads, _ = named["query"].shape
    left = (named.get("window_size") or (-1, 0))[0]
    keys = named["max_k"] / 2 if left < 0 else min(named["max_k"] / 2, left + 1)
    return float(tokens * heads * keys * _flops_per_score(named))


def _piece(named: dict[str, Any]) -> float:
    """query [tokens, heads, d], the last `max_q` tokens of rows of `max_k`; they see all earlier tokens or a window."""
    tokens, heads, _ = named["query"].shape
    keys = named["max_k"] - named["max_q"] / 2
    left = named["window_size_left"]
    return float(tokens * heads * (keys if left < 0 else min(keys, left + 1)) * _flops_per_score(named))


def _flops_per_score(named: dict[str, Any]) -> float:
    query_width, value_width = float(named["query"].shape[-1]), float(named["value"].shape[-1])
    is_backward = "out" in named  # only the backward pass is given the output
    return 2.0 * (3 * query_width + 2 * value_width) if is_backward else 2.0 * (query_width + value_width)


FORMULAS: dict[str, Callable[[dict[str, Any]], float]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm"), _of("self", "mat2")),
    **dict.fromkeys(("aten::addmm", "aten::addmm_"), _of("mat1", "mat2")),
    "aten::baddbmm": _of("batch1", "batch2"),
    **{
        f"aten::_scaled_dot_product_{kernel}_attention{direction}": _attention
        for kernel in ("cudnn", "flash")
        for direction in ("", "_backward")
    },
    **dict.fromkeys(("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"), _packed),
    **dict.fromkeys(("aten::_flash_attention_forward", "aten::_flash_attention_backward"), _piece),
}
