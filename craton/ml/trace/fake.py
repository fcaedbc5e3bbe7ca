"""One rank of a fake world: fake tensors, a fake process group, and the code paths of a GPU.

Fake tensors have shapes, dtypes and storages of the right size, but no bytes. They are on the CPU, where autograd needs
no driver, and report that they are CUDA tensors, so our code takes the GPU path: fused kernels (only the launch is
skipped; their outputs are allocated), cuDNN attention, the in-place parameter update.
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
from craton.ml.meshes import forget_meshes
from craton.ml.models import Decoder, dispatch
from craton.ml.trace.patches import replaced
from craton.ml.training import build, loop

PROCESSORS = 132  # streaming multiprocessors of an H100; only the size of one small buffer depends on it


class TraceError(CratonError):
    """This step cannot be traced."""


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[FakeTensorMode]:
    """Make this process one rank of a fake world, in which GPU code runs without a GPU. Yields the FakeTensorMode,
    which is not yet active: meshes and shards are first built from real numbers."""
    if dist.is_initialized():
        raise TraceError("this process already has a process group; run the trace in a separate process")
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
    dist.destroy_process_group()
    forget_meshes()


def _replacements(mode: FakeTensorMode) -> list[tuple[Any, str, Any]]:
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        raise TraceError(
            "a trace runs the code of the GPU kernels, which needs Triton; Triton is not installed: "
            "install craton[train] on Linux"
        ) from None

    def nothing(*_arguments: Any, **_options: Any) -> None:
        """Values do not exist, so nothing is filled in."""

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
    """The kernel that `scaled_dot_product_attention` selects on a GPU; the choice cannot be queried without one."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    kernel: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, attn_mask, True, 0.0, is_causal, False, scale=scale)[0]


def _fused_norm(x: Tensor, _shape: list[int], weight: Tensor, _epsilon: float | None = None) -> Tensor:
    """On a GPU the norm is one fused kernel, which does not exist without one."""
    normed: Tensor = _FusedNorm.apply(x, weight)
    return normed


class _FusedNorm(torch.autograd.Function):
    """Allocate and keep what torch's kernel does: the input, and one number per row."""

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
    """The router's choice is unknown: every rank sends the same number of rows to each other rank."""
    ranks = sent.shape[0]
    sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    return sizes, sizes


class _Unread:
    """Stand-in for numbers on their way to the host, which are never read."""

    def __init__(self, _tensor: Tensor) -> None:
        pass
