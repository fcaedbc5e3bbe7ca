"""The `model:` section: shape, presets, Hugging Face configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.model.huggingface import SCORED, is_reward_model, load_config, model_from_config
    from craton.job.model.presets import model_preset, model_presets
    from craton.job.model.quantization import ROUNDED_AT_LOAD, Int4Format, int4_format
    from craton.job.model.reward_model import chat_folder, check_reward_model
    from craton.job.model.section import (
        ModelNumbers,
        ModelSpec,
        is_function,
        looks_like_path,
        model_shape,
        parse_model,
        run_folder,
        trains_reward_model,
        weights_folder,
    )
    from craton.job.model.shape import MlaShape, ModelShape
    from craton.job.model.vocabulary import vocabulary_mismatch
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
