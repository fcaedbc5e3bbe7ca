"""What the shape of a model does not say and a foreign stack must be told: its rotation, its norms, its biases.

It stands in the config.json that the shape was read from, or for a preset in the table beside Craton's decoder, whose
names are used here. A model written inline has what Craton trains it with.
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
HUGGINGFACE_EPSILON = 1e-6  # of a config.json that does not say it
_NORMS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def config_of(model: ModelShape) -> dict[str, Any] | None:
    """The config.json that the shape was read from; None: it was not."""
    source = Path(model.source)
    return load_config(source)[0] if source.name == "config.json" and source.is_file() else None


def preset_numbers(model: ModelShape) -> Mapping[str, Any]:
    """By the names of the decoder's table; empty for what is no preset."""
    return next((numbers for pattern, numbers in _families().items() if fnmatchcase(model.name, pattern)), {})


def norm_epsilon(model: ModelShape) -> float:
    config = config_of(model)
    if config is None:
        return float(preset_numbers(model).get("norm_epsilon", NORM_EPSILON))
    return float(next((config[name] for name in _NORMS if config.get(name)), HUGGINGFACE_EPSILON))


def biases(model: ModelShape) -> tuple[str, ...]:
    """Which projections add a bias: of `qkv`, `output` and `mlp`."""
    config = config_of(model) or {}
    family = config.get("model_type")
    if family in ("gpt2", "gpt_neox"):
        return ("qkv", "output", "mlp")
    if family == "gpt_oss":  # of its experts and their router too
        return ("qkv", "output", "mlp") if config.get("attention_bias", True) else ("mlp",)
    if family == "qwen2":
        return ("qkv",)
    attention = ("qkv", "output") if config.get("attention_bias") else ()
    return (*attention, *(("mlp",) if config.get("mlp_bias") else ()))


@cache
def _families() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("craton.ml.models").joinpath("families.toml").read_text(encoding="utf-8"))
