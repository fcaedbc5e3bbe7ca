"""The rollout engine in a trainer's process: the serving engine over the weights that are trained.

The engine's model is a twin of the trained one, without gradients and without a scalar head. Where a rank holds whole
parameters in the precision it computes in (one rank, or copies only), the twin's parameters are the trained ones: the
same storage, nothing is copied, and after an update of the optimizer only the version changes. In every other layout
each rank keeps a whole copy, which `refresh` fills tensor by tensor.

LoRA: the twin has the same adapter layers as the trained model. They compute what the trained ones do, also in bf16,
where merged weights would round small adapters away; the frozen weights are shared, or copied only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from craton.errors import CratonError
from craton.job.layout import stage_layers
from craton.job.sections import Lora
from craton.ml.models import Decoder
from craton.ml.serving import EngineSettings, OutputDelta
from craton.ml.serving.clients import Answer, EngineClient, EngineTexts, InferenceRequest, generate
from craton.ml.serving.engine import build_runner, bytes_of_block, join_engine
from craton.ml.training import LoraLinear, add_adapters
from craton.ml.training.parallel import Ranks
from craton.planning.serving import CPU_KV_BYTES

KV_SHARE = 0.3  # of the free device memory, if nothing else decides: most of it is for training
_ADAPTERS = (".lora_a", ".lora_b")
_BIAS = "router_bias"  # a buffer that training changes, too


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
    ) -> None:
        """`kv_bytes` bounds the KV cache, unless `settings.blocks` does; 0: what `max_running` requests can use, at
        most KV_SHARE of the free memory of a GPU. It is allocated here and does not change."""
        if not isinstance(model, Decoder):
            raise RolloutError(
                "rollouts in the trainer's process need a model of Craton's own decoder families; use mode separate, "
                "or an endpoint"
            )
        self._model, self._ranks = model, ranks
        self._dtype = torch.float32 if ranks.layout.precision == "fp32" else torch.bfloat16
        with torch.device("meta"):
            self.twin = Decoder(model.config)
        self._has_adapters = _add_same_adapters(self.twin, model, ranks)
        self._has_frozen = False  # the copy has the weights that are not trained
        self._trained = self._named_tensors()
        self.is_shared = self._can_share()
        if self.is_shared:
            self._share()
        else:
            self.twin.to(self._dtype).to_empty(device=ranks.device)
            self._copy()
        for module in self.twin.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:  # counters that are not part of the weights
                    module.register_buffer(name, torch.zeros_like(buffer, device=ranks.device), persistent=False)
        settings = replace(settings, blocks=settings.blocks or self._blocks(settings, kv_bytes))
        self._runner, settings, max_length = build_runner(self.twin, settings)
        self.engine = join_engine(self._runner, self._runner, settings, max_length, stop_tokens)
        self._tokenizer_folder = tokenizer_folder
        self._texts = EngineTexts(tokenizer_folder)

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

    def _named_tensors(self) -> dict[str, Tensor]:
        """Return the trained model's tensors that the twin has too: this rank's shards, not what FSDP has gathered."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        wanted = {*dict(self.twin.named_parameters()), *_biases(self.twin)}
        tensors = {**dict(self._model.named_parameters()), **_biases(self._model)}
        return {name: tensor for name, tensor in tensors.items() if name in wanted}

    def _can_share(self) -> bool:
        if self._ranks.layout.pp > 1:
            return False
        # A bias of the router is whole on every rank, and fp32.
        parameters = [tensor for name, tensor in self._trained.items() if not name.endswith(_BIAS)]
        return all(tensor.dtype == self._dtype and _storage(tensor).shape == tensor.shape for tensor in parameters)

    def _share(self) -> None:
        for name, tensor in self._trained.items():
            path, _, own = name.rpartition(".")
            module = self.twin.get_submodule(path)
            if name.endswith(_BIAS):
                module.register_buffer(own, tensor)
            else:
                module.register_parameter(own, nn.Parameter(_storage(tensor), requires_grad=False))
        self._check_shared()

    def _check_shared(self) -> None:
        twin = {**dict(self.twin.named_parameters()), **_biases(self.twin)}
        for name, tensor in self._named_tensors().items():
            assert twin[name].data_ptr() == _storage(tensor).data_ptr(), f"{name} has moved"

    @torch.no_grad()
    def _copy(self) -> None:
        """Fill the twin, one whole tensor at a time: gathered over the owner's mesh, then sent to the other stages."""
        trained = self._named_tensors()
        twin = {**dict(self.twin.named_parameters()), **_biases(self.twin)}
        for name, target in twin.items():
            if self._has_adapters and self._has_frozen and not name.endswith((*_ADAPTERS, _BIAS)):
                continue
            stage = self._stage_of(name)
            if stage is None or stage == self._ranks.place["pp"]:
                target.copy_(_whole(trained[name], target.dtype))
            if stage is not None:
                assert self._ranks.pipeline is not None
                # as bytes: gloo does not send every dtype
                dist.broadcast(target.view(torch.uint8), group=self._ranks.pipeline.group, group_src=stage)
        self._has_frozen = True

    def _stage_of(self, name: str) -> int | None:
        """Return the pipeline rank that owns a tensor; None without a pipeline."""
        layout = self._ranks.layout
        if layout.pp == 1:
            return None
        stages = stage_layers(self.twin.config.shape.layers, layout.pp, layout.vpp)
        first, *rest = name.split(".")
        if first == "blocks":
            return next(index for index, layers in enumerate(stages) if int(rest[0]) in layers) % layout.pp
        return 0 if first == "embedding" else layout.pp - 1

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


def _biases(model: Decoder) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(_BIAS)}


def _storage(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without gradient: the same memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor gathered over all its ranks, cast before, as FSDP does."""
    cast_tensor = tensor.detach().to(dtype)
    return cast_tensor.full_tensor() if isinstance(cast_tensor, DTensor) else cast_tensor


def _add_same_adapters(twin: Decoder, model: Decoder, ranks: Ranks) -> bool:
    """Add adapters to the twin where the trained model has some; return whether it has any. A pipeline stage may have
    none of its own, so the stages compare."""
    found = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # rank, scale, of attention, of MLPs
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            found[0], found[1], found[2 if ".attention." in name else 3] = module.lora_a.shape[0], module.scale, 1
    if ranks.pipeline is not None:
        found = ranks.pipeline.sum(found, "max")
    rank, scale, of_attention, of_mlps = found.tolist()
    if not rank:
        return False
    targets = "all" if of_attention and of_mlps else "attention" if of_attention else "mlp"
    with torch.device("meta"):
        add_adapters(twin, Lora(rank=int(rank), targets=targets))
    for module in twin.modules():
        if isinstance(module, LoraLinear):
            module.scale = scale
    return True
