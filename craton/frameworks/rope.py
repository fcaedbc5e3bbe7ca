"""The rotation of a model's positions, as its own decoder has it, in Megatron-LM's arguments.

A model written inline has the usual base, as when Craton trains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton.frameworks.decoder import config_of, preset_numbers
from craton.frameworks.errors import FrameworkError
from craton.job.model import ModelShape

USUAL_BASE = 10_000.0
FAMILY_BASES = {"mixtral": 1_000_000.0}  # whose class in transformers has another default
# What Megatron's --use-rope-scaling has built in; only the factor is an argument.
LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_sequence": 8192}
_NAMES = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence",
}


def megatron_rope(model: ModelShape) -> list[str]:
    """Base and stretching, or a FrameworkError for what Megatron has no word for."""
    rope = _rope_of(model)
    base = float(rope.get("theta", USUAL_BASE))
    if not base.is_integer():
        raise FrameworkError(f"Megatron's --rotary-base is a whole number, and {model.name} has {base:g}")
    words = ["--position-embedding-type", "rope", "--rotary-base", f"{base:.0f}"]
    scaling = rope.get("scaling", "none")
    if scaling == "none":
        return words
    parameters = {name: rope.get(name, usual) for name, usual in LLAMA3.items()}
    if scaling != "llama3" or parameters != LLAMA3 or "factor" not in rope:
        numbers = f" with {parameters}" if scaling == "llama3" else ""
        raise FrameworkError(
            f"{model.name} stretches its rotation as {scaling}{numbers}, and Megatron's arguments only as llama3 with "
            f"{LLAMA3} and a factor; give a model without it, or train this one with kind pretrain"
        )
    return [*words, "--use-rope-scaling", "--rope-scaling-factor", f"{float(rope['factor']):g}"]


def _rope_of(model: ModelShape) -> Mapping[str, Any]:
    """By the names of the decoder's table."""
    config = config_of(model)
    return dict(preset_numbers(model).get("rope", {})) if config is None else _from_huggingface(config, model)


def _from_huggingface(config: Mapping[str, Any], model: ModelShape) -> dict[str, Any]:
    """`rope_parameters`, or `rope_theta` and `rope_scaling` as it was before transformers 5."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise FrameworkError(f"{model.name} turns {partial:g} of a head, which Megatron's arguments here do not cover")
    usual = FAMILY_BASES.get(str(config.get("model_type")), USUAL_BASE)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return {
        "original_sequence": original or LLAMA3["original_sequence"],
        **{_NAMES.get(name, name): value for name, value in parameters.items()},
        "theta": parameters.get("rope_theta") or config.get("rope_theta") or usual,
        "scaling": "none" if kind == "default" else kind,
    }
