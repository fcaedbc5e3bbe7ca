"""LoRA adapters (arXiv:2106.09685), any mix of them in one batch: W + scale · B · A, with the A and B of each token's
request.

Every layer holds the A and B of all slots stacked; `kernels.serving.adapters` multiplies with them. No shape depends on
the requests: a CUDA graph can capture the matmuls and stays valid, because a new adapter is copied into place. Tensor
parallelism sends no more between ranks than without adapters. Routed experts (MoE) take no adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from craton.errors import CratonError
from craton.ml.collectives import local
from craton.ml.export_adapters import CONFIG, WEIGHTS
from craton.ml.kernels import is_fused, swiglu
from craton.ml.kernels.serving import (
    FEW_ROWS,
    SlotsOfTokens,
    adapted_skinny_gated,
    adapted_skinny_linear,
    add_adapters,
)
from craton.ml.models import Decoder, Linear, LowRank, Mlp, WeightEntry, weight_entries
from craton.ml.serving.device.float8 import ServedFloat8Linear, ServedFloat8Mlp
from craton.ml.serving.device.int4 import ServedInt4Linear, ServedInt4Mlp
from craton.ml.serving.device.layers import ServedLinear, ServedMlp

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# PEFT options under which A and B alone do not define the adapter.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias beside B",
    "modules_to_save": "whole modules beside the adapters",
    "trainable_token_indices": "rows of the embedding",
    "layer_replication": "layers used several times",
    "fan_in_fan_out": "transposed weights",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "a choice among adapters (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "block-diagonal factors",
    "use_qalora": "QALoRA",
}
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # others change the base weights


class AdapterError(CratonError):
    """An adapter cannot be loaded, or is not loaded."""


class AdaptedLinear(ServedLinear):
    """A linear layer that adds the adapters' matmuls.

    `adapter_a` is [parts · slots · rank, in] and `adapter_b` [out, parts · slots · rank], this rank's shard of them; a
    fused projection has one part for each layer it fuses.
    """

    adapters: Adapters
    adapter_a: Tensor
    adapter_b: Tensor

    def own(self, x: Tensor) -> Tensor:
        if not _are_few(x) or self.skinny is None:
            return super().own(x)
        weight, scale = self.skinny
        bias: Tensor | None = self.bias
        own_bias = None if bias is None else local(bias)
        return adapted_skinny_linear(x, weight, own_bias, scale, self.adapter_a, self.adapter_b, self.slots_of_tokens)

    def adapt(self, out: Tensor, x: Tensor) -> Tensor:
        add_adapters((out,), x, self.adapter_a, (self.adapter_b,), self.slots_of_tokens)
        return out

    @property
    def slots_of_tokens(self) -> SlotsOfTokens:
        """The slots of the tokens that this rank multiplies."""
        adapters, tensor = self.adapters, self.connections.tensor
        of_tokens, absent = adapters.of_tokens, adapters.absent
        if tensor is not None and self.cut is None:  # this rank's share of the tokens
            of_tokens, absent = (item.chunk(tensor.size)[tensor.rank] for item in (of_tokens, absent))
        return SlotsOfTokens(of_tokens, absent, adapters.slots, adapters.rank)

    @property
    def low_rank(self) -> LowRank:
        return LowRank(self.adapter_a, self.adapter_b, self.adapters.absent)


class AdaptedFloat8Linear(AdaptedLinear, ServedFloat8Linear):
    """The same with an fp8 weight."""


class AdaptedInt4Linear(AdaptedLinear, ServedInt4Linear):
    """The same with a 4-bit weight."""


class AdaptedMlp(ServedMlp):
    """The gated MLP over adapted layers. `adapter_a` is that of gate and then that of up, which are views of it."""

    adapter_a: Tensor

    @staticmethod
    def convert(mlp: Mlp) -> None:
        """Convert an MLP in place, whose layers are adapted already."""
        mlp.__class__ = AdaptedMlp
        assert isinstance(mlp, AdaptedMlp)
        layers = mlp._lifting
        mlp.register_buffer("adapter_a", torch.cat([layer.adapter_a for layer in layers]), persistent=False)
        for layer, part in zip(layers, mlp.adapter_a.chunk(len(layers)), strict=True):
            del layer.adapter_a  # no buffer any more: sleep frees the memory of each buffer
            layer.adapter_a = part

    def lift(self, x: Tensor) -> Tensor:
        gate, up = self._lifting
        b, tokens = (gate.adapter_b, up.adapter_b), gate.slots_of_tokens
        if _are_few(x) and gate.skinny is not None and up.skinny is not None:
            (weight, scale), (up_weight, up_scale) = gate.skinny, up.skinny
            return adapted_skinny_gated(x, weight, up_weight, scale, up_scale, self.adapter_a, *b, tokens)
        prepared = gate.prepare(x)
        gated, lifted = gate.product(prepared), up.product(prepared)
        add_adapters((gated, lifted), x, self.adapter_a, b, tokens)
        return swiglu(gated, lifted)

    @property
    def _lifting(self) -> tuple[AdaptedLinear, AdaptedLinear]:
        gate, up = self.gate, self.up
        assert isinstance(gate, AdaptedLinear)
        assert isinstance(up, AdaptedLinear)
        return gate, up


_ADAPTED: dict[type, type[AdaptedLinear]] = {
    Linear: AdaptedLinear,
    ServedLinear: AdaptedLinear,
    ServedFloat8Linear: AdaptedFloat8Linear,
    ServedInt4Linear: AdaptedInt4Linear,
}


@dataclass(frozen=True)
class _Layer:
    """An adapted layer, and the published layers that it fuses."""

    module: AdaptedLinear
    entry: WeightEntry
    published: tuple[str, ...]


@dataclass(frozen=True)
class _Factors:
    """One layer's adapter as published; the scale is part of `b`."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


class Adapters:
    """Room for `slots` adapters of rank `rank` or less. Shard and quantize the model first."""

    def __init__(self, model: Decoder, slots: int, rank: int) -> None:
        if slots < 1 or rank < 1:
            raise AdapterError(f"adapter slots is {slots} and rank is {rank}; both must be 1 or more")
        self.slots, self.rank = slots, rank
        self._dtype = local(model.head_weight).dtype
        self._loaded: dict[str, int] = {}
        self._layers = [
            self._adapt(layer, entry)
            for entry in weight_entries(model.config)
            if (layer := _linear(model, entry)) is not None
        ]
        for module in model.blocks.modules():
            if isinstance(module, Mlp):
                assert type(module) in (Mlp, ServedFloat8Mlp, ServedInt4Mlp), type(module).__name__
                AdaptedMlp.convert(module)
        device = local(model.head_weight).device
        self._slot_of_column = torch.arange(slots, dtype=torch.int32, device=device).repeat_interleave(rank)
        self.of_tokens = torch.full((1,), -1, dtype=torch.int32, device=device)

    @property
    def of_tokens(self) -> Tensor:
        """The slot of each token of the next forward pass, int32 [tokens]; -1: none. Set it once a step, inside the
        captured graph."""
        return self._of_tokens

    @of_tokens.setter
    def of_tokens(self, slots: Tensor) -> None:
        self._of_tokens = slots
        self.absent = slots.unsqueeze(1) != self._slot_of_column  # bool [tokens, slots · rank]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def slot(self, name: str) -> int:
        """Return the slot of an adapter."""
        if name not in self._loaded:
            raise AdapterError(f"adapter {name!r} is not loaded; loaded: {', '.join(self._loaded) or 'none'}")
        return self._loaded[name]

    def load(self, name: str, folder: str | Path) -> int:
        """Load an adapter that PEFT saved into a free slot and return the slot; an error changes nothing."""
        if name in self._loaded:
            raise AdapterError(f"adapter {name!r} is already loaded; unload it first, or use another name")
        free = [slot for slot in range(self.slots) if slot not in self._loaded.values()]
        if not free:
            raise AdapterError(
                f"adapter {name!r}: all {self.slots} slots are in use ({', '.join(self._loaded)}); unload one, or "
                "start with a larger serve.max_adapters"
            )
        self._write(free[0], self._read(Path(folder)))
        self._loaded[name] = free[0]
        return free[0]

    def unload(self, name: str) -> None:
        """Free a slot. No request may still use it."""
        self._write(self.slot(name), {})
        del self._loaded[name]

    def _adapt(self, layer: Linear, entry: WeightEntry) -> _Layer:
        assert type(layer) in _ADAPTED, f"{entry.ours}: a {type(layer).__name__} has adapters already"
        published = tuple(dict.fromkeys(piece.theirs for piece in entry.pieces))
        width = len(published) * self.slots * self.rank
        layer.__class__ = _ADAPTED[type(layer)]
        assert isinstance(layer, AdaptedLinear)
        layer.adapters = self
        rows, columns = layer.shard_shape
        part = local(layer.weight)
        layer.register_buffer("adapter_a", part.new_zeros(width, columns, dtype=self._dtype), persistent=False)
        layer.register_buffer("adapter_b", part.new_zeros(rows, width, dtype=self._dtype), persistent=False)
        return _Layer(layer, entry, published)

    def _read(self, folder: Path) -> dict[str, _Factors]:
        """Return the checked factors of each published layer that has some."""
        config, tensors = _read_config(folder), _read_tensors(folder)
        shapes = {name: layer.entry.their_shapes[name] for layer in self._layers for name in layer.published}
        modules: dict[str, dict[str, Tensor]] = {}
        unknown = []
        for name, tensor in tensors.items():
            match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
            if match is None or f"{match['module']}.weight" not in shapes:
                unknown.append(name)
            else:
                modules.setdefault(match["module"], {})[match["factor"]] = tensor
        if unknown:
            allowed = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in shapes})
            raise AdapterError(
                f"{folder}: the model has no layer for {_listing(unknown)}; allowed are the layers "
                f"{', '.join(allowed)} of its blocks, not routed experts, embedding or head"
            )
        return {
            f"{module}.weight": self._factors(folder, module, factors, config, shapes[f"{module}.weight"])
            for module, factors in modules.items()
        }

    def _factors(
        self,
        folder: Path,
        module: str,
        factors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        shape: tuple[int, ...],
    ) -> _Factors:
        if len(factors) < 2:
            raise AdapterError(f"{folder}: {module} has only lora_{''.join(factors)}; an adapter needs A and B")
        a, b = factors["A"].float(), factors["B"].float()
        rows, columns = shape
        rank = a.shape[0]
        if a.ndim != 2 or tuple(a.shape) != (rank, columns) or tuple(b.shape) != (rows, rank):
            raise AdapterError(
                f"{folder}: {module} has A {list(a.shape)} and B {list(b.shape)}; the model needs [rank, {columns}] "
                f"and [{rows}, rank]: the adapter is for another model"
            )
        if rank > self.rank:
            raise AdapterError(
                f"{folder}: {module} has rank {rank}; the maximum here is {self.rank}: start with a larger "
                "serve.max_adapter_rank"
            )
        scaled = _Factors(a.to(self._dtype), (b * _scale(config, module, rank)).to(self._dtype))
        if not (scaled.a.isfinite().all() and scaled.b.isfinite().all()):
            raise AdapterError(f"{folder}: {module} has values that are not finite in {self._dtype}; it is damaged")
        return scaled

    @torch.no_grad()
    def _write(self, slot: int, factors: Mapping[str, _Factors]) -> None:
        """Copy an adapter into a slot of every layer; zeros where it has no factors."""
        for layer in self._layers:
            rows, columns = layer.module.slices
            parts, entry = len(layer.published), layer.entry
            a = torch.zeros(parts, self.rank, entry.shape[1], dtype=self._dtype)

            def rows_of_b(name: str, slices: tuple[slice, ...], layer: _Layer = layer) -> Tensor:
                """Rows of a published layer's B, in the columns of its part."""
                start, stop, _ = slices[0].indices(layer.entry.their_shapes[name][0])
                wide = torch.zeros(stop - start, len(layer.published), self.rank, dtype=self._dtype)
                if (own := factors.get(name)) is not None:
                    wide[:, layer.published.index(name), : own.b.shape[1]] = own.b[start:stop]
                return wide

            for part, name in enumerate(layer.published):
                if (own := factors.get(name)) is not None:
                    a[part, : own.a.shape[0]] = own.a
            b = entry.read(rows_of_b, *rows.indices(entry.shape[0])[:2])
            width = (parts, self.slots, self.rank)
            layer.module.adapter_a.unflatten(0, width)[:, slot].copy_(a[..., columns])
            layer.module.adapter_b.unflatten(1, width)[:, :, slot].copy_(b)


def _are_few(x: Tensor) -> bool:
    """Whether the skinny kernels multiply x [tokens, in]."""
    return is_fused(x) and len(x) <= FEW_ROWS


def _linear(model: Decoder, entry: WeightEntry) -> Linear | None:
    """Return the linear layer of a block that an entry fills."""
    path, _, kind = entry.ours.rpartition(".")
    if kind != "weight" or not path.startswith("blocks.") or not model.keeps(entry.ours):
        return None
    module = model.get_submodule(path)
    return module if isinstance(module, Linear) else None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{folder} has no {CONFIG}; give a folder that PEFT's save_pretrained wrote") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise AdapterError(f"{folder}: peft_type is {kind!r}; only LORA is supported")
    if used := [meaning for key, meaning in _REFUSED.items() if config.get(key)]:
        raise AdapterError(f"{folder}: the adapter uses {', '.join(used)}; only plain LoRA is supported: merge it")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{folder}: bias is {config['bias']!r}; it must be none: merge the adapter")
    if config.get("init_lora_weights", True) not in _INITIAL:
        raise AdapterError(
            f"{folder}: init_lora_weights is {config['init_lora_weights']!r}, which changes the base weights; "
            "convert the adapter to plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    if not isinstance(config.get("lora_alpha"), int | float) or not isinstance(config.get("r"), int):
        raise AdapterError(f"{folder / CONFIG} must give r and lora_alpha as numbers")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        hint = " (adapter_model.bin is not read: it can run code)" if (folder / "adapter_model.bin").exists() else ""
        raise AdapterError(f"{folder} has no {WEIGHTS}{hint}")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from None
    if not tensors:
        raise AdapterError(f"{path} holds no tensors")
    return tensors


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or alpha / √rank (rank-stabilized, arXiv:2312.03732); alpha may differ between layers."""
    alpha = float(config["lora_alpha"])
    try:
        for pattern, own in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = float(own)
                break
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise AdapterError(f"alpha_pattern of {CONFIG} cannot be used: {error}") from None
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _listing(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
