"""Training: one loop for any number of ranks; the loss does not depend on the layout, beyond rounding.

`python -m craton.ml.training RUN` is one rank. A user's own objective needs `Batch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.training.batch import Batch
    from craton.ml.training.build import (
        PRETRAINING,
        RankIdentity,
        SetupError,
        build_decoder,
        build_model,
        build_optimizer,
        inputs_of,
        tier_folders,
    )
    from craton.ml.training.loop import Trainer
    from craton.ml.training.lora import LoraLinear, add_adapters, merge_adapters, without_adapters
    from craton.ml.training.objectives import Mean, Objective, Readings, objective_of, token_slope
    from craton.ml.training.optimizer import AdamW, Schedule
    from craton.ml.training.orders import Order
    from craton.ml.training.parts import (
        AttachedSuite,
        Evaluation,
        Parts,
        Recipe,
        StepLoader,
        TrainingInputs,
        TrainingSetup,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
