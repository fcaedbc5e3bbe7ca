"""Serving: an engine with a paged KV cache, and the OpenAI-compatible server in front of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.messages import SEEDS, Alternatives, Grammar, OutputDelta, Sampling, seed_of_copy
    from craton.ml.serving.settings import EngineSettings, ServingError
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
