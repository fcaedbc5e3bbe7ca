"""Rules for post-training: which side the other one waits for, and why samples or rewards are wrong."""

from __future__ import annotations

from dataclasses import replace

from craton.formatting import amount, percent, rate
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.symptoms import first_level, level_of, waits_text
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Finding, Symptom, Symptoms
from craton.telemetry import ROLLOUT_PHASES

SENTENCES = {
    "verifier_failing": "the verifiers crash, run into verify.limit or cannot parse the reference",
    "reward_constant": "the reward does not tell good from bad samples: the task is too hard or too easy, or the "
    "verifier always gives the same number",
    "completions_truncated": "completions do not end within rollout.max_tokens, so that no answer is complete",
    "logprob_mismatch": "rollouts and trainer compute different log-probabilities",
    "kl_explosion": "the policy moves too far from its reference",
    "length_explosion": "longer completions are not penalized, or the end token is not learned",
    "entropy_collapse": "the policy explores no more",
    "reward_collapsed": "the policy has become worse, and no other metric explains it",
}
WAITS = {
    "rollout": ("rollouts_slow", "generation is the slow side"),
    "reward": ("verifier_slow", "the verifiers are the slow side"),
    "sync": ("weight_sync_slow", "the transfer of weights is the slow side"),
}


def examine_rollouts(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for number, symptom in enumerate(symptoms.all):
        if symptom.condition == "wrong" and symptom.sign in SENTENCES:
            text = SENTENCES[symptom.sign]
            found = finding(symptoms, symptom.sign, text, ("wrong",), evidence=symptom.evidence, base=1.05)
        elif symptom.condition == "slow" and symptom.phase in ROLLOUT_PHASES:
            found = _waits(snapshot, symptoms, symptom)
        elif symptom.condition == "slow" and symptom.sign == "rollouts_idle":
            text = "training is the slow side: the rollouts wait for its weights"
            found = finding(symptoms, "trainer_slow", text, ("slow",), evidence=symptom.evidence, base=1.0)
        else:
            continue
        findings += [replace(item, symptom=number, lost_share=symptom.lost_share) for item in found]
    return findings


def _waits(snapshot: Snapshot, symptoms: Symptoms, symptom: Symptom) -> list[Finding]:
    """Name the side that a step waits for, and for rollouts, what makes them long."""
    phase = symptom.phase
    cause, text = WAITS[phase]
    evidence = [*symptom.evidence, *filter(None, [waits_text(snapshot, phase)])]
    if phase != "rollout":
        return finding(symptoms, cause, text, ("slow",), evidence=evidence, base=1.0, phases=(phase,))
    tail, tokens = level_of(snapshot, "rollout_tail_share"), level_of(snapshot, "completion_tokens")
    longest, first = level_of(snapshot, "longest_completion_tokens"), first_level(snapshot, "completion_tokens")
    speed = level_of(snapshot, "rollout_tokens_per_second")
    evidence += [f"rollouts generate {rate(speed, 'tokens')}"] if speed is not None else []
    is_uneven = bool(tokens and longest and longest >= threshold("long_tail_ratio") * tokens)
    if (tail is not None and tail >= threshold("rollout_tail_share")) or (tail is None and is_uneven):
        cause, text = "rollout_long_tail", "a few long generations hold up the batch"
        if tail is not None:
            evidence.append(f"{percent(tail)} of the generation time is for less than a tenth of the samples")
        if tokens and longest:
            evidence.append(f"the longest sample has {amount(longest)} tokens, the mean {amount(tokens)}")
    elif tokens and first and tokens >= threshold("grown_length_ratio") * first and not symptom.since_start:
        cause, text = "rollouts_longer", f"completions have grown from {amount(first)} to {amount(tokens)} tokens"
    return finding(symptoms, cause, text, ("slow",), evidence=evidence, base=1.0, phases=("rollout",))
