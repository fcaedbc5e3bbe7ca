"""A rank of a world that does not exist: fake tensors, a fake process group, and the code paths of a GPU.

Fake tensors have shapes, types and storages of the right size, and no bytes. They lie on the CPU, where autograd needs
no driver, and say that they are CUDA tensors, so that our code takes the path that it takes there: fused kernels (their
launch is left out; what they write to is allocated around it), cuDNN's attention, the update of parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from craton.errors import CratonError
from craton.ml.models import Decoder, dispatch
from craton.ml.trace.patches import replaced
from craton.ml.training import build, loop

PROCESSORS = 132  # of an H100; only the size of one small buffer depends on it


class TraceError(CratonError):
    """The step cannot be traced as it is."""


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[FakeTensorMode]:
    """Inside, this process is one rank of so many, and GPU code runs without a GPU. Yields the mode of fake tensors,
    which is not yet active: meshes and shards are made of real numbers first."""
    if dist.is_initialized():
        raise TraceError("this process has a process group already; trace in a process of its own")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        for owner, name, value in _replacements(mode):
            stack.enter_context(replaced(owner, name, value))
        if world > 1:
            _start(rank, world)
            stack.callback(_end)
        yield mode


def _start(rank: int, world: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def _end() -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it remembers the meshes of groups that are gone, and takes equal ones for them


def _replacements(mode: FakeTensorMode) -> list[tuple[Any, str, Any]]:
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        raise TraceError(
            "a trace runs the code of the GPU kernels, which are written in Triton; it is missing here: "
            "install craton[train] on Linux"
        ) from None

    def nothing(*_arguments: Any, **_options: Any) -> None:
        """Values do not exist, so they are not filled in."""

    to_empty = nn.Module.to_empty

    def to_fake(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        with mode:
            return to_empty(module, device=device, recurse=recurse)

    return [
        (FakeTensor, "is_cuda", property(lambda _: True)),
        (KernelInterface, "__getitem__", lambda _kernel, _grid: nothing),
        (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=PROCESSORS)),
        (import_module("craton.ml.kernels.causal_attention"), "scaled_dot_product_attention", _cudnn_attention),
        (import_module("craton.ml.kernels.partial_attention"), "cudnn_takes", lambda *_: True),
        (torch, "rms_norm", _fused_norm),
        (nn.Module, "to_empty", to_fake),
        (Decoder, "initialize", nothing),
        (build, "load_weights", nothing),
        (build, "initialize_adapters", nothing),
        (loop, "HostCopy", _Unread),
        (dispatch, "split_sizes", _balanced),
    ]


def _cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `scaled_dot_product_attention` chooses on a GPU; which kernel it would be cannot be asked without one."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    kernel: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, attn_mask, True, 0.0, is_causal, False, scale=scale)[0]


def _fused_norm(x: Tensor, _shape: list[int], weight: Tensor, _epsilon: float | None = None) -> Tensor:
    """On a GPU the norm is one kernel, which is not there without one."""
    normed: Tensor = _FusedNorm.apply(x, weight)
    return normed


class _FusedNorm(torch.autograd.Function):
    """What torch's kernel allocates and keeps: its input, and one number of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _balanced(sent: Tensor, _received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """What the router chose is not known: every rank sends as many rows to each, and gets as many."""
    ranks = sent.shape[0]
    sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    return sizes, sizes


class _Unread:
    """Numbers on their way to the host, where nobody reads them."""

    def __init__(self, _tensor: Tensor) -> None:
        pass
