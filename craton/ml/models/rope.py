"""Rotary position embeddings: the frequencies, their scaling variants, and the tables of cosines and sines.

Frequencies and angles are always fp32. Inside the decoder, heads are always in halves: dimension i rotates with
dimension i + half. Published weights with interleaved pairs are permuted when they are read (`RopeConfig.interleaved`),
so there is only one form of the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from craton.job import ModelError
from craton.ml.collectives import Peers

Scaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]
SCALINGS: tuple[str, ...] = get_args(Scaling)


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotation. Fields that a scaling does not use keep their defaults."""

    theta: float = 10_000.0
    scaling: Scaling = "none"
    factor: float = 1.0  # how many times longer the sequence becomes
    original_sequence: int = 0  # length before scaling; for "dynamic" the length from which scaling starts
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: given instead of derived
    mscale: float = 0.0  # yarn as DeepSeek writes it
    mscale_all_dim: float = 0.0  # yarn as DeepSeek writes it
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    partial_rotary_factor: float = 1.0  # rotated fraction of a head
    interleaved: bool = False  # of the weights in a Hugging Face folder: pairs are adjacent

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any], source: str = "config.json") -> RopeConfig:
        """Read a configuration with `rope_parameters`, or with `rope_theta` and `rope_scaling` in the older format."""
        parameters = _parameters(config, source)
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        scaling = "none" if kind == "default" else kind
        if scaling not in SCALINGS:
            allowed = ", ".join(["default", *SCALINGS[1:]])
            raise ModelError(f"{source}: rope_type {kind!r} is not supported; allowed: {allowed}")
        number = _Numbers(parameters, source)
        theta = number.read("rope_theta", config.get("rope_theta") or 10_000.0)
        partial = number.read("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
        interleaved = bool(config.get("rope_interleave", False))
        longest = int(config.get("max_position_embeddings") or 0)
        if scaling == "none":
            return cls(theta=theta, partial_rotary_factor=partial, interleaved=interleaved)
        original = longest
        if scaling in ("llama3", "yarn"):
            original_length = config.get("original_max_position_embeddings")
            original = int(original_length or parameters.get("original_max_position_embeddings") or longest)
        if scaling != "linear" and original <= 0:
            raise ModelError(
                f"{source}: rope_type {kind!r} needs original_max_position_embeddings or max_position_embeddings"
            )
        ratio = longest / original if scaling == "yarn" else None
        attention_factor = parameters.get("attention_factor")
        return cls(
            theta=theta,
            scaling=cast(Scaling, scaling),
            factor=number.read("factor", ratio),
            original_sequence=0 if scaling == "linear" else original,
            low_frequency_factor=number.read("low_freq_factor", 1.0),
            high_frequency_factor=number.read("high_freq_factor", 4.0),
            beta_fast=number.read("beta_fast", 32.0),
            beta_slow=number.read("beta_slow", 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
            mscale=number.read("mscale", 0.0),
            mscale_all_dim=number.read("mscale_all_dim", 0.0),
            truncate=bool(parameters.get("truncate", True)),
            partial_rotary_factor=partial,
            interleaved=interleaved,
        )

    def to_huggingface(self) -> dict[str, Any]:
        """Return the `rope_parameters` of a configuration, with only the fields that the scaling uses."""
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": self.theta}
        if self.partial_rotary_factor != 1.0:
            parameters["partial_rotary_factor"] = self.partial_rotary_factor
        if self.scaling == "none":
            return parameters
        parameters |= {"rope_type": self.scaling, "factor": self.factor}
        if self.scaling == "llama3":
            parameters |= {
                "low_freq_factor": self.low_frequency_factor,
                "high_freq_factor": self.high_frequency_factor,
                "original_max_position_embeddings": self.original_sequence,
            }
        if self.scaling == "yarn":
            parameters |= {
                "original_max_position_embeddings": self.original_sequence,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "truncate": self.truncate,
            }
            optional = {
                "attention_factor": self.attention_factor,
                "mscale": self.mscale or None,
                "mscale_all_dim": self.mscale_all_dim or None,
            }
            parameters |= {key: value for key, value in optional.items() if value is not None}
        return parameters

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated dimensions of a head; they are the first ones."""
        return int(head_dim * self.partial_rotary_factor)


def rope_tables(
    positions: Tensor,
    head_dim: int,
    config: RopeConfig,
    dtype: torch.dtype = torch.float32,
    context: Peers | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every position, [rows, sequence, rotary_dim / 2], on the device of the positions. `context`:
    the ranks that hold the other positions of these rows."""
    longest = None
    if config.scaling == "dynamic":
        longest = positions.max() + 1
        if context is not None:
            longest = context.sum(longest, "max")
    frequencies = inverse_frequencies(head_dim, config, device=positions.device, longest=longest)
    angles = positions.float().unsqueeze(-1) * frequencies  # [rows, sequence, rotary_dim / 2]
    scale = attention_scale(config)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def inverse_frequencies(
    head_dim: int, config: RopeConfig, device: torch.device | str | None = None, longest: Tensor | None = None
) -> Tensor:
    """Return radians per position of each pair, fp32 [rotary_dim / 2]. `longest`: length in use, for "dynamic"."""
    dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    if config.scaling == "dynamic" and longest is not None:
        return 1.0 / _dynamic_theta(dim, config, longest) ** exponents
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "linear":
        return frequencies / config.factor
    if config.scaling == "llama3":
        return _llama3(frequencies, config)
    if config.scaling == "yarn":
        return _yarn(frequencies, dim, config)
    return frequencies


def attention_scale(config: RopeConfig) -> float:
    """Return the factor of cos and sin: YaRN's temperature (arXiv:2309.00071, section 3.4), else 1."""
    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1, the square root of the temperature; 1 without scaling."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: scale long wavelengths, keep short ones, and blend those in between."""
    fits = config.original_sequence * frequencies / (2 * math.pi)  # turns within the original length
    low, high = config.low_frequency_factor, config.high_frequency_factor
    kept = ((fits - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.factor)


def _yarn(frequencies: Tensor, dim: int, config: RopeConfig) -> Tensor:
    """arXiv:2309.00071, section 3.2: a linear ramp over dimensions from unscaled to scaled frequencies."""

    def dimension_of(turns: float) -> float:
        """Return the dimension that makes this number of turns within the original length."""
        return dim * math.log(config.original_sequence / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device) - low) / width).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / config.factor * stretched


def _dynamic_theta(dim: int, config: RopeConfig, longest: Tensor) -> Tensor:
    """Increase the base with the length in use once it exceeds the original one; no value leaves the device."""
    length = longest.float().clamp(min=config.original_sequence)
    growth = config.factor * length / config.original_sequence - (config.factor - 1)
    grown: Tensor = config.theta * growth ** (dim / (dim - 2))
    return grown


def _parameters(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"{source}: rope parameters must be a mapping, not {parameters!r}")
    by_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    if not by_layer_type:
        return parameters
    if any(other != by_layer_type[0] for other in by_layer_type):
        raise ModelError(f"{source}: rope_parameters that differ by layer type are not supported")
    return by_layer_type[0]


class _Numbers:
    """Numbers of one mapping; a missing or invalid one raises an error with its name."""

    def __init__(self, parameters: Mapping[str, Any], source: str) -> None:
        self.parameters = parameters
        self.source = source

    def read(self, key: str, default: float | None) -> float:
        value = self.parameters.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: rope parameter {key!r} is {value!r}; must be a number")
        return float(value)
