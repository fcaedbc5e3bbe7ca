"""The rollout engine in a trainer's process: the serving engine over the weights that are trained.

The engine's model is a twin of the trained one, without gradients and without a scalar head. Where a rank holds whole
parameters in the precision it computes in (one rank, or copies only), the twin's parameters are the trained ones: the
same storage, nothing is copied, and after an update of the optimizer only the version changes. In every other layout
each rank keeps a whole copy, which `refresh` fills tensor by tensor (`gathering`).

LoRA: the twin has the same adapter layers as the trained model. They compute what the trained ones do, also in bf16,
where merged weights would round small adapters away; the frozen weights are shared, or copied only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from craton.errors import CratonError
from craton.ml.models import Decoder
from craton.ml.posttraining.gathering import ADAPTERS, BIAS, TrainedWeights
from craton.ml.serving import EngineSettings, OutputDelta
from craton.ml.serving.clients import Answer, EngineClient, EngineTexts, InferenceRequest, generate
from craton.ml.serving.device import named_targets
from craton.ml.serving.engine import build_runner, bytes_of_block, join_engine
from craton.ml.training.parallel import Ranks
from craton.planning.serving import CPU_KV_BYTES

KV_SHARE = 0.3  # of the free device memory, if nothing else decides: most of it is for training


class RolloutError(CratonError):
    """Rollouts cannot be generated in the trainer's process."""


class RolloutEngine:
    """An engine over a trained model. All ranks build it together, and call `refresh` together."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        settings: EngineSettings,
        stop_tokens: Iterable[int] = (),
        tokenizer_folder: Path | None = None,
        kv_bytes: int = 0,
        shares: bool = True,
    ) -> None:
        """`shares`: use the trained weights' memory where possible; otherwise generation can go on while they change.
        `kv_bytes` bounds the KV cache, unless `settings.blocks` does; 0: what `max_running` requests can use, at most
        KV_SHARE of the free memory of a GPU. It is allocated here and does not change."""
        if not isinstance(model, Decoder):
            raise RolloutError(
                "rollouts in the trainer's process need a model of Craton's own decoder families; use mode separate, "
                "or an endpoint"
            )
        if not model.config.has_token_head:
            raise RolloutError("the model has a scalar head only: it scores texts and cannot generate any")
        self._ranks = ranks
        self._weights = TrainedWeights(model, ranks)
        self.twin = self._weights.new_twin()
        self._has_frozen = False  # the copy has the weights that are not trained
        self.is_shared = shares and self._can_share()
        if self.is_shared:
            self._share()
        else:
            self.twin.to(self._weights.dtype).to_empty(device=ranks.device)
            self._copy()
        for module in self.twin.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:  # counters that are not part of the weights
                    module.register_buffer(name, torch.zeros_like(buffer, device=ranks.device), persistent=False)
        settings = replace(settings, blocks=settings.blocks or self._blocks(settings, kv_bytes))
        self._runner, settings, max_length = build_runner(self.twin, settings)
        self.engine = join_engine(self._runner, self._runner, settings, max_length, stop_tokens)
        self._tokenizer_folder = tokenizer_folder
        self._texts = EngineTexts.of_folder(tokenizer_folder)

    def refresh(self, step: int) -> list[OutputDelta]:
        """Use the trained weights of this step, and no KV cache of older ones for new requests. Call it after every
        update, and after a checkpoint was loaded, on all ranks, while no engine step runs. The deltas that it returns
        belong to requests that are open."""
        pieces = self.engine.finish_in_flight()
        if self.is_shared:
            self._check_shared()
        else:
            self._copy()
        return pieces + self.engine.change_version(step)

    def generate(
        self,
        requests: Sequence[InferenceRequest],
        keeps_cache: bool = False,
        check: Callable[[], None] | None = None,
    ) -> list[list[Answer]]:
        """Return the answers to each request. The steps, and on a CPU every bit, are a function of weights and
        requests. `keeps_cache`: also of the earlier calls since `refresh`, whose prefix cache is reused. `check` is
        called before every step, and may raise."""
        return generate(self.engine, requests, self._texts, keeps_cache, check)

    def client(self, max_in_flight: int = 1 << 20) -> EngineClient:
        """Return a client for generation beside training; its event loop and thread are the caller's."""
        return EngineClient(self.engine, self._tokenizer_folder, max_in_flight=max_in_flight)

    def close(self) -> None:
        """End all requests and free the KV cache; further requests are refused."""
        if self.engine.state == "running":
            self.engine.pause("abort")
        self.engine.state = "asleep"
        self._runner.sleep()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _can_share(self) -> bool:
        if self._ranks.layout.pp > 1:
            return False
        # A bias of the router is whole on every rank, and fp32.
        parameters = [tensor for name, tensor in self._weights.shards().items() if not name.endswith(BIAS)]
        dtype = self._weights.dtype
        return all(tensor.dtype == dtype and _storage(tensor).shape == tensor.shape for tensor in parameters)

    def _share(self) -> None:
        for name, tensor in self._weights.shards().items():
            path, _, own = name.rpartition(".")
            module = self.twin.get_submodule(path)
            if name.endswith(BIAS):
                module.register_buffer(own, tensor)
            else:
                module.register_parameter(own, nn.Parameter(_storage(tensor), requires_grad=False))
        self._check_shared()

    def _check_shared(self) -> None:
        twin = named_targets(self.twin)
        for name, tensor in self._weights.shards().items():
            assert twin[name].data_ptr() == _storage(tensor).data_ptr(), f"{name} has moved"

    def _copy(self) -> None:
        targets = named_targets(self.twin)
        if self._has_frozen and any(name.endswith(ADAPTERS) for name in targets):
            targets = {name: tensor for name, tensor in targets.items() if name.endswith((*ADAPTERS, BIAS))}
        self._weights.fill(targets)
        self._has_frozen = True

    def _blocks(self, settings: EngineSettings, kv_bytes: int) -> int:
        """Return the number of KV cache blocks."""
        block_bytes = bytes_of_block(self.twin, settings)
        if kv_bytes:
            return kv_bytes // block_bytes
        max_length = settings.max_length or self.twin.config.shape.max_sequence or 4096
        useful = settings.max_running * -(-max_length // settings.page) + 2
        device = self._ranks.device
        free = KV_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_KV_BYTES
        return min(useful, int(free // block_bytes))


def _storage(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without gradient: the same memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
