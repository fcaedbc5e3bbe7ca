"""Parallelism of a model: device mesh, tensor parallelism, pipeline parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.training.parallel.mesh import accumulate_gradients, make_ranks, parallelize, parameter_dtype
    from craton.ml.training.parallel.pipeline import Pipeline
    from craton.ml.training.parallel.ranks import Ranks
    from craton.ml.training.parallel.tensor import cut_parameters, sum_uncut_gradients
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
