"""Post-training: preference learning and RL on the training loop and the serving engine; suites during training.

`python -m craton.ml.posttraining RUN` is one rank of kind dpo or grpo, or of any training that evaluates a suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.posttraining.advantages import completion_advantages, generalized_advantages, has_verdict, whiten
    from craton.ml.posttraining.build import main
    from craton.ml.posttraining.objectives import policy_objective, preference_objective
    from craton.ml.posttraining.reward_model import RewardModel, RewardModelError
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
