"""The objectives of post-training: functions of the log-probabilities of a batch and its extras.

Preference losses compare the two completions of a pair: they sum over sequences, over all pieces of a row under context
parallelism, and count pairs. Policy losses have one term per generated token. Where a term reads its token alone, the
objective has a slope, and its gradients are computed in the forward pass of the head.

Sources: DPO arXiv:2305.18290, IPO 2310.12036, SimPO 2405.14734, ORPO 2403.07691, GRPO 2402.03300, DAPO 2503.14476,
Dr. GRPO 2503.20783, RLOO 2402.14740, REINFORCE++ 2501.03262, GSPO 2507.18071, CISPO 2506.13585, PPO 1707.06347,
k3 http://joschu.net/blog/kl-approx.html, on-policy distillation 2306.13649.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from craton.job.sections.posttraining import Policy, Preference, Rollout
from craton.ml.collectives import sum_over
from craton.ml.training import Batch, Mean, Objective, token_slope

MAX_CORRECTION = 2.0  # of the importance weights between rollout and trainer
MAX_LOG_PROB = -1e-6  # ORPO: the odds of a certain sequence are infinite

SEQUENCE_MEANS = ("grpo", "gspo", "rloo")  # mean over sequences of a sequence's mean; the others: mean over tokens
SEQUENCE_RATIOS = ("gspo", "rloo")  # the ratio of a whole sequence, so that every token reads all others


# preference


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, each tensor [rows, pairs]; a row may have fewer pairs than slots."""

    chosen: Tensor  # log p of the completions, or their scores
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    exists: Tensor  # 1 or 0

    @classmethod
    def of(cls, values: Tensor, batch: Batch) -> Pairs:
        """Sum token values over the completions of each pair."""
        reference = batch.extra["reference"].to(values.dtype)
        slots = reference.shape[1]
        chosen, rejected = _pair_sums(values, batch, slots)
        chosen_tokens, rejected_tokens = (sums.clamp(min=1.0) for sums in _pair_sums(batch.weight, batch, slots))
        exists, _ = _pair_sums(batch.extra["pair_start"], batch, slots)
        return cls(chosen, rejected, chosen_tokens, rejected_tokens, reference[..., 0], reference[..., 1], exists)


PreferenceTerms = tuple[Tensor, Tensor, Tensor]  # loss, reward of the chosen, of the rejected completion


def dpo(pairs: Pairs, beta: float) -> PreferenceTerms:
    """-log σ(β · (log-ratio of the chosen - log-ratio of the rejected))."""
    chosen = beta * (pairs.chosen - pairs.reference_chosen)
    rejected = beta * (pairs.rejected - pairs.reference_rejected)
    return -logsigmoid(chosen - rejected), chosen, rejected


def ipo(pairs: Pairs, beta: float) -> PreferenceTerms:
    """(difference of the log-ratios per token - 1 / 2β)². Means over tokens make β independent of the lengths."""
    chosen = (pairs.chosen - pairs.reference_chosen) / pairs.chosen_tokens
    rejected = (pairs.rejected - pairs.reference_rejected) / pairs.rejected_tokens
    return (chosen - rejected - 1 / (2 * beta)).square(), beta * chosen, beta * rejected


def simpo(pairs: Pairs, beta: float, margin: float) -> PreferenceTerms:
    """-log σ(β · difference of the mean log-probabilities - γ)."""
    chosen, rejected = beta * pairs.chosen / pairs.chosen_tokens, beta * pairs.rejected / pairs.rejected_tokens
    return -logsigmoid(chosen - rejected - margin), chosen, rejected


def orpo(pairs: Pairs, beta: float) -> PreferenceTerms:
    """-mean log p of the chosen - β · log σ(log of the odds ratio), odds(p) = p / (1 - p) of the mean log p."""
    exists = pairs.exists > 0
    chosen = torch.where(exists, pairs.chosen / pairs.chosen_tokens, -1.0).clamp(max=MAX_LOG_PROB)
    rejected = torch.where(exists, pairs.rejected / pairs.rejected_tokens, -1.0).clamp(max=MAX_LOG_PROB)
    log_odds = chosen - rejected - (_log_1m_exp(chosen) - _log_1m_exp(rejected))
    return -chosen - beta * logsigmoid(log_odds), beta * chosen, beta * rejected


def bradley_terry(pairs: Pairs) -> PreferenceTerms:
    """-log σ(score of the chosen - score of the rejected)."""
    return -logsigmoid(pairs.chosen - pairs.rejected), pairs.chosen, pairs.rejected


def preference_objective(preference: Preference) -> Objective:
    """Return the objective of kind dpo. It counts pairs; loss reward reads the scores at the last tokens."""
    terms_of: dict[str, Callable[[Pairs], PreferenceTerms]] = {
        "dpo": partial(dpo, beta=preference.scale),
        "ipo": partial(ipo, beta=preference.scale),
        "simpo": partial(simpo, beta=preference.scale, margin=preference.target_margin),
        "orpo": partial(orpo, beta=preference.scale),
        "reward": bradley_terry,
    }
    reads_scores = preference.loss == "reward"

    def function(values: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = Pairs.of(values * (batch.extra["last"] if reads_scores else batch.weight), batch)
        losses, chosen, rejected = terms_of[preference.loss](pairs)
        # every context-parallel rank has the sums of whole pairs, and counts its share
        share = pairs.exists / (1 if batch.context is None else batch.context.size)
        report = {
            "chosen_reward": (share * chosen).sum(),
            "rejected_reward": (share * rejected).sum(),
            "reward_margin": (share * (chosen - rejected)).sum(),
            "reward_accuracy": (share * (chosen > rejected)).sum(),
        }
        return (share * losses).sum(), report

    return Objective(preference.loss, function, count=_pair_count, reads="scores" if reads_scores else "log_probs")


def _pair_count(batch: Batch) -> Tensor:
    return batch.extra["pair_start"].sum()


def _pair_sums(values: Tensor, batch: Batch, slots: int) -> tuple[Tensor, Tensor]:
    """[rows, sequence] → two of [rows, slots]: sums over the chosen and over the rejected completion of each pair."""
    side = batch.extra["side"]
    index = (2 * batch.extra["pair"] + (side < 0)).clamp(min=0)
    sums = values.new_zeros(len(values), 2 * slots).scatter_add(1, index, values * (side != 0))
    chosen, rejected = sum_over(sums, batch.context).view(-1, slots, 2).unbind(-1)
    return chosen, rejected


def _log_1m_exp(x: Tensor) -> Tensor:
    """log(1 - exp x) for x < 0, exact at both ends (Mächler 2012)."""
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


# policy


@dataclass(frozen=True)
class PolicyTerms:
    """Per token [rows, sequence]: what a policy loss is made of."""

    losses: Tensor  # before the importance correction and the KL penalty
    is_clipped: Tensor


PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, tuple[float, float]], PolicyTerms]


def clipped_policy(log_probs: Tensor, log_ratio: Tensor, advantage: Tensor, clip: tuple[float, float]) -> PolicyTerms:
    """-min(r · A, clip(r, 1 - low, 1 + high) · A): PPO, GRPO and what follows them; r of a token or of a sequence."""
    low, high = clip
    ratio = log_ratio.exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    is_clipped = ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
    return PolicyTerms(losses, is_clipped)


def cispo(log_probs: Tensor, log_ratio: Tensor, advantage: Tensor, clip: tuple[float, float]) -> PolicyTerms:
    """-sg(clip(r)) · A · log p: a clipped weight, but every token keeps its gradient."""
    low, high = clip
    ratio = log_ratio.detach().exp()
    is_clipped = (ratio < 1 - low) | (ratio > 1 + high)
    return PolicyTerms(-ratio.clamp(1 - low, 1 + high) * advantage * log_probs, is_clipped)


def policy_loss(log_probs: Tensor, batch: Batch, policy: Policy) -> tuple[Tensor, dict[str, Tensor | Mean]]:
    """Σ share · (correction · policy term + kl · k3), and its metrics. All losses but ppo's value loss."""
    extra, weight = batch.extra, batch.weight
    old = extra.get("old_logprob", log_probs.detach())
    log_ratio = _masked(log_probs - old, weight)
    if policy.loss in SEQUENCE_RATIOS:
        log_ratio = _over_sequence(log_ratio, batch, is_mean=policy.loss == "gspo")
    if policy.loss == "distill":  # reverse KL: its policy gradient has the advantage log p(teacher) - log p
        advantage = _masked(extra["teacher_logprob"] - log_probs.detach(), weight)
    else:
        advantage = extra["advantage"]
    terms = (cispo if policy.loss == "cispo" else clipped_policy)(log_probs, log_ratio, advantage, policy.clip_range)
    gap = _masked(old - extra["rollout_logprob"], weight)
    correction, is_corrected = _correction(gap, batch, policy.correction)
    losses = correction * terms.losses
    tokens = {"logprob_gap": gap.abs(), "logprob_k3": gap.expm1() - gap, "corrected_share": is_corrected}
    tokens |= {"clipped_share": terms.is_clipped, "entropy": -log_probs}
    if policy.loss == "distill":
        tokens["kl"] = -advantage
    if policy.kl:
        behind = _masked(extra["reference_logprob"] - log_probs, weight)
        tokens["kl"] = behind.expm1() - behind  # k3 ≥ 0
        losses = losses + policy.kl * tokens["kl"]
    report = {name: Mean((weight * value).sum(), weight.sum()) for name, value in tokens.items()}
    return (token_shares(batch, policy.loss) * losses).sum(), report  # type: ignore[return-value]


def value_loss(values: Tensor, batch: Batch, clip: float) -> Tensor:
    """½ · max((V - R)², (V clipped around its old value - R)²), per token."""
    old, target = batch.extra["old_value"], batch.extra["return_"]
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - target).square(), (near - target).square())


def ppo_loss(
    log_probs: Tensor, batch: Batch, values: Tensor, policy: Policy
) -> tuple[Tensor, dict[str, Tensor | Mean]]:
    """The clipped policy loss plus that of the value head, clipped as far as the policy's ratio may rise."""
    total, report = policy_loss(log_probs, batch, policy)
    of_values = (batch.weight * value_loss(values, batch, policy.clip_range[1])).sum()
    return total + policy.value_weight * of_values, {**report, "value_loss": of_values}


def policy_objective(policy: Policy, rollout: Rollout, max_tokens: int | None = None) -> Objective:
    """Return the objective of kind grpo. `max_tokens` is the length that dr_grpo divides by; default: the rollout's."""
    is_ppo = policy.loss == "ppo"
    # without old log-probabilities the correction of a sequence reads the current ones of all its tokens
    reads_sequence = policy.loss in SEQUENCE_RATIOS or (policy.correction == "sequence" and policy.updates == 1)
    token_function = partial(policy_loss, policy=policy)
    length = max_tokens or rollout.max_tokens
    assert length is not None or policy.loss != "dr_grpo", "dr_grpo divides by the maximum length of a completion"
    return Objective(
        policy.loss,
        partial(ppo_loss, policy=policy) if is_ppo else token_function,
        slope=None if reads_sequence else token_slope(token_function),
        count=partial(policy_count, loss=policy.loss, max_tokens=length or 1),
        reads="both" if is_ppo else "log_probs",
        temperature=rollout.temperature,
        entropy=policy.entropy,
        entropy_weight=partial(token_shares, loss=policy.loss),
    )


def policy_count(batch: Batch, loss: str, max_tokens: int) -> Tensor:
    """Sequences for means over sequences, tokens for means over tokens, and for dr_grpo what sequences of the maximum
    length would have: a constant, so that long completions are not favoured."""
    if loss in SEQUENCE_MEANS:
        return batch.extra["sequence_start"].sum()
    return batch.extra["sequence_start"].sum() * max_tokens if loss == "dr_grpo" else batch.weight.sum()


def token_shares(batch: Batch, loss: str) -> Tensor:
    """The weight of each token in the sum that `policy_count` divides."""
    if loss not in SEQUENCE_MEANS:
        return batch.weight
    tokens = batch.extra["sequence_tokens"].gather(1, _sequence_index(batch))
    return batch.weight / tokens.clamp(min=1.0)


def _correction(gap: Tensor, batch: Batch, kind: str) -> tuple[Tensor, Tensor]:
    """(importance weights p(trainer) / p(rollout), which of them were cut). `truncated`: of each token, at most
    MAX_CORRECTION. `sequence`: of the whole sequence, which is rejected above MAX_CORRECTION."""
    if kind == "off":
        return torch.ones_like(gap), torch.zeros_like(gap)
    ratio = (gap if kind == "truncated" else _over_sequence(gap, batch, is_mean=False)).exp()
    is_cut = ratio > MAX_CORRECTION
    kept = ratio.clamp(max=MAX_CORRECTION) if kind == "truncated" else torch.where(is_cut, 0.0, ratio)
    return kept, is_cut.to(gap.dtype)


def _over_sequence(values: Tensor, batch: Batch, is_mean: bool) -> Tensor:
    """The weighted sum or mean over each sequence, at each of its tokens."""
    index, tokens = _sequence_index(batch), batch.extra["sequence_tokens"]
    is_inside = batch.extra["sequence"] >= 0
    sums = values.new_zeros(tokens.shape).scatter_add(1, index, values * batch.weight * is_inside)
    sums = sum_over(sums, batch.context)
    return (sums / tokens.clamp(min=1.0) if is_mean else sums).gather(1, index)


def _sequence_index(batch: Batch) -> Tensor:
    return batch.extra["sequence"].clamp(min=0)


def _masked(values: Tensor, weight: Tensor) -> Tensor:
    """0 where a token has no weight: its extras mean nothing, and an infinite ratio times 0 is NaN."""
    return torch.where(weight != 0, values, 0.0)
