"""Rules for training health: why losses, gradients, labels or experts are wrong.

A symptom of a curve (`diverged`) is its own cause unless the data, the weights or the learning rate explain it.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from craton.formatting import percent
from craton.observability.diagnosis.rules.findings import finding
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotBadStep
from craton.observability.diagnosis.symptoms import last_bad_step
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Condition, Finding, Symptoms

SENTENCES = {
    "diverged": "training diverges: the loss does not come back",
    "loss_unbounded": "the objective has no lower bound: its sign may be wrong",
    "warmup_too_long": "the warm-up of the learning rate does not end within the run",
    "loss_spike": "the loss spiked and has not recovered",
    "gradient_explosion": "the gradients explode; clipping hides it in the loss for a while",
    "plateau": "nothing that the model learns shows in the loss",
    "labels_masked": "the batches have no labels",
    "steps_skipped": "many steps are skipped as spikes of the loss: the limit is too low for its noise",
    "labels_not_shifted": "the labels are not shifted: each is the token at its own place",
    "weight_decay_high": "the weight decay is far too high for the learning rate",
    "no_gradient": "the objective gives no gradient: nothing is learned",
    "repeated_data": "the data source gives the same few rows again and again",
    "constant_tokens": "the rows of the data source consist of one or two token ids",
    "dead_experts": "the router sends no tokens to some experts",
    "learning_rate_zero": "the learning rate is near zero",
    "overfitting": "the model memorizes its training data",
    "bad_evaluation": "the evaluation gives no number: its data or its average is at fault, not the training",
}
OF_THE_RATE = ("diverged", "loss_spike", "not_a_number", "gradient_explosion", "plateau")
# Origin → bad steps that only one rank shows, before it is named; samples of a data set may meet one rank by chance.
MIN_EXAMINED = {"activations": 3, "objective": 3, "data": 6}
LABEL_STEPS = 30  # recorded steps, at the beginning and now
UNSTABLE = "training is numerically unstable: no GPU or rank stands out"


def examine_training(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for number, symptom in enumerate(symptoms.all):
        if symptom.condition == "wrong" and symptom.sign in SENTENCES:
            cause, text = symptom.sign, SENTENCES[symptom.sign]
            found = finding(symptoms, cause, text, ("wrong",), evidence=symptom.evidence, base=1.05)
            findings += _of_symptom(found, number, symptoms)
        if symptom.sign in OF_THE_RATE:
            findings += _of_symptom(_learning_rate(snapshot, symptoms, symptom.condition), number, symptoms)
        if symptom.sign == "not_a_number":
            findings += _of_symptom(_not_a_number(snapshot, symptoms, symptom.condition), number, symptoms)
    return [*findings, *_lost_labels(snapshot, symptoms)]


def _lost_labels(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Report a share of labels that was steady and fell to a fraction: answers are cut off, or data are sorted."""
    points = snapshot.series.label_share
    shares = [value for _, value in points]
    if len(shares) < 2 * LABEL_STEPS:
        return []
    first, newest = shares[:LABEL_STEPS], max(shares[-LABEL_STEPS:])
    before = statistics.median(first)
    if not newest or min(first) < 0.3 * before or newest > threshold("lost_label_share") * before:
        return []
    text = f"at most {percent(newest)} of the tokens have a label, {percent(before)} had one in the first steps"
    return finding(symptoms, "labels_lost", text, (), base=0.9, is_risk=True)


def _of_symptom(findings: list[Finding], number: int, symptoms: Symptoms) -> list[Finding]:
    """Return the findings as explanations of this symptom: several of one condition have different causes."""
    return [replace(item, symptom=number, lost_share=symptoms.all[number].lost_share) for item in findings]


def _not_a_number(snapshot: Snapshot, symptoms: Symptoms, condition: Condition) -> list[Finding]:
    """Explain numbers that are not finite by where they began, as the ranks found out at the first bad step."""
    bad = [item for item in snapshot.bad_steps if item.is_not_finite]
    last = last_bad_step(snapshot)
    evidence = [*_history(bad), *([f"training ended at step {last.step}: {last.reason}"] if last else [])]
    found = next((item for item in bad if item.place), None)
    if found is None:
        text = f"the first bad step was step {bad[0].step}: {bad[0].reason}" if bad else UNSTABLE
        return finding(symptoms, "not_a_number", text, (condition,), evidence=evidence or [text], base=1.05)
    text = f"at step {found.step} {found.reason}: {found.place}"
    cause = {"data": "nan_in_data", "weights": "nan_in_weights"}.get(found.origin, "not_a_number")
    if found.origin == "objective":
        cause = "objective_not_finite"
    rank = _only_rank(bad)
    if rank is None:
        return finding(symptoms, cause, text, (condition,), evidence=[text, *evidence], base=1.1)
    text += f", only on rank {rank}"
    state = snapshot.rank(rank)
    node = state.node if state is not None else ""
    return finding(symptoms, cause, text, (condition,), evidence=[text, *evidence], node=node, rank=rank, base=1.1)


def _only_rank(bad: list[SnapshotBadStep]) -> int | None:
    """Return the rank that alone went bad in every step that was examined. A few steps may be due to their samples;
    shards of weights and gradients belong to one rank anyway."""
    examined = [item for item in bad if item.place]
    ranks = {item.rank if item.is_alone and item.origin in MIN_EXAMINED else None for item in examined}
    num_steps = len({item.step for item in examined})  # after a restart, a step may go bad again on the same samples
    is_enough = num_steps >= max((MIN_EXAMINED.get(item.origin, 0) for item in examined), default=1)
    return next(iter(ranks)) if len(ranks) == 1 and is_enough else None


def _history(bad: list[SnapshotBadStep]) -> list[str]:
    if not bad:
        return []
    first = bad[0]
    samples = ""
    if first.first_sample is not None and first.last_sample is not None:
        samples = f", samples {first.first_sample:,} to {first.last_sample:,}"
    last = f"; the last one was step {bad[-1].step}" if len(bad) > 1 else ""
    return [f"the first bad step was step {first.step}{samples}: {first.reason}{last}"]


def _learning_rate(snapshot: Snapshot, symptoms: Symptoms, condition: Condition) -> list[Finding]:
    """Blame a learning rate far above what models of this width are trained with."""
    training = snapshot.training
    if training is None or not training.learning_rate or not training.usual_learning_rate:
        return []
    ratio = training.learning_rate / training.usual_learning_rate
    if ratio <= threshold("high_learning_rate_ratio"):
        return []
    text = (
        f"the learning rate of {training.learning_rate:.2g} is {ratio:.0f} times what is usual for this model "
        f"({training.usual_learning_rate:.1g})"
    )
    if any(bad.origin in ("data", "objective") for bad in snapshot.bad_steps):
        return []
    bad = [item for item in snapshot.bad_steps if item.is_not_finite]
    return finding(symptoms, "learning_rate_high", text, (condition,), evidence=[text, *_history(bad)], base=1.2)
