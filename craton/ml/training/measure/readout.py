"""Numbers on their way from the device to the host, so that a step need not wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from craton.ml.training.measure.timing import MeasuredStepTimes


class HostCopy:
    """A tensor on its way to the host; on a GPU only `read` waits, and only for what was asked before. The copy has a
    stream of its own: a device copies to the host in one line, and behind a copy of the whole state these few numbers
    would hold up the computation."""

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

    def read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


@dataclass
class Readout:
    """What is known of a step once the device has done it."""

    step: int
    next_sample: int
    learning_rate: float
    numbers: HostCopy
    report_names: list[str]
    times: MeasuredStepTimes
