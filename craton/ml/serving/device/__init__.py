"""The device side of an engine: weights, KV cache, attention, sampling, CUDA graphs, tensor and expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.device.adapters import Adapters
    from craton.ml.serving.device.drafter import Drafter
    from craton.ml.serving.device.graphs import MAX_DRAFTED
    from craton.ml.serving.device.models import Served, load_named, load_served, stop_tokens_of
    from craton.ml.serving.device.rank import EngineRank
    from craton.ml.serving.device.runner import Runner, StepResult, block_shape
    from craton.ml.serving.device.tensor_parallel_group import TensorParallelGroup, follow
    from craton.ml.serving.device.weight_deltas import SentWeights
    from craton.ml.serving.device.weights import (
        RECEIVE_SECONDS,
        MixedWeightsError,
        WeightsTransfer,
        named_targets,
        send_weights,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
