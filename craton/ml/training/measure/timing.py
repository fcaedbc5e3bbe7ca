"""Where the seconds of a step go, measured without making the device wait.

Marks cut a step into phases that add up to its length. On a CPU a mark reads the clock. On a GPU it is an event on the
compute stream, read a step later, so it measures when the device did the work, not when the work was launched.
Communication is the time that computation and update waited: on a CPU every second inside collectives; on a GPU the
waits of the compute stream for other ranks' tensors, for gathered parameters, and for the last reduction at the end of
the backward pass. A reduction that delays the middle of a backward pass on a GPU is counted as compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from craton.ml.collectives import Peers
from craton.telemetry import PHASES

Stamp = Any  # float seconds on a CPU, torch.cuda.Event on a GPU


@dataclass
class MeasuredStepTimes:
    """The timestamps of one step; reading `seconds` before the device has passed them waits for it."""

    start: Stamp
    marks: list[tuple[str, Stamp]] = field(default_factory=list)
    waits: list[tuple[int, Stamp, Stamp]] = field(default_factory=list)  # first: index of the mark that ends the phase
    parts: list[tuple[str, str, float]] = field(default_factory=list)  # phase, another phase, seconds that belong to it

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase; they add up to the step."""
        last = self.marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()  # slightly later than the numbers that were already waited for
        phases = dict.fromkeys(PHASES, 0.0)
        before = self.start
        for phase, stamp in self.marks:
            phases[phase] += _between(before, stamp)
            before = stamp
        for index, begin, end in self.waits:
            phase = self.marks[index][0]
            waited = min(_between(begin, end), phases[phase])
            phases[phase] -= waited
            phases["communication"] += waited
        for phase, part, seconds in self.parts:
            moved = min(seconds, phases[phase])
            phases[phase] -= moved
            phases[part] = phases.get(part, 0.0) + moved
        return phases


class StepTimer:
    """Marks the end of a phase; everything since the previous mark belongs to it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times = MeasuredStepTimes(self.stamp())

    def stamp(self) -> Stamp:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """The time between the last step and this call belongs to neither."""
        self._times = MeasuredStepTimes(self.stamp())

    def mark(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """End a phase; `parts`: phase → seconds of it that belong to another one, by the host's clock."""
        self._times.marks.append((phase, self.stamp()))
        self._times.parts += [(phase, part, seconds) for part, seconds in (parts or {}).items()]

    def finish(self) -> MeasuredStepTimes:
        """Return the step's times; the next step begins where they end."""
        done = self._times
        self._times = MeasuredStepTimes(done.marks[-1][1])
        return done

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for other ranks, whatever the phase."""
        begin = self.stamp()
        yield
        self.waited(begin)

    def waited(self, since: Stamp) -> None:
        self._times.waits.append((len(self._times.marks), since, self.stamp()))

    def watch(self, model: nn.Module, peers: Iterable[Peers] = ()) -> None:
        """Measure the communication of a model that FSDP2 wraps, and of these peers; otherwise there is nothing to
        do."""
        for peer in peers:
            peer.waiting = self.waiting
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if self._on_gpu:
                    _GpuWaits(self).attach(module, is_root=module is model)
                else:
                    _CpuWaits(self).attach(module)


class _CpuWaits:
    """On gloo every collective blocks its caller, so its duration is the waiting time."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer

    def attach(self, module: FSDPModule) -> None:
        scatter = _TimedReduceScatter(self._timer)
        module.set_custom_all_gather(_TimedAllGather(self._timer))
        module.set_custom_reduce_scatter(scatter)
        module.set_all_reduce_hook(scatter.reduced)


class _TimedAllGather(DefaultAllGather):
    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work | None:
        with self._timer.waiting():
            return super().__call__(*arguments, **options)


class _TimedReduceScatter(DefaultReduceScatter):
    """FSDP2 calls `allocate` for the output, then this, then all-reduces over the replicas itself, then calls
    `reduced`: the all-reduce is what lies between."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._since: Stamp = timer.stamp()

    def allocate(self, *arguments: Any, **options: Any) -> Tensor:
        buffer = super().allocate(*arguments, **options)
        self._since = self._timer.stamp()
        return buffer

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work:
        with self._timer.waiting():
            work = super().__call__(*arguments, **options)
        self._since = self._timer.stamp()
        return work

    def reduced(self, _gradient: Tensor) -> None:
        self._timer.waited(self._since)


class _GpuWaits:
    """FSDP2 makes the compute stream wait in its hooks before a module's forward and backward, and in a callback at the
    end of the whole backward pass; our hooks surround them."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._since: Stamp = None

    def attach(self, module: nn.Module, is_root: bool) -> None:
        module.register_forward_pre_hook(self._begins, prepend=True)
        module.register_forward_pre_hook(self._ends)
        module.register_forward_hook(partial(self._around_backward, self._begins, is_root), prepend=True)
        module.register_forward_hook(partial(self._around_backward, self._ends, is_root))

    def _begins(self, *_: Any) -> None:
        self._since = self._timer.stamp()

    def _ends(self, *_: Any) -> None:
        self._timer.waited(self._since)

    def _around_backward(
        self, stamp: Callable[..., None], is_root: bool, _module: nn.Module, _inputs: Any, output: Any
    ) -> None:
        def hook(_gradient: Tensor) -> None:
            stamp()
            if is_root:  # callbacks run in registration order, and FSDP2 registers its own between our two hooks
                Variable._execution_engine.queue_callback(stamp)

        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(hook)


def _between(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1000


class HostCopy:
    """A tensor on its way to the host; on a GPU only `read` waits, and only for earlier work. The copy has its own
    stream: a device runs copies to the host one at a time, and behind a copy of the whole state these few numbers would
    delay the computation."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.is_cuda:
            stream = self._streams.get(tensor.device) or torch.cuda.Stream(tensor.device)
            self._streams[tensor.device] = stream
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            with torch.cuda.stream(stream):
                self._values.copy_(tensor, non_blocking=True)
                self._arrived = stream.record_event()
            tensor.record_stream(stream)

    @property
    def is_on_host(self) -> bool:
        """Whether it never was on a device."""
        return self._arrived is None

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


@dataclass
class Readout:
    """What is known of a step once the device has finished it."""

    step: int
    samples: range  # global indices
    learning_rate: float
    numbers: HostCopy
    report_names: list[str]
    times: MeasuredStepTimes
    agreed: HostCopy  # weight of all labels of the step, then what ranks agreed on
    batch: dict[str, float] = field(default_factory=dict)  # metrics of its batches, on rank 0
    kept: Any = None  # the batches themselves, in case the step turns out to be bad
    pending: tuple[int, ...] = ()  # global indices before the end of `samples` that later steps train
