"""Our objectives against TRL's own loss methods, called with the same log-probabilities: values and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from packed import Packed, log_probs, policy_batch, preference_batch
from test_policy_objectives import MAX_TOKENS, policy
from torch import Tensor

from craton.job.sections.posttraining import Preference, Rollout
from craton.ml.posttraining import completion_advantages, policy_objective, preference_objective
from craton.ml.training import Batch

pytestmark = pytest.mark.slow  # importing TRL takes seconds
trl = pytest.importorskip("trl", reason="TRL is not installed")
TOLERANCE = 1e-6


def fake_trainer(**attributes: Any) -> Any:
    """What a loss method reads of its trainer, on one rank."""
    trainer = MagicMock(**attributes)
    for name in ("gather", "gather_for_metrics", "reduce"):
        getattr(trainer.accelerator, name).side_effect = lambda tensor, **_: tensor
    return trainer


def ours(objective: Any, values: Tensor, batch: Batch) -> Tensor:
    total, _ = objective.function(values, batch)
    return total / objective.count(batch)


def assert_same(mine: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)
    gradients = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (mine, theirs)]
    assert gradients[1].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=0, atol=TOLERANCE)


def their_policy_loss(leaf: Tensor, packed: Packed, loss: str, kl: float, correction: str) -> Tensor:
    """GRPOTrainer's loss; a mode of vLLM gives it the importance weights, which TRL computes before the step."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    padded, mask = packed.padded, packed.mask
    gap = (padded["old_logprob"] - padded["rollout_logprob"]) * mask
    ratio = gap.exp().clamp(max=2.0)
    if correction == "sequence":
        ratio = gap.sum(-1, keepdim=True).exp()
        ratio = ratio.masked_fill(ratio > 2.0, 0.0)
    trainer = fake_trainer()
    trainer.loss_type = {"gspo": "grpo"}.get(loss, loss)
    trainer.importance_sampling_level = "sequence" if loss == "gspo" else "token"
    trainer.beta, trainer.epsilon_low, trainer.epsilon_high = kl, 0.2, 1.3 if loss == "cispo" else 0.3
    trainer.max_completion_length, trainer.top_entropy_quantile = MAX_TOKENS, 1.0
    trainer.off_policy_mask_threshold = trainer.args.delta = None
    trainer.args.use_bias_correction_kl = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = correction != "off"
    trainer.accelerator.num_processes = trainer.current_gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    trainer._get_per_token_logps_and_entropies.return_value = (leaf, torch.zeros_like(leaf), None)
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": padded["advantage"][:, 0],
        "old_per_token_logps": padded["old_logprob"],
        "ref_per_token_logps": padded["reference_logprob"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": mask.sum(),
    }
    found: Tensor = GRPOTrainer._compute_loss(trainer, MagicMock(), inputs)
    return found


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
@pytest.mark.parametrize(("kl", "correction"), [(0.0, "off"), (0.1, "truncated"), (0.1, "sequence")])
def test_policy_losses_are_those_of_grpo_trainer(loss: str, kl: float, correction: str) -> None:
    packed, leaf = policy_batch(has_old=True), log_probs(6, 0.4).requires_grad_()
    clip = [1.0, 0.3] if loss == "cispo" else [0.2, 0.3]  # TRL's bounds the weight above only
    chosen = policy(loss, epochs=2, kl=kl, correction=correction, clip=clip)
    mine = ours(policy_objective(chosen, Rollout(max_tokens=MAX_TOKENS)), packed.pack(leaf), packed.batch)
    assert_same(mine, their_policy_loss(leaf, packed, loss, kl, correction), leaf)


def test_rloo_is_that_of_rloo_trainer() -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer

    packed, leaf = policy_batch(has_old=True), log_probs(6, 0.02).requires_grad_()
    packed.batch.extra["old_logprob"] = packed.pack(log_probs(4, 0.02))
    mask = packed.mask
    trainer = fake_trainer()
    trainer.epsilon_low, trainer.epsilon_high, trainer.aux_loss_enabled = 0.2, 0.3, False
    trainer._get_per_token_logps_and_entropies.return_value = (leaf, torch.zeros_like(leaf), None)
    inputs = {"prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": packed.padded["advantage"][:, 0], "old_logps": (log_probs(4, 0.02) * mask).sum(1)}
    theirs = RLOOTrainer._compute_loss(trainer, MagicMock(), inputs)
    chosen = policy("rloo", epochs=2, correction="off")
    assert_same(ours(policy_objective(chosen, Rollout()), packed.pack(leaf), packed.batch), theirs, leaf)


def padded_pairs(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probabilities [chosen, then rejected; tokens], mask, references of the chosen, of the rejected)."""
    batch, _, pairs = preference_batch()
    slices = [(row, chosen) for row, _, chosen, _ in pairs] + [(row, rejected) for row, _, _, rejected in pairs]
    longest = max(inside.stop - inside.start for _, inside in slices)
    parts = [
        torch.nn.functional.pad(values[row, inside], (0, longest - (inside.stop - inside.start)))
        for row, inside in slices
    ]
    mask = torch.stack([(torch.arange(longest) < inside.stop - inside.start).long() for _, inside in slices])
    reference = torch.stack([batch.extra["reference"][row, slot] for row, slot, *_ in pairs])
    return torch.stack(parts), mask, reference[:, 0], reference[:, 1]


@pytest.mark.parametrize(("loss", "name"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_and_ipo_are_those_of_dpo_trainer(loss: str, name: str) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    batch, values, _ = preference_batch()
    values.requires_grad_()
    padded, mask, chosen, rejected = padded_pairs(values)
    trainer = fake_trainer()
    trainer.aux_loss_enabled, trainer.ld_alpha, trainer.precompute_ref_logps = False, None, True
    trainer.f_divergence_type, trainer.loss_types, trainer.loss_weights = "reverse_kl", [name], [1.0]
    trainer.beta, trainer.use_weighting, trainer.label_smoothing = 0.3, False, 0.0
    completion = torch.cat(
        [torch.zeros_like(mask[:, :1]), mask], dim=1
    )  # of tokens; log-probabilities start at the second
    inputs = {"input_ids": completion, "completion_mask": completion, "attention_mask": completion}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    zeros = torch.zeros_like(padded)
    outputs = SimpleNamespace(log_probs=padded, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    theirs = DPOTrainer._compute_loss(trainer, MagicMock(return_value=outputs), inputs, return_outputs=False)
    mine = ours(preference_objective(Preference.model_validate({"loss": loss, "beta": 0.3})), values, batch)
    assert_same(mine, theirs, values)


def test_simpo_is_that_of_cpo_trainer() -> None:
    from trl.experimental.cpo import CPOTrainer

    batch, values, pairs = preference_batch()
    values.requires_grad_()
    padded, mask, *_ = padded_pairs(values)
    means = (padded * mask).sum(1) / mask.sum(1)
    trainer = fake_trainer()
    trainer.loss_type, trainer.simpo_gamma, trainer.beta = "simpo", 0.7, 2.5
    trainer.label_smoothing = trainer.alpha = 0.0
    trainer.accelerator.device = "cpu"
    losses, *_ = CPOTrainer.cpo_loss(trainer, means[: len(pairs)], means[len(pairs) :])
    preference = Preference.model_validate({"loss": "simpo", "beta": 2.5, "margin": 0.7})
    assert_same(ours(preference_objective(preference), values, batch), losses.mean(), values)


def test_orpo_is_that_of_orpo_trainer() -> None:
    """TRL adds a cross entropy of prompts too; ours, as in the paper, is of the chosen completions."""
    from trl.experimental.orpo import ORPOTrainer

    batch, values, pairs = preference_batch()
    values.requires_grad_()
    padded, mask, *_ = padded_pairs(values)
    means = (padded * mask).sum(1) / mask.sum(1)
    chosen, rejected = means[: len(pairs)], means[len(pairs) :]
    trainer = fake_trainer()
    trainer.beta, trainer.accelerator.device = 0.4, "cpu"
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    theirs = (-chosen - losses).mean()
    preference = Preference.model_validate({"loss": "orpo", "beta": 0.4})
    assert_same(ours(preference_objective(preference), values, batch), theirs, values)


def test_the_reward_loss_is_that_of_reward_trainer() -> None:
    batch, scores, pairs = preference_batch()
    scores.requires_grad_()
    chosen = torch.stack([scores[row, inside.stop - 1] for row, _, inside, _ in pairs])
    rejected = torch.stack([scores[row, inside.stop - 1] for row, _, _, inside in pairs])
    trainer = fake_trainer()
    trainer.args.center_rewards_coefficient, trainer.aux_loss_enabled = None, False
    model = MagicMock(return_value=SimpleNamespace(logits=torch.cat([chosen, rejected]).unsqueeze(-1)))
    inputs = {"input_ids": torch.ones(2, 1), "attention_mask": torch.ones(2, 1)}
    theirs = trl.RewardTrainer.compute_loss(trainer, model, inputs)
    assert_same(ours(preference_objective(Preference(loss="reward")), scores, batch), theirs, scores)


def test_advantages_of_groups_are_those_of_trl() -> None:
    """As GRPOTrainer and RLOOTrainer write them, with TRL's own standard deviation without missing rewards."""
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([[0.3, 1.0, float("nan"), 0.0], [0.5, 2.0, 0.1, 0.9]], dtype=torch.float64)
    known = ~rewards.isnan()
    theirs = (rewards - rewards.nanmean(1, keepdim=True)) / (nanstd(rewards, dim=1).unsqueeze(1) + 1e-4)
    mine = torch.from_numpy(completion_advantages(rewards.numpy(), "grpo"))
    torch.testing.assert_close(mine[known], theirs[known], rtol=0, atol=TOLERANCE)
