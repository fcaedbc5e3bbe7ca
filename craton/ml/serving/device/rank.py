"""One rank of an engine: its shard of the weights, and the operations on it: steps, adapters, updates, sleep, wake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from craton.ml.collectives import local
from craton.ml.models import Decoder
from craton.ml.serving.device.runner import Runner, StepResult
from craton.ml.serving.device.weight_deltas import HeldWeights
from craton.ml.serving.device.weights import WeightsReceiver, named_targets, update_from_folder
from craton.ml.serving.schedule import StepInput
from craton.ml.serving.settings import ServingError

if TYPE_CHECKING:
    from craton.ml.serving.device.adapters import Adapters


DRAFT_PREFIX = "draft model/"  # of names of a draft model's weights


class EngineRank:
    """Executes steps and administrative operations. The same methods are called on every rank."""

    def __init__(self, runner: Runner, adapters: Adapters | None = None, number: int = 0, secret: bytes = b"") -> None:
        self.runner = runner
        self.adapters = adapters
        self._number = number
        self._secret = secret
        self._kept: dict[str, Tensor] = {}  # weights of a sleeping rank, in host memory
        self._sizes: dict[str, int] = {}
        self._has_weights = self._has_cache = True
        self._receiver: WeightsReceiver | None = None
        self._held = HeldWeights()  # what a trainer sent last, the base of a delta

    @property
    def model(self) -> Decoder:
        return self.runner.model

    def execute(self, work: StepInput) -> StepResult:
        assert self._has_weights, "asleep"
        assert self._has_cache, "asleep"
        return self.runner.execute(work)

    def load_adapter(self, name: str, folder: str) -> int:
        return self._adapters.load(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    def update_from_folder(self, folder: str) -> None:
        self._held.forget()
        update_from_folder(self.model, Path(folder))

    def receive_weights(self, address: str, wait_seconds: float) -> int:
        """Receive new weights at an address, whose port is offset by the rank number; return their version."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ServingError(f"{address!r} is not an address; write host:port")
        with WeightsReceiver(f"{host}:{int(port) + self._number}", self._secret) as receiver:
            self._receiver = receiver
            try:
                return receiver.receive(self.model, wait_seconds, self._held)
            finally:
                self._receiver = None

    def cancel_receiving(self) -> None:
        """Wait no longer for weights, unless their sender has connected; for any thread."""
        if (receiver := self._receiver) is not None:
            receiver.cancel()

    @torch.no_grad()
    def sleep(self, level: int) -> None:
        """Free the device memory of KV cache and weights. Level 1 keeps the weights in host memory; level 2 discards
        them, so they must be sent again."""
        sent = named_targets(self.model)
        if level == 2:
            self._held.forget()
        for name, part in self._tensors():
            if level == 1 or name not in sent:  # an update does not include adapters and a draft model
                self._kept[name] = part.to("cpu", copy=True)
            self._sizes[name] = part.untyped_storage().nbytes()
            part.untyped_storage().resize_(0)
        self.runner.sleep()
        self._has_weights = self._has_cache = False

    @torch.no_grad()
    def wake(self, parts: Sequence[str]) -> None:
        """Allocate the memory of "weights", of the "kv_cache", or of both again."""
        if "weights" in parts and not self._has_weights:
            for name, part in self._tensors():
                part.untyped_storage().resize_(self._sizes[name])
                if name in self._kept:
                    part.copy_(self._kept.pop(name))
            self._has_weights = True
        if "kv_cache" in parts and not self._has_cache:
            self.runner.wake()
            self._has_cache = True
        if self._has_weights and self._has_cache:
            self.runner.capture()

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield this rank's shards of parameters and buffers, and those of a draft model; a tied one once."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            yield name, local(tensor)
        if (drafter := self.runner.drafter) is not None:
            draft = drafter.runner.model
            for name, tensor in (*draft.named_parameters(), *draft.named_buffers()):
                yield DRAFT_PREFIX + name, tensor

    @property
    def _adapters(self) -> Adapters:
        if self.adapters is None:
            raise ServingError("the engine has no adapter slots; start it with serve.max_adapters of 1 or more")
        return self.adapters
