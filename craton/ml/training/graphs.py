"""Micro-steps as CUDA graphs: the device runs forward and backward pass of a micro-batch without waiting for Python.

A graph is captured for each shape of a micro-batch, and has fixed addresses. A batch is copied into the graph's inputs;
the gradients lie in buffers that the optimizer reads. The kernels are those of the eager step, in the same order, so
the numbers are the same. Document boundaries are padded to a power of two, so a few graphs serve all batches. A shape
runs eagerly into the same buffers twice before it is captured: the first time it may compile, the second time it shows
whether it waits for the device, which a graph cannot. Shapes beyond MAX_GRAPHS always run eagerly.

`auto` measures the second and third step: if the host spends much of a forward pass launching kernels, graphs are used
from then on, where there is room for them. What Python code does beside the tensors happens once, at the capture, so
`auto` leaves objectives and models of users alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from craton.errors import CratonError
from craton.formatting import duration, memory, percent
from craton.ml.training.batch import Batch, BatchShape
from craton.ml.training.guard import is_out_of_memory
from craton.ml.training.optimizer import AdamW
from craton.ml.training.parallel import Ranks

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

LAUNCH_SHARE = 0.5  # of the device's time for a forward pass; if launching takes more, graphs are worth a capture
MEASURED_STEPS = 2  # after the first one, which compiles
EAGER_RUNS = 2  # of a shape before its capture
MAX_GRAPHS = 8  # shapes; each graph holds the memory of its intermediate results
ROOM_FACTOR = 2.0  # of the memory of a micro-step: once for the graph, once for what runs eagerly beside it

Totals = dict[str, Tensor]
MicroStep = Callable[[Batch, Tensor], Totals]  # forward and backward pass; returns the loss and the objective's sums
Mode = Literal["auto", "on", "off"]


class GraphError(CratonError):
    """The micro-step cannot be captured, but the job requires it."""


def graph_obstacle(ranks: Ranks) -> str:
    """Return why the micro-steps of this rank cannot run as CUDA graphs; empty if they can."""
    if ranks.device.type != "cuda":
        return "there is no GPU"
    if ranks.world > 1:
        # FSDP2 gathers weights into memory that it frees and allocates again in every pass, and a captured collective
        # is invisible to NCCL's watchdog and flight recorder, on which recovery and diagnosis rely.
        return (
            f"the layout has {ranks.world} ranks, and a graph needs weights that stay in place, but FSDP2 gathers them "
            "into new memory in every pass"
        )
    return ""


class MicroStepGraphs:
    """Runs the micro-steps of one rank that trains alone on its GPU."""

    def __init__(self, mode: Mode, micro_step: MicroStep, optimizer: AdamW) -> None:
        self.is_on = mode == "on"
        self.is_measuring = mode == "auto"
        self.note = ""  # for the log: that graphs are captured, or why they are not
        self._reason = ""
        self._is_required = mode == "on"
        self._micro_step, self._optimizer = micro_step, optimizer
        self._graphs: dict[tuple[BatchShape, bool], _Graph] = {}
        self._eager_runs: Counter[tuple[BatchShape, bool]] = Counter()
        self._shares: list[float] = []
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._totals: Totals = {}

    def run(self, batches: Sequence[Batch], count: Tensor) -> Totals | None:
        """Compute the gradients of a step, and return its sums. None: graphs are not in use (yet)."""
        self._steps += 1
        if not self.is_on or self._steps == 1:  # the first step compiles kernels, which a capture must not
            return None
        if len(batches) == 1:
            return self._run_one(batches[0], count)
        return self._accumulate(batches, count)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Surround the forward pass of an eager micro-step, of which one in each measured step is timed."""
        if not self.is_measuring or self._steps != 2 + len(self._shares):
            yield
            return
        torch.cuda.current_stream().synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        began = time.perf_counter()
        yield
        launching = time.perf_counter() - began
        end.record()
        end.synchronize()
        self.add_share(launching * 1000 / max(begin.elapsed_time(end), 1e-6))

    def add_share(self, share: float) -> None:
        """Take the share of a forward pass that was launching; after MEASURED_STEPS of them, decide. The smaller one
        counts: a busy host only makes it larger."""
        self._shares.append(share)
        if len(self._shares) < MEASURED_STEPS:
            return
        share = min(self._shares)
        self.is_measuring, self.is_on = False, share >= LAUNCH_SHARE
        if self.is_on:
            self._reason = f"launching kernels takes {percent(min(share, 1.0))} of a forward pass"

    def _run_one(self, batch: Batch, count: Tensor) -> Totals:
        batch = batch.with_fixed_documents()
        graph = self._graph(batch, count, accumulates=False)
        if graph is None:
            return self._run_eagerly(batch, count, accumulates=False)
        graph.replay(batch, count)
        for name, parameter in self._optimizer.parameters.items():
            parameter.grad = self._gradients[name]
        return graph.totals

    def _accumulate(self, batches: Sequence[Batch], count: Tensor) -> Totals:
        self._sums = self._sums or self._optimizer.new_sums()
        torch._foreach_zero_([*self._sums.values(), *self._totals.values()])
        for batch in batches:
            batch = batch.with_fixed_documents()
            graph = self._graph(batch, count, accumulates=True)
            if graph is None:
                self._add(self._run_eagerly(batch, count, accumulates=True))
            else:
                graph.replay(batch, count)
        self._optimizer.use_sums(self._sums)
        totals = self._totals
        if not self.is_on:  # turned off in this step: later ones accumulate as eager steps do
            self._sums, self._totals = {}, {}
        return totals

    def _add(self, totals: Totals) -> None:
        """Add gradients and totals of a micro-step to those of the step."""
        for name, value in totals.items():
            if name not in self._totals:
                self._totals[name] = torch.zeros_like(value)
            self._totals[name] += value
        self._optimizer.move_gradients_into(self._sums)

    def _run_eagerly(self, batch: Batch, count: Tensor, accumulates: bool) -> Totals:
        """Run a micro-step; one that would be captured next must not wait for the device."""
        key = (batch.shape, accumulates)
        self._eager_runs[key] += 1
        is_probed = self.is_on and self._eager_runs[key] == EAGER_RUNS and len(self._graphs) < MAX_GRAPHS
        if not is_probed or not count.is_cuda:
            return self._micro_step(batch, count)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._micro_step(batch, count)
        except Exception as error:  # the same step without graphs raises what is not about them
            if is_out_of_memory(error):
                raise
            self._drop_gradients()
            self._turn_off(error)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return self._micro_step(batch, count)

    def _graph(self, batch: Batch, count: Tensor, accumulates: bool) -> _Graph | None:
        """Return the graph of this shape, captured after EAGER_RUNS of it."""
        key = (batch.shape, accumulates)
        is_known = key in self._graphs or self._eager_runs[key] < EAGER_RUNS
        if not is_known and self.is_on and len(self._graphs) < MAX_GRAPHS:
            self._capture(key, batch, count)
        return self._graphs.get(key)

    def _capture(self, key: tuple[BatchShape, bool], batch: Batch, count: Tensor) -> None:
        if not self._graphs and not self._is_required and (problem := _lacks_room(count.device)):
            self._turn_off(GraphError(problem))
            return
        began = time.perf_counter()
        self._drop_gradients()
        pool = next((graph.pool for graph in self._graphs.values()), None)
        try:
            graph = _Graph(batch, count, self._accumulating_step if key[1] else self._single_step, pool)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the step may work without a graph
            self._drop_gradients()
            self._turn_off(error)
            return
        self._graphs[key] = graph
        if not key[1] and not self._gradients:
            self._gradients = {name: _gradient_of(parameter) for name, parameter in self._optimizer.parameters.items()}
        self._drop_gradients()
        if len(self._graphs) == 1:
            reason = f": {self._reason}" if self._reason else ""
            self.note = f"captured in {duration(time.perf_counter() - began)}{reason}"

    def _turn_off(self, error: Exception) -> None:
        """Run eagerly from here on, and release the memory of graphs."""
        reason = first_reason(error)
        if self._is_required:
            if is_out_of_memory(error):
                raise error
            raise GraphError(
                f"train.graphs: on, but the step cannot be captured ({reason}); the forward pass, the objective and "
                "the model must not wait for the device (item(), tolist(), print of a tensor). Write graphs: auto"
            ) from error
        self.is_on, self.note = False, f"off: the step cannot be captured ({reason})"
        self._graphs.clear()
        self._gradients = {}

    def _drop_gradients(self) -> None:
        for parameter in self._optimizer.parameters.values():
            parameter.grad = None

    def _accumulating_step(self, batch: Batch, count: Tensor) -> Totals:
        self._add(self._micro_step(batch, count))
        return {}

    def _single_step(self, batch: Batch, count: Tensor) -> Totals:
        totals = self._micro_step(batch, count)
        if self._gradients:  # of the first graph: the others copy theirs, so that the memory is needed once
            fresh = [_gradient_of(self._optimizer.parameters[name]) for name in self._gradients]
            torch._foreach_copy_(list(self._gradients.values()), fresh)
        return totals


class _Graph:
    """One captured micro-step: its inputs, and its outputs, which a replay overwrites."""

    def __init__(self, batch: Batch, count: Tensor, micro_step: MicroStep, pool: _POOL_HANDLE | None) -> None:
        self._batch, self._count = batch.clone(), count.clone()
        self._graph = torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        stream = torch.cuda.current_stream(count.device)
        try:
            # thread_local: threads that write checkpoints may use the device meanwhile
            with torch.cuda.graph(self._graph, pool=self.pool, capture_error_mode="thread_local"):
                self.totals = micro_step(self._batch, self._count)
        except BaseException:
            # torch leaves the stream of a failed capture current, and its allocator believes that it goes on
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(count.device.index or 0, self.pool)
            raise

    def replay(self, batch: Batch, count: Tensor) -> None:
        self._batch.copy_(batch)
        self._count.copy_(count)
        self._graph.replay()


def first_reason(error: BaseException) -> str:
    """Return the first line of the error that came first: the end of a broken capture raises another one."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lacks_room(device: torch.device) -> str:
    """Return what is missing for a graph, whose memory nothing else can use; empty if there is room."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    available = free + torch.cuda.memory_reserved(device) - allocated
    needed = ROOM_FACTOR * (torch.cuda.max_memory_allocated(device) - allocated)
    return "" if needed <= available else f"it needs {memory(needed)} of GPU memory, {memory(available)} are free"


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a parameter has no gradient; freeze it, or use it in the loss"
    return parameter.grad
