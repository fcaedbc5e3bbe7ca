"""Checks of the sections of kind grpo against each other."""

from __future__ import annotations

from collections.abc import Sequence

from craton.job.document import KeyConflictError
from craton.job.sections import Train
from craton.job.sections.posttraining import GROUP_LOSSES, ApiEndpoint, Policy, RewardTerm, Rollout

BATCH_KEYS = ("global_batch_tokens", "global_batch_sequences", "tokens")


def check_rollouts(policy: Policy, rollout: Rollout, train: Train, rewards: Sequence[RewardTerm]) -> None:
    """Raise KeyConflictError for the first keys that do not go together."""
    for key in BATCH_KEYS:
        if getattr(train, key) is not None:
            raise KeyConflictError(
                f"train: {key} does not apply to kind grpo, where a step is rollout.prompts x rollout.group samples; "
                "remove it, and give train.steps",
                ("train", key),
                ("kind",),
            )
    if train.on_spike is not None:
        raise KeyConflictError(
            "train: on_spike compares losses, and those of kind grpo say little about a step; remove it",
            ("train", "on_spike"),
            ("kind",),
        )
    if isinstance(policy.teacher, ApiEndpoint) and rollout.temperature != 1.0:
        raise KeyConflictError(
            f"policy: the endpoint of a teacher has log-probabilities at temperature 1, and rollout.temperature is "
            f"{rollout.temperature:g}; use temperature 1, or the teacher's folder",
            ("policy", "teacher"),
            ("rollout", "temperature"),
        )
    if train.steps is None:
        raise KeyConflictError("train: kind grpo needs steps", ("train",))
    if not rewards and policy.loss != "distill" and rollout.environment is None:
        raise KeyConflictError("kind grpo needs `reward:`, or an environment that gives it", ("kind",))
    if rewards and policy.loss == "distill":
        raise KeyConflictError(
            "policy: loss distill learns from its teacher; remove `reward:`", ("reward",), ("policy", "loss")
        )
    if rollout.group == 1 and policy.loss in GROUP_LOSSES:
        raise KeyConflictError(
            f"rollout: loss {policy.loss} compares the completions of a prompt with each other, and group is 1; use 2 "
            "or more, or policy.loss reinforce++ or ppo",
            ("rollout", "group"),
            ("policy", "loss"),
        )
    if rollout.filter == "equal" and (rollout.group == 1 or policy.loss == "distill"):
        raise KeyConflictError(
            "rollout: filter equal compares the rewards of a group; it needs a group of 2 or more, and rewards",
            ("rollout", "filter"),
        )
    if rollout.samples % policy.minibatches:
        raise KeyConflictError(
            f"policy: minibatches {policy.minibatches} does not divide the {rollout.samples:,} samples of a step "
            "(rollout.prompts x rollout.group)",
            ("policy", "minibatches"),
        )
    if rollout.endpoint is not None and policy.correction == "off":
        raise KeyConflictError(
            "policy: a foreign rollout endpoint keeps its own weights, so correction cannot be off; use truncated or "
            "sequence",
            ("policy", "correction"),
            ("rollout", "endpoint"),
        )
