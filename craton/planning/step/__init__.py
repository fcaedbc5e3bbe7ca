"""One training step: operators, collectives and FLOPs per rank, composed into seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.step.adapters import adapter_parameters, adapter_weights, trained_share
    from craton.planning.step.composition import TRAINING_STEP, StepTerms, StepTimes, compose, stack
    from craton.planning.step.compute import group_of
    from craton.planning.step.operations import (
        HEAD_CHUNK_BYTES,
        Weight,
        flops_per_token,
        head_chunk_bytes,
        layer_weights,
        table_weights,
    )
    from craton.planning.step.sharding import (
        expert_shards_of,
        gradient_bytes,
        num_layers,
        padded_size,
        shards_of,
        total_size,
    )
    from craton.planning.step.step_inventory import StageInventory, inventory
    from craton.planning.step.training import REAL_IMBALANCE, StepModel, Workload, evaluation_terms, step_terms
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
