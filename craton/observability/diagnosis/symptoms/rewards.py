"""Post-training that learns nothing or the wrong thing, and the side of it that the other one waits for.

Rewards have no known scale, so that levels are compared with the run's own history. A level is the median of some
steps: single steps of a few prompts vary much.
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from craton.formatting import amount, digits, duration, percent, score
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Symptom
from craton.telemetry import ROLLOUT_PHASES

LEVEL_STEPS = 10  # of a level
SEEN_STEPS = 2 * LEVEL_STEPS  # before a level is compared with an earlier one
SCALE = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
ALTERNATING_SHARE = 0.95  # idle shares of two sides that take turns on the same devices add up to 1
WAITS = {  # phase → what a step waits for
    "rollout": "generated samples",
    "reward": "verdicts on its samples",
    "sync": "the transfer of weights to the rollouts",
}


def find_bad_rewards(snapshot: Snapshot) -> list[Symptom]:
    """Return what is wrong with the samples or the policy of a run of reinforcement learning."""
    if not snapshot.series.results:
        return []
    finders = (_unverified, _without_signal, _mismatch, _kl, _length, _entropy)
    found = [symptom for finder in finders if (symptom := finder(snapshot)) is not None]
    if not found and (collapse := _collapse(snapshot)) is not None:
        found.append(collapse)
    return found


def find_waiting_sides(snapshot: Snapshot, phases: set[str]) -> list[Symptom]:
    """Return phases of rollouts that take far more of the step than planned, and sides that are idle. `phases` have a
    symptom already."""
    symptoms = []
    shares = {phase: _share(snapshot, phase) for phase in ROLLOUT_PHASES}
    for phase in ROLLOUT_PHASES:
        share, planned = shares[phase], _planned_share(snapshot, phase)
        if phase in phases or share is None or (phase == "rollout" and planned is None):
            continue  # generation may take most of a step: only a plan tells what is usual
        if share < max(threshold(f"{phase}_share"), threshold("rollout_plan_ratio") * (planned or 0.0)):
            continue
        against = f" ({percent(planned)} planned)" if planned is not None else ""
        text = f"spends {percent(share)} of every step waiting for {WAITS[phase]}{against}"
        symptoms.append(Symptom("slow", text, (text,), phase=phase, lost_share=share - (planned or 0.0)))
    tail, generation = _level(snapshot, "rollout_tail_share"), shares["rollout"]
    if tail is not None and generation is not None and "rollout" not in phases | {item.phase for item in symptoms}:
        lost = tail * generation
        if tail >= threshold("rollout_tail_share") and lost >= threshold("rollout_tail_step_share"):
            text = f"spends {percent(lost)} of every step on the last tenth of its samples"
            symptoms.append(Symptom("slow", text, (text,), phase="rollout", lost_share=lost))
    idle, waits = _level(snapshot, "rollout_idle_share"), _level(snapshot, "trainer_idle_share")
    if symptoms or phases or (idle or 0.0) + (waits or 0.0) >= ALTERNATING_SHARE:
        return symptoms
    if idle is not None and idle >= threshold("idle_side_share"):
        text = f"leaves its rollouts idle {percent(idle)} of the time"
        symptoms.append(Symptom("slow", text, (text,), phase="compute", lost_share=idle, sign="rollouts_idle"))
    elif waits is not None and waits >= threshold("idle_side_share"):
        phase = max(ROLLOUT_PHASES, key=lambda item: shares[item] or 0.0)
        text = f"leaves its trainer idle {percent(waits)} of the time, mostly for {WAITS[phase]}"
        symptoms.append(Symptom("slow", text, (text,), phase=phase, lost_share=waits))
    return symptoms


def level_of(snapshot: Snapshot, name: str) -> float | None:
    """Return the newest level of a metric of post-training; None if it is not recorded or too new."""
    return _level(snapshot, name)


def first_level(snapshot: Snapshot, name: str) -> float | None:
    values = _values(snapshot, name)
    return statistics.median(values[:LEVEL_STEPS]) if len(values) >= SEEN_STEPS else None


def _unverified(snapshot: Snapshot) -> Symptom | None:
    share = _level(snapshot, "verifier_failure_share")
    if share is None or share < threshold("verifier_failure_share"):
        return None
    text = f"gets no verdict on {percent(share)} of its samples"
    return Symptom("wrong", text, (text,), lost_share=share, sign="verifier_failing")


def _without_signal(snapshot: Snapshot) -> Symptom | None:
    """Return groups whose samples all have the same reward: their advantage is 0, and nothing is learned from them."""
    zero, spread = _level(snapshot, "advantage_zero_share"), _level(snapshot, "reward_std")
    reward = _level(snapshot, "reward")
    is_constant = zero is not None and zero >= threshold("equal_groups_share")
    if zero is None and spread is not None:
        is_constant = spread <= 1e-9
    if not is_constant:
        return None
    share = f"{percent(zero)} of the samples have" if zero is not None else "all samples have"
    evidence = [f"{share} an advantage of 0", f"mean reward {score(reward)}"]
    truncated = _level(snapshot, "truncated_share")
    if truncated is not None and truncated >= threshold("all_truncated_share"):
        text = f"learns nothing: {percent(truncated)} of its samples are cut off, and the rewards are equal"
        return Symptom("wrong", text, (*evidence, text), lost_share=1.0, sign="completions_truncated")
    text = "learns nothing: all samples of a prompt have the same reward"
    return Symptom("wrong", text, tuple(evidence), lost_share=zero or 1.0, sign="reward_constant")


def _mismatch(snapshot: Snapshot) -> Symptom | None:
    """Return rollouts whose log-probabilities are not those of the trainer at the same weights."""
    gap, first = _level(snapshot, "logprob_gap"), first_level(snapshot, "logprob_gap")
    if gap is None:
        return None
    has_grown = first is not None and gap >= threshold("grown_logprob_gap") and gap >= 3.0 * first
    if gap < threshold("logprob_gap") and not has_grown:
        return None
    before = f"; it was {digits(first)} in the first steps" if has_grown else ""
    text = "samples from another distribution than the one it trains"
    evidence = [f"rollout and trainer differ by {digits(gap)} in log p per token{before}"]
    k3, corrected = _level(snapshot, "logprob_k3"), _level(snapshot, "corrected_share")
    evidence += [f"k3 divergence {digits(k3)}"] if k3 is not None else []
    evidence += [f"{percent(corrected)} of the tokens are corrected"] if corrected else []
    return Symptom("wrong", text, tuple(evidence), lost_share=1.0, sign="logprob_mismatch")


def _kl(snapshot: Snapshot) -> Symptom | None:
    points = snapshot.series.results.get("kl", ())
    newest = [value for _, value in points[-3:]]
    if len(newest) == 3 and all(not math.isfinite(value) for value in newest):
        text = "has a KL divergence from its reference that is NaN or Inf"
        return Symptom("wrong", text, (text,), lost_share=1.0, sign="kl_explosion")
    level, values = _level(snapshot, "kl"), _values(snapshot, "kl")
    if level is None or len(values) < SEEN_STEPS:
        return None
    usual = statistics.median(values[: len(values) // 2])
    if level < threshold("high_kl") or level < threshold("high_kl_ratio") * usual:
        return None
    text = f"has left its reference: a KL divergence of {digits(level)} per token"
    before = f"it was {digits(usual)} in the first half of the run"
    return Symptom("wrong", text, (text, before), lost_share=1.0, sign="kl_explosion")


def _length(snapshot: Snapshot) -> Symptom | None:
    """Return completions that have grown until most are cut off, without a better reward."""
    now, first = _level(snapshot, "completion_tokens"), first_level(snapshot, "completion_tokens")
    truncated, before = _level(snapshot, "truncated_share"), first_level(snapshot, "truncated_share")
    if now is None or first is None or truncated is None or before is None:
        return None
    has_grown = now >= threshold("grown_length_ratio") * first and truncated >= threshold("long_truncated_share")
    if not has_grown or truncated < 2.0 * before or _is_at_its_best(snapshot):
        return None
    text = f"writes ever longer: {amount(now)} tokens per sample, {percent(truncated)} of them cut off"
    evidence = (text, f"{amount(first)} tokens in the first steps")
    return Symptom("wrong", text, evidence, lost_share=truncated, sign="length_explosion")


def _entropy(snapshot: Snapshot) -> Symptom | None:
    """Return a policy that writes the same text again and again, although its reward is not at its best."""
    now, first = _level(snapshot, "entropy"), first_level(snapshot, "entropy")
    if now is None or first is None or now > threshold("collapsed_entropy"):
        return None
    if now > threshold("collapsed_entropy_ratio") * first or _is_at_its_best(snapshot):
        return None
    text = f"has lost its variety: an entropy of {digits(now)} nats per token"
    evidence = [text, f"it was {digits(first)} in the first steps"]
    zero = _level(snapshot, "advantage_zero_share")
    evidence += [f"{percent(zero)} of the samples have an advantage of 0"] if zero else []
    return Symptom("wrong", text, tuple(evidence), lost_share=1.0, sign="entropy_collapse")


def _collapse(snapshot: Snapshot) -> Symptom | None:
    """Return a reward that was clearly better before."""
    values = _values(snapshot, "reward")
    if len(values) < SEEN_STEPS + LEVEL_STEPS:
        return None
    levels = _levels(values)
    best, now = max(levels), levels[-1]
    changes = [abs(after - before) for before, after in pairwise(values)]
    noise = SCALE * statistics.median(changes) / math.sqrt(2.0)
    gained = best - levels[0]
    if best - now < threshold("reward_spreads") * max(noise, 1e-9):
        return None
    if best - now < threshold("lost_reward_share") * max(abs(best), gained):
        return None
    step = snapshot.series.results["reward"][-1][0]
    text = f"has unlearned: its reward fell from {score(best)} to {score(now)}"
    return Symptom("wrong", text, (text, f"at step {step}"), lost_share=1.0, sign="reward_collapsed")


def _is_at_its_best(snapshot: Snapshot) -> bool:
    """Whether the reward is about as high as it ever was, and higher than at the beginning."""
    values = _values(snapshot, "reward")
    if len(values) < SEEN_STEPS:
        return True
    levels = _levels(values)
    spread = max(levels) - min(levels)
    return levels[-1] > levels[0] and levels[-1] >= max(levels) - 0.2 * spread


def _share(snapshot: Snapshot, phase: str) -> float | None:
    """Return the share of the newest steps that a phase takes, on the median rank."""
    shares = [
        rank.recent[phase] / rank.recent["step"]
        for rank in snapshot.ranks
        if rank.num_recent >= threshold("few_steps") and phase in rank.recent and rank.recent.get("step")
    ]
    return statistics.median(shares) if shares else None


def _planned_share(snapshot: Snapshot, phase: str) -> float | None:
    plan = snapshot.run.plan
    step, seconds = plan.get("step_seconds"), plan.get(f"{phase}_seconds")
    return seconds / step if step and seconds is not None else None


def _values(snapshot: Snapshot, name: str) -> list[float]:
    return [value for _, value in snapshot.series.results.get(name, ()) if math.isfinite(value)]


def _level(snapshot: Snapshot, name: str) -> float | None:
    values = _values(snapshot, name)
    return statistics.median(values[-LEVEL_STEPS:]) if len(values) >= LEVEL_STEPS else None


def _levels(values: list[float]) -> list[float]:
    """Return the levels of the run, oldest first; the last one is the newest."""
    ends = range(len(values), LEVEL_STEPS - 1, -LEVEL_STEPS)
    return [statistics.median(values[end - LEVEL_STEPS : end]) for end in ends][::-1]


def waits_text(snapshot: Snapshot, phase: str) -> str:
    """Return `a step waits 12.1 s for verdicts on its samples`."""
    seconds = [rank.recent[phase] for rank in snapshot.ranks if phase in rank.recent]
    return f"a step waits {duration(statistics.median(seconds))} for {WAITS[phase]}" if seconds else ""
