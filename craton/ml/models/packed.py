"""Published 4-bit weights: AWQ, GPTQ and compressed-tensors folders, each read as its library defines it.

A module of such a folder has no `weight` but packed codes, scales and perhaps zero points. `PackedWeight` reads them in
one form, rows as outputs: weight = scale · (code - zero point). In place of an open safetensors file it gives the
weight in 16 bits, so whatever loads plain weights can load these.

- AWQ (GEMM layout): `qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]. Nibble i of a word is
  output AWQ_ORDER[i] of its eight.
- GPTQ: `qweight` [in / 8, out], nibble i is input i of its eight; `qzeros` [groups, out / 8], nibble i is output i,
  minus one in the first version of the format; `scales` [groups, out]; `g_idx` [in], the group of each input.
- compressed-tensors (pack-quantized): `weight_packed` [out, in / 8], nibble i is input i; `weight_scale` [out, groups];
  `weight_zero_point` [out / 8, groups], nibble i is output i; `weight_g_idx` [in], -1 where inputs are in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from craton.errors import CratonError
from craton.job import ModelError
from craton.job.model import Int4Format, int4_format
from craton.ml.kernels.serving import MIDDLE_CODE

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLES = 8
_ONES = 0x11111111  # one in each nibble
_CODES = {"awq": ".qweight", "gptq": ".qweight", "compressed-tensors": ".weight_packed"}
_SCALES = (".scales", ".weight_scale")
_OTHERS = {
    "awq": (".qzeros", ".scales"),
    "gptq": (".qzeros", ".scales", ".g_idx"),
    "compressed-tensors": (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
}


class PackedWeightError(CratonError):
    """The tensors of a 4-bit weight do not fit each other or their format."""


@dataclass(frozen=True)
class Groups:
    """The groups of a weight [out, in]."""

    scale: Tensor  # [out, groups]
    zero: Tensor | None  # uint8 [out, groups]; None: all are MIDDLE_CODE
    of_inputs: Tensor | None  # the group of each input, int64 [in]; None: equal runs of inputs, in order


class PackedWeight:
    """A 4-bit weight in the open files of a folder."""

    def __init__(self, module: str, files: Mapping[str, Any], form: Int4Format) -> None:
        self.module, self._files, self._form = module, files, form
        codes = self._shape(_CODES[form.method or "awq"])
        if len(codes) != 2:
            raise PackedWeightError(f"{module} has packed weights of shape {list(codes)}; expected two dimensions")
        rows, columns = codes
        if form.method == "awq":
            self.shape = (columns * _NIBBLES, rows)
        elif form.method == "gptq":
            self.shape = (columns, rows * _NIBBLES)
        else:
            self.shape = self._stated_shape((rows, columns * _NIBBLES))
        groups = self._shape(".weight_scale" if form.method == "compressed-tensors" else ".scales")
        expected = (self.shape[0], groups[-1]) if form.method == "compressed-tensors" else (groups[0], self.shape[0])
        if groups != expected or self.shape[1] % self.num_groups:
            raise PackedWeightError(
                f"{module} has scales of shape {list(groups)}, which do not divide its {self.shape[0]} × "
                f"{self.shape[1]} weights into equal groups; fetch the folder again"
            )

        if form.is_uniform and self.num_groups != self.shape[1] // (form.group or self.shape[1]):
            raise PackedWeightError(
                f"{module} has {self.num_groups} groups of its {self.shape[1]} inputs, but config.json states groups "
                f"of {form.group or 'all inputs'}; fetch the folder again"
            )

    @property
    def parts(self) -> list[str]:
        """The names of the tensors that make the weight."""
        method = self._form.method or "awq"
        return [self.module + kind for kind in (_CODES[method], *_OTHERS[method])]

    @property
    def num_groups(self) -> int:
        groups = self._shape(".weight_scale" if self._form.method == "compressed-tensors" else ".scales")
        return groups[1] if self._form.method == "compressed-tensors" else groups[0]

    def groups(self) -> Groups:
        """Read what the groups have."""
        method = self._form.method
        zero: Tensor | None = None
        if method == "compressed-tensors":
            scale = self._read(".weight_scale")
            if (self._form.has_zero and self._form.is_uniform) or self._has(".weight_zero_point"):
                stored = self._read(".weight_zero_point")
                is_packed = stored.dtype is torch.int32  # not before version 0.9 of compressed-tensors
                zero = (
                    _nibbles(stored.t()).t()[: self.shape[0]]
                    if is_packed
                    else (stored.int() + MIDDLE_CODE).to(torch.uint8)
                )
            order = self._order_of_inputs(".weight_g_idx")
        else:
            scale = self._read(".scales").t()
            stored = self._read(".qzeros")
            if self._form.zero_offset:  # of whole words, as they were subtracted, so that a borrow is undone
                stored = stored + torch.tensor(_ONES, dtype=torch.int32)
            zero = (_from_awq(stored) if method == "awq" else _nibbles(stored)).t()
            order = self._order_of_inputs(".g_idx")
        if zero is not None and zero.shape != scale.shape:
            raise PackedWeightError(
                f"{self.module} has zero points of shape {list(zero.shape)} for scales of shape {list(scale.shape)}; "
                "fetch the folder again"
            )
        if not bool(scale.isfinite().all()):
            raise PackedWeightError(f"{self.module} has scales that are no finite numbers; fetch the folder again")
        if zero is not None and bool((zero == MIDDLE_CODE).all()):
            zero = None
        return Groups(scale.contiguous(), None if zero is None else zero.contiguous(), self._order(order))

    def codes(self, device: torch.device) -> Tensor:
        """Read the codes [out, in] as uint8 on a device."""
        method = self._form.method
        packed = self._read(_CODES[method or "awq"]).to(device)
        if method == "awq":
            return _from_awq(packed).t()
        return _nibbles(packed.t()) if method == "gptq" else _nibbles(packed)[:, : self.shape[1]]

    def dequantized(self) -> Tensor:
        """Read the weight [out, in] in fp32."""
        groups = self.groups()
        size = self.shape[1] // self.num_groups
        of_inputs = groups.of_inputs if groups.of_inputs is not None else torch.arange(self.shape[1]) // size
        zero = MIDDLE_CODE if groups.zero is None else groups.zero.float()[:, of_inputs]
        return (self.codes(torch.device("cpu")).float() - zero) * groups.scale.float()[:, of_inputs]

    def get_slice(self, _: str) -> _Dequantized:
        """Return the weight in place of a slice of a safetensors file."""
        return _Dequantized(self)

    def _order_of_inputs(self, kind: str) -> Tensor | None:
        """Read the group of each input, which a folder grouped by activation must have."""
        is_needed = self._form.by_activation and self._form.is_uniform
        return self._read(kind) if is_needed or self._has(kind) else None

    def _order(self, order: Tensor | None) -> Tensor | None:
        """Return the group of each input; None if they are in order."""
        if order is None or bool((order < 0).any()):
            return None
        in_order = torch.arange(self.shape[1]) // (self.shape[1] // self.num_groups)
        order = order.long()
        if order.shape != in_order.shape or int(order.max()) >= self.num_groups:
            raise PackedWeightError(
                f"{self.module} has group indices of shape {list(order.shape)} up to {int(order.max())} for "
                f"{self.shape[1]} inputs in {self.num_groups} groups; fetch the folder again"
            )
        return None if torch.equal(order, in_order) else order

    def _stated_shape(self, packed: tuple[int, int]) -> tuple[int, int]:
        stated = tuple(self._read(".weight_shape").tolist()) if self._has(".weight_shape") else packed
        if len(stated) != 2 or stated[0] != packed[0] or not packed[1] - _NIBBLES < stated[1] <= packed[1]:
            raise PackedWeightError(
                f"{self.module} has weight_shape {list(stated)}, but its codes are {packed[0]} × {packed[1]}; fetch "
                f"the folder again"
            )
        return stated[0], stated[1]

    def _has(self, kind: str) -> bool:
        return self.module + kind in self._files

    def _shape(self, kind: str) -> tuple[int, ...]:
        if not self._has(kind):
            raise PackedWeightError(f"{self.module} has no tensor {kind[1:]}, which {self._form.method} weights need")
        return tuple(self._files[self.module + kind].get_slice(self.module + kind).get_shape())

    def _read(self, kind: str) -> Tensor:
        if not self._has(kind):
            raise PackedWeightError(f"{self.module} has no tensor {kind[1:]}, which {self._form.method} weights need")
        tensor: Tensor = self._files[self.module + kind].get_tensor(self.module + kind)
        if tensor.is_floating_point() == (kind not in _SCALES):
            raise PackedWeightError(
                f"{self.module}{kind} is {str(tensor.dtype).removeprefix('torch.')}; expected "
                f"{'floating point' if kind in _SCALES else 'integers'}; fetch the folder again"
            )
        return tensor


class _Dequantized:
    """A packed weight in the form of a slice of a safetensors file. It is unpacked at the first access."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight
        self._values: Tensor | None = None

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        if self._values is None:
            self._values = self._weight.dequantized()
        return self._values[slices]


def packed_weights(files: Mapping[str, Any], folder: Path) -> dict[str, PackedWeight]:
    """Return the 4-bit weights among the open files of a folder, by the names that they have in 16 bits.

    ModelError if the folder's config.json states no format that Craton serves."""
    if not any(name.endswith(tuple(_CODES.values())) for name in files):
        return {}
    config = folder / "config.json"
    try:
        form = int4_format(json.loads(config.read_text(encoding="utf-8")), str(config))
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{config} cannot be read, so the format of the 4-bit weights is unknown: {error}") from None
    if form is None or form.method is None:
        raise ModelError(
            f"{config} has no quantization_config, so the format of the 4-bit weights in {folder} is unknown; copy it "
            f"from the quantizer's own file (quantize_config.json, quant_config.json)"
        )
    end = _CODES[form.method]
    modules = [name.removesuffix(end) for name in files if name.endswith(end)]
    return {f"{module}.weight": PackedWeight(module, files, form) for module in modules}


def in_place_of_parts(
    files: Mapping[str, Any], packed: Mapping[str, PackedWeight], expected: Collection[str]
) -> dict[str, Any]:
    """Return the files by name with each packed weight in place of the tensors that it reads. A bias of zeros that the
    model does not have is left out: GPTQ writes one for every layer."""
    result = {**files, **packed}
    for weight in packed.values():
        for part in weight.parts:
            result.pop(part, None)
        bias = f"{weight.module}.bias"
        if bias in result and bias not in expected and not bool(result[bias].get_tensor(bias).any()):
            del result[bias]
    return result


def _nibbles(words: Tensor) -> Tensor:
    """int32 [rows, words] → uint8 [rows, 8 · words], the lowest nibble of a word first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def _from_awq(words: Tensor) -> Tensor:
    """The same in AWQ's order."""
    inverse = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    eight: Tensor = _nibbles(words).unflatten(1, (-1, _NIBBLES))
    return eight[..., inverse].flatten(1)
