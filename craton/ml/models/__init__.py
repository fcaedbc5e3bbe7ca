"""The decoder, its config, and its weights to and from Hugging Face folders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from craton.ml.models.config import DecoderConfig, RoutingConfig
    from craton.ml.models.decoder import Block, Decoder, Stage
    from craton.ml.models.huggingface import (
        config_from_huggingface,
        config_from_shape,
        config_to_huggingface,
        huggingface_family,
        model_folder,
    )
    from craton.ml.models.moe import MoE
    from craton.ml.models.rope import RopeConfig
    from craton.ml.models.model_files import has_weights
    from craton.ml.models.weights import WeightsError, load_weights, save_folder

_HOMES = {
    "Block": "decoder",
    "Decoder": "decoder",
    "DecoderConfig": "config",
    "MoE": "moe",
    "RopeConfig": "rope",
    "RoutingConfig": "config",
    "Stage": "decoder",
    "WeightsError": "weights",
    "config_from_huggingface": "huggingface",
    "config_from_shape": "huggingface",
    "config_to_huggingface": "huggingface",
    "has_weights": "model_files",
    "huggingface_family": "huggingface",
    "load_weights": "weights",
    "model_folder": "huggingface",
    "save_folder": "weights",
}
__all__ = [
    "Block",
    "Decoder",
    "DecoderConfig",
    "MoE",
    "RopeConfig",
    "RoutingConfig",
    "Stage",
    "WeightsError",
    "config_from_huggingface",
    "config_from_shape",
    "config_to_huggingface",
    "has_weights",
    "huggingface_family",
    "load_weights",
    "model_folder",
    "save_folder",
]


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for: a config costs no import of the kernels."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
