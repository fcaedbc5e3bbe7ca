"""Weights that a Hugging Face folder stores in 4 bits: the `quantization_config` of AWQ, GPTQ and compressed-tensors.

Guarantees: a format is either read exactly as its library defines it, or refused by the key that is not supported.
Layers that the folder leaves in 16 bits are found by their tensors, not by the lists in the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from craton.job.errors import ModelError

Int4Method = Literal["awq", "gptq", "compressed-tensors"]
METHODS: tuple[Int4Method, ...] = ("awq", "gptq", "compressed-tensors")
BITS = 4


@dataclass(frozen=True)
class Int4Format:
    """How 4-bit weights are stored: scale · (code - zero point), with a scale for each group of inputs."""

    method: Int4Method | None  # None: rounded when the model is loaded
    group: int | None  # inputs that share a scale; None: all inputs of an output
    has_zero: bool  # a zero point for each group; without, it is 8
    zero_offset: int = 0  # stored zero points are smaller by this
    by_activation: bool = False  # inputs of a group are not neighbours (desc_act, actorder)
    is_uniform: bool = True  # all layers are stored so; else these are the values that plans use

    def bytes_per_weight(self, inputs: int) -> float:
        """Bytes of a weight in Craton's engine: its code, and its share of a 16-bit scale and an 8-bit zero point."""
        return BITS / 8 + (2 + self.has_zero) / (self.group or inputs)


# Rounded at load. With zero points: the error is 3% (normal weights) to 12% (Student's t, 5 degrees of freedom) smaller
# than with symmetric codes from -8 times the largest weight, for 1.5% more memory (docs/measurements.md).
ROUNDED_AT_LOAD = Int4Format(None, group=128, has_zero=True)


def int4_format(config: Mapping[str, Any], source: str) -> Int4Format | None:
    """Return the 4-bit format of the weights of a config.json; None if it has no quantization_config. ModelError for
    formats that Craton does not serve."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError(f"{source}: quantization_config {stated!r} is not a mapping; give the config of the quantizer")
    keys = _Keys(stated, source)
    method = keys.value("quant_method", METHODS)
    if method == "awq":
        return _awq(keys)
    return _gptq(keys) if method == "gptq" else _compressed_tensors(keys)


def served_int4_format(config: Mapping[str, Any]) -> Int4Format | None:
    """The same, but None for formats that Craton does not serve: their models can be planned."""
    try:
        return int4_format(config, "")
    except ModelError:
        return None


class _Keys:
    """The keys of a quantization_config, or of a part of it; a value that is not supported is an error that names
    it."""

    def __init__(self, stated: Mapping[str, Any], source: str, path: str = "quantization_config") -> None:
        self.stated, self.source, self.path = stated, source, path

    def value(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Return the value of a key, lower case if it is a text."""
        found = self.stated.get(key)
        value = default if found is None else found.lower() if isinstance(found, str) else found
        if value not in allowed or isinstance(value, bool) != any(isinstance(item, bool) for item in allowed):
            raise self.error(key, ", ".join(str(item) for item in allowed))
        return value

    def group(self, key: str) -> int | None:
        """Return the size of groups; None for -1."""
        size = self.stated.get(key)
        if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
            raise self.error(key, "a number of inputs, or -1 for all")
        return None if size == -1 else size

    def absent(self, key: str, reason: str) -> None:
        if self.stated.get(key):
            raise self.error(key, f"none; {reason}")

    def part(self, key: str) -> _Keys:
        """Return the keys of a mapping in it."""
        inner = self.stated.get(key)
        if not isinstance(inner, Mapping):
            raise self.error(key, "a mapping")
        return _Keys(inner, self.source, f"{self.path}.{key}")

    def error(self, key: str, allowed: str) -> ModelError:
        return ModelError(
            f"{self.source}: {self.path}.{key} {self.stated.get(key)!r} is not supported; allowed: {allowed}. Serve "
            f"the model in 16 bits (serve.precision int4 or fp8 quantizes it), or quantize it to 4 bits with AWQ, "
            f"GPTQ or compressed-tensors"
        )


def _awq(keys: _Keys) -> Int4Format:
    """AutoAWQ's keys, and those of its own config file."""
    keys.value("bits" if "bits" in keys.stated else "w_bit", (BITS,), BITS)
    keys.value("format" if "format" in keys.stated else "version", ("gemm",), "gemm")
    keys.value("zero_point", (True,), True)
    return Int4Format("awq", keys.group("group_size" if "group_size" in keys.stated else "q_group_size"), True)


def _gptq(keys: _Keys) -> Int4Format:
    keys.value("bits", (BITS,))
    format_key = "checkpoint_format" if "checkpoint_format" in keys.stated else "format"
    checkpoint = keys.value(format_key, ("gptq", "gptq_v2"), "gptq")
    keys.value("is_marlin_format", (False,), False)
    keys.value("pack_dtype", ("int32",), "int32")
    rules = keys.part("dynamic") if keys.stated.get("dynamic") else None
    for pattern in rules.stated if rules is not None else ():
        if not pattern.startswith("-:") and rules is not None and rules.stated[pattern]:  # "-:": left in 16 bits
            rules.part(pattern).value("bits", (BITS,), BITS)
    has_zero, group = not keys.value("sym", (True, False), True), keys.group("group_size")
    by_activation = bool(keys.stated.get("desc_act")) and group is not None
    is_uniform = rules is None or all(pattern.startswith("-:") for pattern in rules.stated)
    return Int4Format("gptq", group, has_zero, int(checkpoint == "gptq"), by_activation, is_uniform)


def _compressed_tensors(keys: _Keys) -> Int4Format:
    keys.value("format", ("pack-quantized",))
    keys.absent("kv_cache_scheme", "serve.kv_precision: fp8 needs no scales of the checkpoint")
    if keys.stated.get("sparsity_config"):
        keys.part("sparsity_config").value("format", ("dense",), "dense")
    groups = keys.part("config_groups")
    formats = [_scheme(groups.part(name)) for name in groups.stated]
    if not formats:
        raise keys.error("config_groups", "one or more groups of layers")
    # Layers may differ: each is loaded as its tensors say. Plans use the smallest groups.
    sizes = [form.group for form in formats if form.group is not None]
    has_zero, by_activation = any(form.has_zero for form in formats), any(form.by_activation for form in formats)
    is_uniform = all(form == formats[0] for form in formats)
    group = min(sizes, default=None)
    return Int4Format("compressed-tensors", group, has_zero, by_activation=by_activation, is_uniform=is_uniform)


def _scheme(keys: _Keys) -> Int4Format:
    keys.absent("input_activations", "weight-only")
    keys.absent("output_activations", "weight-only")
    keys.value("format", ("pack-quantized",), "pack-quantized")
    weights = keys.part("weights")
    weights.value("num_bits", (BITS,))
    weights.value("type", ("int",), "int")
    strategy = weights.value("strategy", ("group", "channel"))
    has_zero = not weights.value("symmetric", (True, False), True)
    group = weights.group("group_size") if strategy == "group" else None
    by_activation = weights.stated.get("actorder") in ("group", "dynamic", True) and group is not None
    return Int4Format("compressed-tensors", group, has_zero, by_activation=by_activation)
