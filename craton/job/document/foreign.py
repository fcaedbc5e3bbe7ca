"""What other post-training tools (TRL, verl, OpenRLHF) write in a job, and what stands for it here."""

from __future__ import annotations

from craton.job.document.document import Location

# kind of the job → the key of another tool, anywhere in the file → our key. Beside the synonyms of craton.nearest,
# which are of the same section.
_KEYS: dict[object, dict[str, str]] = {
    "dpo": {
        "beta": "preference.beta",
        "loss": "preference.loss",
        "loss_type": "preference.loss",
        "ref_model": "preference.reference",
        "max_length": "data.sequence",
    },
    "grpo": {
        "beta": "policy.kl",
        "init_kl_coef": "policy.kl",
        "kl_coef": "policy.kl",
        "kl_loss_coef": "policy.kl",
        "loss": "policy.loss",
        "loss_type": "policy.loss",
        "ref_model": "policy.reference",
        "reference": "policy.reference",
        "cliprange": "policy.clip",
        "num_iterations": "policy.epochs",
        "num_ppo_epochs": "policy.epochs",
        "ppo_epochs": "policy.epochs",
        "num_generations": "rollout.group",
        "group_size": "rollout.group",
        "max_completion_length": "rollout.max_tokens",
        "max_new_tokens": "rollout.max_tokens",
        "response_length": "rollout.max_tokens",
        "reward_funcs": "reward",
    },
}
_POLICY_LOSSES = ("dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "ppo", "distill")
_PREFERENCE_LOSSES = ("ipo", "simpo", "orpo", "reward")
_ASYNCHRONOUS = "write overlap (beside the trainer) or separate (on servers of their own)"
_VALUES: dict[Location, dict[str, str]] = {
    ("kind",): {
        **{loss: f"write kind: grpo with policy: {{loss: {loss}}}" for loss in _POLICY_LOSSES},
        **{loss: f"write kind: dpo with preference: {{loss: {loss}}}" for loss in _PREFERENCE_LOSSES},
        "reward_model": "write kind: dpo with preference: {loss: reward}",
        "rm": "write kind: dpo with preference: {loss: reward}",
        "rl": "write kind: grpo; policy.loss chooses the algorithm",
        "rlhf": "write kind: dpo with preference: {loss: reward} for the reward model, then kind: grpo with "
        "policy: {loss: ppo}",
    },
    ("rollout", "mode"): dict.fromkeys(("async", "asynchronous"), _ASYNCHRONOUS),
}


def key_here(kind: object, key: str) -> str | None:
    """Return our key for that of another tool in a job of this kind."""
    return _KEYS.get(kind, {}).get(key.lower()) if isinstance(kind, str) else None


def value_here(location: Location, value: object) -> str | None:
    """Return what to write instead of another tool's value."""
    return _VALUES.get(location, {}).get(str(value).lower().replace("-", "_"))
