"""The decoder, and its weights to and from Hugging Face folders; logits equal those of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.models.attention import Attention
    from craton.ml.models.config import DecoderConfig
    from craton.ml.models.decoder import SCORE, Decoder, Stage, fill_normal
    from craton.ml.models.dispatch import rows_per_expert
    from craton.ml.models.huggingface import config_from_huggingface, config_from_shape, config_of_job, model_folder
    from craton.ml.models.linear import Linear, LowRank, Mlp
    from craton.ml.models.mla import LatentAttention
    from craton.ml.models.moe import Experts, MoE, cut_experts
    from craton.ml.models.packed import Groups, PackedWeight
    from craton.ml.models.rope import rope_tables
    from craton.ml.models.weight_names import WeightEntry, weight_entries
    from craton.ml.models.weights import TakePacked, WeightsError, load_weights, open_packed, save_folder, save_tensors
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
