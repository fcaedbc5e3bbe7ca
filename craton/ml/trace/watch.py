"""Observe every operator of a step: collectives with group and place, FLOPs, and the lifetime of every allocation.

Works on fake and on real tensors. The owner of an operator is found without help from the model: in the forward pass
from the module being called, in the backward pass from the sequence number that autograd gave the operation.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from craton.ml.kernels import LateGradients
from craton.ml.trace.operators import collective_of, flops_of, is_attention, tensors_in
from craton.ml.trace.patches import replaced
from craton.ml.trace.records import PARTS, Amount, CollectiveKey, FlopKey, Phase, Place

ONCE: Phase = "step"  # for what is not part of a micro-batch
NO_BLOCK = -1


class StepWatch(TorchDispatchMode):
    """Context manager around a step; its counters hold what was seen."""

    def __init__(
        self, modules: dict[nn.Module, str], dimension_of: Callable[[ProcessGroup, str, int, bool], str]
    ) -> None:
        super().__init__()
        self.collectives: dict[tuple[Phase, CollectiveKey], Amount] = {}
        self.flops: dict[tuple[Phase, FlopKey], float] = {}
        self.layers: dict[int, dict[tuple[Place, str, str], int]] = {}
        self.peaks: dict[tuple[Place, int, Phase], dict[str, float]] = {}  # (place, block, micro-batch) → bytes by part
        self.micro_batch: Phase = ONCE
        self.message_place: Place = "forward"  # of tensors between pipeline stages, which belong to no module
        self.is_optimizing = False
        self._modules, self._dimension_of = modules, dimension_of
        self._path: list[str] = []
        self._marks: list[tuple[int, str]] = []  # from this autograd number on, operations belong to this module
        self._backward_path = ""
        self._late_path: str | None = None
        self._part: str | None = None
        self._sharder: FSDPParamGroup | None = None
        self._is_guessing = False
        self._live = dict.fromkeys(PARTS, 0.0)
        self._storages: dict[int, tuple[weakref.ref[Any], float, str]] = {}
        self._highest: dict[tuple[Place, int, Phase], float] = {}
        self._patches = ExitStack()

    def __enter__(self) -> StepWatch:
        enter = self._patches.enter_context
        for hook in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._patches.callback(hook.remove)
        enter(replaced(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)))
        for name, part in (
            ("unshard", "gathered parameters"),
            ("wait_for_unshard", "gathered parameters"),
            ("post_backward", "gradients"),
        ):
            enter(replaced(FSDPParamGroup, name, self._sharding(getattr(FSDPParamGroup, name), part)))
        enter(replaced(FSDPParam, "init_unsharded_param", self._hooking(FSDPParam.init_unsharded_param)))
        enter(replaced(LateGradients, "add", self._adding_late(LateGradients.add)))
        propagate = "propagate_op_sharding_non_cached"
        enter(replaced(ShardingPropagator, propagate, self._guessing(getattr(ShardingPropagator, propagate))))
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._patches.close()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operation on its local part is dispatched again
        options = options or {}
        result = function(*arguments, **options)
        if self._is_guessing:
            return result
        path = self._current_path()
        place = self._current_place()
        if collective := collective_of(function, arguments, result):
            self._count(collective.operation, collective.group, collective.dtype, collective.bytes, place, path)
        elif flops := flops_of(function, arguments, options):
            self._add_flops(function, flops, place, path)
        for tensor in tensors_in(result):
            self.own(tensor, self._part or self._default_part())
        return result

    def own(self, tensor: Tensor, part: str) -> None:
        """Count a tensor's memory as this part from now on; memory that is already counted keeps its part."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = float(storage.nbytes())
        self._storages[key] = (weakref.ref(storage, lambda _: self._freed(key)), size, part)
        self._grow(part, size)

    def become(self, tensor: Tensor, part: str) -> None:
        """Move a tensor's memory to another part."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = local.untyped_storage()._cdata
        if key in self._storages:
            reference, size, before = self._storages[key]
            self._live[before] -= size
            self._live[part] += size
            self._storages[key] = (reference, size, part)
        else:
            self.own(tensor, part)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count allocations inside the context as this part."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def watch_gradient(self, parameter: Tensor) -> None:
        """Count the gradient of a leaf as a gradient as soon as autograd has it."""
        parameter.register_post_accumulate_grad_hook(self._gradient_arrived)

    def _count(
        self, operation: str, group: ProcessGroup, dtype: torch.dtype, size: int, place: Place, path: str
    ) -> None:
        if group.size() == 1:
            return
        if operation in ("send", "recv"):
            place = self.message_place
        dimension = self._dimension_of(group, operation, size, self._sharder is not None)
        name = str(dtype).removeprefix("torch.")
        key = (self._phase(), CollectiveKey(operation, dimension, group.size(), name, place, _starred(path)))
        amount = self.collectives.setdefault(key, Amount())
        amount.count += 1
        amount.bytes += size
        if (block := _block(path)) != NO_BLOCK:
            calls = self.layers.setdefault(block, {})
            calls[(place, operation, dimension)] = calls.get((place, operation, dimension), 0) + 1

    def _add_flops(self, function: Any, flops: float, place: Place, path: str) -> None:
        operator = function._schema.name.partition("::")[2].rstrip("_")
        if is_attention(function):
            kind = "attention"
        elif operator == "_grouped_mm" or path.endswith(".experts"):
            kind = "experts"
        else:
            kind = "gemm" if path else "head"
        key = (self._phase(), FlopKey(kind, operator, place))
        self.flops[key] = self.flops.get(key, 0.0) + flops

    def _phase(self) -> Phase:
        return ONCE if self.is_optimizing else self.micro_batch

    def _default_part(self) -> str:
        return "buffers" if self.is_optimizing else "activations"

    def _current_path(self) -> str:
        if self._sharder is not None:
            return self._modules.get(self._sharder.modules[0], "")
        if self._late_path is not None:
            return self._late_path
        if self._path:
            return self._path[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0])
        if 0 < place < len(self._marks):  # leaves have the highest number, and belong to the operation before them
            self._backward_path = self._marks[place - 1][1]
        return self._backward_path

    def _current_place(self) -> Place:
        if self.is_optimizing:
            return "optimizer"
        is_late = self._late_path is not None or self._part == "gradients"
        if is_late or torch._C._current_autograd_node() is not None:
            return "backward"
        return "forward" if self._path or self._sharder is not None else "loss"

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        if module in self._modules:
            self._path.append(self._modules[module])
            self._mark()

    def _leave_module(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if module in self._modules and self._path:
            self._path.pop()
            self._mark()

    def _mark(self) -> None:
        self._marks.append((torch.autograd._get_sequence_nr(), self._path[-1] if self._path else ""))

    def _grow(self, part: str, size: float) -> None:
        self._live[part] += size
        total = sum(self._live.values())
        window = (self._current_place(), _block(self._current_path()), self._phase())
        if total > self._highest.get(window, -1.0):
            self._highest[window] = total
            self.peaks[window] = dict(self._live)

    def _freed(self, key: int) -> None:
        if entry := self._storages.pop(key, None):
            self._live[entry[2]] -= entry[1]

    def _gradient_arrived(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.become(parameter.grad, "gradients")

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """FSDP2 frees and reallocates gathered parameters by resizing their storage."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if entry := self._storages.get(storage._cdata):
                reference, before, part = entry
                self._storages[storage._cdata] = (reference, float(size), part)
                self._live[part] -= before
                self._grow(part, float(size))
            return result

        return resized

    def _sharding(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def watched(group: FSDPParamGroup, *arguments: Any, **options: Any) -> Any:
            before, self._sharder = self._sharder, group
            try:
                with self.part(part):
                    return method(group, *arguments, **options)
            finally:
                self._sharder = before

        return watched

    def _guessing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """DTensor runs its operator on whole tensors that are not in memory, to infer the shape of the result."""

        def unseen(*arguments: Any, **options: Any) -> Any:
            before, self._is_guessing = self._is_guessing, True
            try:
                return method(*arguments, **options)
            finally:
                self._is_guessing = before

        return unseen

    def _hooking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        hooked = weakref.WeakSet[Any]()

        def watched(parameter: FSDPParam) -> None:
            method(parameter)
            whole = parameter._unsharded_param
            if whole.requires_grad and parameter not in hooked:
                hooked.add(parameter)
                self.watch_gradient(whole)

        return watched

    def _adding_late(self, add: Callable[..., Any]) -> Callable[..., Any]:
        """A deferred weight gradient belongs to the module whose backward pass deferred it."""

        def watched(late: LateGradients, parameter: Tensor, compute: Callable[[], Tensor]) -> None:
            path = self._current_path()

            def computed() -> Tensor:
                before, self._late_path = self._late_path, path
                try:
                    with self.part("gradients"):
                        return compute()
                finally:
                    self._late_path = before

            # a call that only changes the queue already has its module
            add(late, parameter, compute if torch._C._current_autograd_node() is None else computed)

        return watched


def _block(path: str) -> int:
    """Return the number of the block that contains a module; NO_BLOCK outside the blocks."""
    first, _, rest = path.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blocks" and number.isdigit() else NO_BLOCK


def _starred(path: str) -> str:
    """Return the same module path for every block."""
    parts = path.split(".")
    return ".".join(["blocks", "*", *parts[2:]]) if _block(path) != NO_BLOCK else path
