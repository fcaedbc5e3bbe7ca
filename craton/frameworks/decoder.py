"""Model parameters beyond its shape that other frameworks need: RoPE, norm epsilon, biases.

They come from the config.json that the shape was read from, or for a preset from the table of Craton's decoder, whose
names are used here. A model written inline gets the values that Craton trains it with.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from craton.job.model import ModelShape, load_config

NORM_EPSILON = 1e-5
HUGGINGFACE_EPSILON = 1e-6  # default of transformers for a config.json without one
_NORMS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def config_of(model: ModelShape) -> dict[str, Any] | None:
    """Return the config.json that the shape was read from, or None if there is none."""
    source = Path(model.source)
    return load_config(source)[0] if source.name == "config.json" and source.is_file() else None


def preset_numbers(model: ModelShape) -> Mapping[str, Any]:
    """Return the preset's entry in the decoder's table; empty if the model is not a preset."""
    return next((numbers for pattern, numbers in _families().items() if fnmatchcase(model.name, pattern)), {})


def norm_epsilon(model: ModelShape) -> float:
    config = config_of(model)
    if config is None:
        return float(preset_numbers(model).get("norm_epsilon", NORM_EPSILON))
    return float(next((config[name] for name in _NORMS if config.get(name)), HUGGINGFACE_EPSILON))


def biases(model: ModelShape) -> tuple[str, ...]:
    """Return the projections that add a bias, out of `qkv`, `output` and `mlp`."""
    config = config_of(model) or {}
    family = config.get("model_type")
    if family in ("gpt2", "gpt_neox"):
        return ("qkv", "output", "mlp")
    if family == "gpt_oss":  # its experts and their router have biases too
        return ("qkv", "output", "mlp") if config.get("attention_bias", True) else ("mlp",)
    if family == "qwen2":
        return ("qkv",)
    attention = ("qkv", "output") if config.get("attention_bias") else ()
    return (*attention, *(("mlp",) if config.get("mlp_bias") else ()))


@cache
def _families() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("craton.ml.models").joinpath("families.toml").read_text(encoding="utf-8"))
