"""The configuration of a decoder: the shape that the planner counts with, and the few values that change no count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from craton.job.model import ModelShape
from craton.ml.models.rope import RopeConfig


@dataclass(frozen=True)
class RoutingConfig:
    """How tokens choose experts, and how expert load is balanced."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # the chosen weights sum to one
    routed_scale: float = 1.0
    groups: int = 1  # number of expert groups; experts are chosen within `top_groups` of them (DeepSeek)
    top_groups: int = 1
    auxiliary_loss: float = 0.0  # weight of the load-balancing loss (arXiv:2101.03961); 0: off
    bias_update: float = 0.0  # step of the balancing bias (arXiv:2408.15664); 0: off


Heads = Literal["tokens", "score", "both"]


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder. Every count (parameters, FLOPs, bytes) follows from `shape` alone, but for that of a scalar head."""

    shape: ModelShape
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    initializer_range: float = 0.02
    heads: Heads = "tokens"  # score: one number per token, of a reward model; both: a policy with its values

    @property
    def has_token_head(self) -> bool:
        return self.heads != "score"

    @property
    def has_score(self) -> bool:
        return self.heads != "tokens"

    @property
    def has_tied_head(self) -> bool:
        """Whether the embedding is the token head too."""
        return self.shape.tied_embeddings and self.has_token_head
