"""Weights in 4 bits: a quarter of the memory of bf16, and a quarter of the bytes that a decode step reads.

The linear layers of the blocks keep packed codes with a scale, and perhaps a zero point, per group of inputs;
activations stay in bf16. They come from a folder in 4 bits (AWQ, GPTQ, compressed-tensors), or are rounded when 16-bit
weights are loaded. Routed experts, the expansion of MLA's latents, embedding, head, norms and routers stay in bf16, and
so does a layer whose groups no kernel supports. New weights in 16 bits are rounded into the same storage (`fill`), so
captured CUDA graphs stay valid.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.formatting import memory
from craton.job.model import ROUNDED_AT_LOAD
from craton.ml.collectives import local, own_slices
from craton.ml.kernels.serving import (
    MIDDLE_CODE,
    Int4Weight,
    int4_gated,
    int4_group,
    int4_linear,
    num_int4_words,
    pack_int4,
    quantize_int4,
)
from craton.ml.models import (
    Decoder,
    Groups,
    Linear,
    Mlp,
    PackedWeight,
    WeightEntry,
    WeightsError,
    load_weights,
    open_packed,
    weight_entries,
)
from craton.ml.serving.device.layers import ServedLinear, ServedMlp

_PLAIN = ".kv_b"  # of MLA: decode may multiply with its transpose, which needs the plain weight
_ROUNDED_AT_ONCE = 1 << 24  # weights: rounding needs several copies of them in fp32


class Int4Error(CratonError):
    """The model or its folder cannot be served in 4 bits."""


class ServedInt4Linear(ServedLinear):
    """A linear layer with a packed weight; with tensor parallelism, this rank's shard of it.

    `weight_order` are the inputs in the order of the columns, where GPTQ grouped them by activation (desc_act)."""

    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_order: Tensor | None
    whole_shape: tuple[int, ...]
    _slices: tuple[slice, ...]
    _columns: int

    @staticmethod
    def convert(layer: Linear, group: int, scale_dtype: torch.dtype, has_zero: bool, has_order: bool = False) -> None:
        """Convert a layer in place, without its weight."""
        layer.__class__ = ServedInt4Linear
        assert isinstance(layer, ServedInt4Linear)
        rows, columns = local(layer.weight).shape
        layer.whole_shape, layer._slices, layer._columns = tuple(layer.weight.shape), own_slices(layer.weight), columns
        device = layer.weight.device
        words = torch.empty(rows, num_int4_words(columns), dtype=torch.int32, device=device)
        layer.weight = nn.Parameter(words, requires_grad=False)
        scale = torch.empty(rows, columns // group, dtype=scale_dtype, device=device)
        zero = torch.empty(scale.shape, dtype=torch.uint8, device=device) if has_zero else None
        order = torch.empty(columns, dtype=torch.int64, device=device) if has_order else None
        for name, tensor in (("scale", scale), ("zero", zero), ("order", order)):
            layer.register_buffer(f"weight_{name}", tensor, persistent=False)

    @property
    def slices(self) -> tuple[slice, ...]:
        return self._slices

    @property
    def shard_shape(self) -> tuple[int, int]:
        return len(self.weight), self._columns

    @property
    def skinny(self) -> None:
        return None

    @property
    def packed(self) -> Int4Weight:
        return Int4Weight(self.weight.detach(), self.weight_scale, self.weight_zero, self._columns)

    def ordered(self, x: Tensor) -> Tensor:
        """x [tokens, in] with the inputs in the order of the columns."""
        return x if self.weight_order is None else x.index_select(1, self.weight_order)

    def product(self, prepared: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        return int4_linear(self.ordered(prepared), self.packed, None if bias is None else local(bias))

    @torch.no_grad()
    def fill(self, name: str, part: Tensor) -> None:
        """Round this rank's shard of a new weight into place, with inputs in order."""
        assert name == "weight"
        weight, step = self.packed, max(1, _ROUNDED_AT_ONCE // self._columns)
        for start in range(0, len(part), step):
            rows = slice(start, start + step)
            matrix = part[rows].to(weight.words.device)
            codes, scale, zero = quantize_int4(matrix, weight.group, weight.scale.dtype, weight.zero is not None)
            weight.words[rows] = pack_int4(codes)
            weight.scale[rows] = scale
            if weight.zero is not None:
                weight.zero[rows] = zero
        if self.weight_order is not None:
            torch.arange(self._columns, out=self.weight_order)

    @torch.no_grad()
    def fill_packed(self, entry: WeightEntry, theirs: Mapping[str, PackedWeight], groups: OwnGroups) -> None:
        """Copy this rank's shard of published codes into place."""
        device = self.weight.device
        codes = {name: weight.codes(device) for name, weight in theirs.items()}
        rows, columns = self.slices
        own = entry.read(lambda name, slices: codes[name][slices], *rows.indices(entry.shape[0])[:2])[:, columns]
        if groups.order is not None and self.weight_order is not None:
            order = groups.order.to(device)
            own = own[:, order]
            self.weight_order.copy_(order)
        self.weight.copy_(pack_int4(own))
        self.weight_scale.copy_(groups.scale)
        if self.weight_zero is not None and groups.zero is not None:
            self.weight_zero.copy_(groups.zero)


class ServedInt4Mlp(ServedMlp):
    """The gated MLP over layers of which some have 4-bit weights; for a few tokens gate and up are one kernel."""

    shares_order = True  # gate and up take their inputs in the same order

    def lift(self, x: Tensor) -> Tensor:
        gate, up = self.gate, self.up
        if isinstance(gate, ServedInt4Linear) and isinstance(up, ServedInt4Linear) and self.shares_order:
            return int4_gated(gate.ordered(x), gate.packed, up.packed)
        return super().lift(x)


@dataclass(frozen=True)
class OwnGroups:
    """The groups of this rank's shard of a layer, in sizes that the kernels support."""

    group: int
    scale: Tensor  # [out, groups]
    zero: Tensor | None  # uint8 [out, groups]
    order: Tensor | None  # the inputs in the order of the columns

    @property
    def structure(self) -> tuple[int, torch.dtype, bool, bool]:
        """What memory is allocated for: the arguments of `ServedInt4Linear.convert`."""
        return self.group, self.scale.dtype, self.zero is not None, self.order is not None


@torch.no_grad()
def round_model(model: Decoder) -> None:
    """Round the weights of the blocks in place, layer by layer; on the meta device, without values. Call it after
    sharding for tensor parallelism and before adding adapters."""
    layers = {name: module for name, module in model.named_modules() if _may_be_packed(name, module)}
    form, dtype = ROUNDED_AT_LOAD, local(model.head_weight).dtype
    assert form.group is not None
    groups: dict[str, int] = {}
    for name, layer in layers.items():
        rows, columns = local(layer.weight).shape
        group = int4_group(form.group, columns)
        if group is None:
            where = " (on one rank)" if columns != layer.weight.shape[1] else ""
            raise Int4Error(
                f"precision int4: {name}.weight is {rows} × {columns}{where}; groups of 16 inputs or more must divide "
                f"{columns}; use another tp, or precision bf16"
            )
        groups[name] = group
    for name, layer in layers.items():
        part = local(layer.weight)
        ServedInt4Linear.convert(layer, groups[name], dtype, form.has_zero)
        if not part.is_meta:
            layer.fill("weight", part)
    _convert_mlps(model)
    _warn_of_experts(model, "are not quantized at load")


def load_packed(model: Decoder, folder: str | Path, device: torch.device) -> Decoder:
    """Load a folder in 4 bits into a model on the meta device, sharded or not. It never exists in 16 bits."""
    taken = _Taken(model)
    with open_packed(folder) as (packed, experts):
        for entry in weight_entries(model.config, experts):
            theirs = {name: packed[name] for name in entry.their_shapes if name in packed}
            if (groups := taken.groups(entry, theirs)) is not None:
                ServedInt4Linear.convert(taken.layer(entry), *groups.structure)  # type: ignore[arg-type]
    _convert_mlps(model)
    model = model.to_empty(device=device)
    load_weights(model, folder, take=taken)
    _compare_orders(model)
    taken.warn()
    return model


def refill_packed(model: Decoder, folder: str | Path) -> None:
    """Load another folder in 4 bits into the storage of a served one. WeightsError, and nothing changes, if its groups
    differ."""
    taken = _Taken(model)
    with open_packed(folder) as (packed, experts):
        for entry in weight_entries(model.config, experts):
            theirs = {name: packed[name] for name in entry.their_shapes if name in packed}
            groups, layer = taken.groups(entry, theirs), taken.layer(entry)
            has = _structure(layer) if isinstance(layer, ServedInt4Linear) else None
            if has is not None and (groups is None or groups.structure != has):
                raise WeightsError(
                    f"{folder}: {entry.ours} is not stored in the groups that are served (group, scale, zero points, "
                    f"order: {has}); give a folder from the same quantizer with the same settings, or one in 16 bits"
                )
    load_weights(model, folder, take=taken)
    _compare_orders(model)


def is_packed(folder: str | Path) -> bool:
    """Whether a folder has weights in 4 bits."""
    with open_packed(folder) as (packed, _):
        return bool(packed)


@dataclass
class _Taken:
    """Fills the layers of a model from the 4-bit weights of a folder, and notes those that are served in bf16."""

    model: Decoder
    plain: dict[str, int] = field(default_factory=dict)  # number of weights

    def __call__(self, entry: WeightEntry, theirs: Mapping[str, PackedWeight]) -> bool:
        layer = self.layer(entry)
        if isinstance(layer, ServedInt4Linear) and (groups := self.groups(entry, theirs)) is not None:
            layer.fill_packed(entry, theirs, groups)
            return True
        self.plain[entry.ours] = torch.Size(entry.shape).numel()
        return False

    def layer(self, entry: WeightEntry) -> nn.Module | None:
        """Return the layer that an entry is the weight of, if that may be in 4 bits."""
        path, _, kind = entry.ours.rpartition(".")
        if kind != "weight" or not self.model.keeps(entry.ours):
            return None
        module = self.model.get_submodule(path)
        return module if _may_be_packed(path, module) or isinstance(module, ServedInt4Linear) else None

    def groups(self, entry: WeightEntry, theirs: Mapping[str, PackedWeight]) -> OwnGroups | None:
        """Return the groups of this rank's shard; None if the layer has none that the kernels support."""
        layer = self.layer(entry)
        if layer is None or len(theirs) < len(entry.their_shapes):
            return None
        assert isinstance(layer, Linear)
        slices = layer.slices if isinstance(layer, ServedInt4Linear) else own_slices(layer.weight)
        return _own_groups(entry, {name: weight.groups() for name, weight in theirs.items()}, slices)

    def warn(self) -> None:
        """Say which 4-bit weights are served in bf16."""
        if not self.plain:
            return
        names, weights = list(self.plain), sum(self.plain.values())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"{', '.join(names[:3])}{more}: stored in 4 bits but served in bf16, {memory(2 * weights)} instead of "
            f"{memory(weights / 2)}: kernels for 4 bits multiply with linear layers of the blocks, not with routed "
            f"experts, MLA's kv_b or the head, and not with groups that q, k and v order differently or that tp splits",
            stacklevel=2,
        )


def _own_groups(entry: WeightEntry, parts: Mapping[str, Groups], slices: tuple[slice, ...]) -> OwnGroups | None:
    first, *others = parts.values()
    for other in others:
        is_alike = first.scale.shape[1] == other.scale.shape[1] and first.scale.dtype == other.scale.dtype
        orders = first.of_inputs, other.of_inputs
        has_order = [order is not None for order in orders]
        if not is_alike or has_order[0] != has_order[1] or (has_order[0] and not torch.equal(*orders)):  # type: ignore[arg-type]
            return None
    inputs = entry.shape[1]
    start, stop, _ = slices[1].indices(inputs)
    size = inputs // first.scale.shape[1]
    order = None
    if first.of_inputs is not None:
        order = first.of_inputs.argsort(stable=True)
        in_order = torch.equal(first.of_inputs[order], torch.arange(inputs) // size)
        if not in_order or stop - start != inputs:  # a shard of the inputs has an unequal number of each group
            return None
    group = int4_group(size, stop - start)
    if group is None:
        return None

    def own(tensors: Mapping[str, Tensor]) -> Tensor:
        whole = entry.read(lambda name, rows: tensors[name][rows], *slices[0].indices(entry.shape[0])[:2])
        return whole.repeat_interleave(size // group, 1)[:, start // group : stop // group].contiguous()

    zero = None
    if any(part.zero is not None for part in parts.values()):
        zeros = {
            name: torch.full(part.scale.shape, MIDDLE_CODE, dtype=torch.uint8) if part.zero is None else part.zero
            for name, part in parts.items()
        }
        zero = own(zeros)
    return OwnGroups(group, own({name: part.scale for name, part in parts.items()}), zero, order)


def _may_be_packed(name: str, module: nn.Module) -> bool:
    return type(module) is Linear and name.startswith("blocks.") and not name.endswith(_PLAIN)


def _structure(layer: ServedInt4Linear) -> tuple[int, torch.dtype, bool, bool]:
    has_zero, has_order = layer.weight_zero is not None, layer.weight_order is not None
    return layer.packed.group, layer.weight_scale.dtype, has_zero, has_order


def _convert_mlps(model: Decoder) -> None:
    for module in model.blocks.modules():
        if type(module) is Mlp and any(isinstance(layer, ServedInt4Linear) for layer in module.children()):
            module.__class__ = ServedInt4Mlp
            for layer in module.children():
                if type(layer) is Linear:
                    layer.__class__ = ServedLinear


def _compare_orders(model: Decoder) -> None:
    for module in model.blocks.modules():
        if isinstance(module, ServedInt4Mlp):
            orders = [getattr(layer, "weight_order", None) for layer in (module.gate, module.up)]
            known = [order for order in orders if order is not None]
            module.shares_order = not known or (len(known) == 2 and torch.equal(*known))


def _warn_of_experts(model: Decoder, what: str) -> None:
    shape = model.config.shape
    if weights := shape.moe_layers * shape.experts * shape.expert_parameters:
        warnings.warn(
            f"precision int4: routed experts {what} and stay in bf16, {memory(2 * weights)}; precision fp8 takes "
            f"{memory(weights)}",
            stacklevel=3,
        )
