"""Sections of post-training jobs: preference (dpo), policy, rollout, verify and reward (grpo)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.sections.posttraining.policy import GROUP_LOSSES, Policy, PolicyLoss
    from craton.job.sections.posttraining.preference import Preference, PreferenceLoss
    from craton.job.sections.posttraining.rewards import VERIFIERS, ApiEndpoint, RewardSpec, RewardTerm, VerifySection
    from craton.job.sections.posttraining.rollout import ROLLOUT_KEY_VARIABLE, Rollout
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
