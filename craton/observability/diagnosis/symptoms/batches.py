"""What a training learns from: labels, rows, tokens, experts and the learning rate, by the metrics of its steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from craton.formatting import percent
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Symptom

NEWEST = 5  # steps that must all agree
FEW_LABEL_STEPS = 20  # before the share of steps without labels counts
TINY_VOCABULARY = 16  # of which a row may have two tokens only
WARMUP_SHARE, SMALL_RATE = 0.5, 0.1  # a warm-up of most of the steps, which has only begun
LATE_SHARE = 0.9  # of the steps; after it a learning rate may be near zero


def find_labels(snapshot: Snapshot) -> Symptom | None:
    """Return steps without a single label: nothing can be learned from them."""
    points = snapshot.series.label_share
    shares = [value for _, value in points]
    if len(shares) >= NEWEST and not any(shares[-NEWEST:]):
        since = _since([value == 0.0 for value in shares])
        text = "trains on no label: all labels of its batches are masked"
        return _wrong("labels_masked", text, f"no token has had a label since step {points[since][0]}")
    empty = sum(value == 0.0 for value in shares)
    if len(shares) >= FEW_LABEL_STEPS and empty > threshold("unlabelled_share") * len(shares):
        text = f"trains on no label in {percent(empty / len(shares))} of its steps"
        return _wrong("labels_masked", text, f"{empty} of {len(shares)} recorded steps have no label")
    losses, norms = snapshot.series.loss[-NEWEST:], snapshot.series.gradient_norm[-NEWEST:]
    is_empty = len(losses) == NEWEST and not any(value for _, value in losses)
    if is_empty and len(norms) == NEWEST and not any(value for _, value in norms):
        since = snapshot.series.loss[_since([value == 0.0 for _, value in snapshot.series.loss])][0]
        if not shares:
            text = "has a loss and a gradient of exactly 0: all labels of its batches are masked"
            return _wrong("labels_masked", text, f"the loss has been 0 since step {since}")
        text = "has a loss and a gradient of exactly 0, although its batches have labels"
        return _wrong("no_gradient", text, f"the loss has been 0 since step {since}")
    return None


def find_repeats(snapshot: Snapshot) -> Symptom | None:
    """Return batches that hold the same few rows again and again."""
    shares = [value for _, value in snapshot.series.distinct_row_share]
    if len(shares) < NEWEST:
        return None
    newest = statistics.median(shares[-NEWEST:])
    losses = [value for _, value in snapshot.series.loss if math.isfinite(value)]
    training = snapshot.training
    guess = math.log(training.vocabulary) if training and training.vocabulary else None
    is_entropy = training is not None and training.objective == "cross_entropy"
    level = statistics.median(losses[-NEWEST:]) if losses else None
    is_learned = bool(is_entropy and guess and level is not None and level < threshold("memorized_share") * guess)
    if newest > threshold("few_rows_share") and not (is_learned and newest <= threshold("memorized_rows_share")):
        return None
    text = "trains on the same few samples again and again"
    evidence = [f"{percent(newest)} of the newest rows of rank 0 are distinct"]
    if is_learned:
        evidence.append(f"the loss is {level:.3g}: it has memorized them")
    return _wrong("repeated_data", text, *evidence)


def find_constant_tokens(snapshot: Snapshot) -> Symptom | None:
    """Return rows that hold one or two token ids only."""
    counts = [value for _, value in snapshot.series.distinct_tokens][-NEWEST:]
    training = snapshot.training
    if len(counts) < NEWEST or max(counts) > 2 or training is None:
        return None
    if training.vocabulary is None or training.vocabulary <= TINY_VOCABULARY:
        return None
    text = f"trains on constant tokens: a row has {max(counts):.0f} different token ids"
    return _wrong("constant_tokens", text, text)


def find_copied_labels(snapshot: Snapshot) -> Symptom | None:
    """Return labels that are the tokens themselves: a model learns to copy its input, with a loss that looks good."""
    points, training = snapshot.series.copied_label_share, snapshot.training
    shares = [value for _, value in points][-NEWEST:]
    is_entropy = training is not None and training.objective == "cross_entropy"
    if len(shares) < NEWEST or not is_entropy or min(shares) < threshold("copied_label_share"):
        return None
    since = points[_since([value >= threshold("copied_label_share") for _, value in points])][0]
    text = "learns to copy its input: its labels are the tokens at the same place, not the next ones"
    return _wrong("labels_not_shifted", text, f"all labels have equalled their tokens since step {since}")


def find_weight_decay(snapshot: Snapshot) -> Symptom | None:
    """Return a weight decay that takes more off the weights than they can learn."""
    training = snapshot.training
    if training is None or not training.learning_rate or len(snapshot.series.loss) < NEWEST:
        return None
    share = training.learning_rate * training.weight_decay
    if share < threshold("weight_decay_share"):
        return None
    text = (
        f"loses its weights: a weight decay of {training.weight_decay:g} takes up to {percent(share)} off them per step"
    )
    return _wrong("weight_decay_high", text, f"learning rate {training.learning_rate:.2g} times weight decay")


def find_dead_experts(snapshot: Snapshot) -> Symptom | None:
    """Return experts that get no token, although there are enough tokens for all of them."""
    idle = [value for _, value in snapshot.series.idle_expert_share][-2 * NEWEST :]
    training, layout = snapshot.training, snapshot.run.layout
    if len(idle) < 2 * NEWEST or training is None or training.tokens_per_expert is None:
        return None
    copies = max(1, layout.get("replicate", 1) * layout.get("fsdp", 1) * layout.get("cp", 1))
    step = snapshot.series.idle_expert_share[-1][0]
    share = statistics.median(idle)
    is_collapse = share >= threshold("collapsed_expert_share")
    enough = threshold("collapsed_expert_tokens" if is_collapse else "expert_tokens")
    if training.tokens_per_expert / copies < enough or step <= training.warmup_steps:
        return None
    if share < threshold("idle_expert_share"):
        return None
    text = f"has dead experts: {percent(share)} of them get no token in a step"
    ratios = [value for _, value in snapshot.series.expert_load_ratio][-2 * NEWEST :]
    busiest = [f"the busiest expert gets {statistics.median(ratios):.1f} times the mean"] if ratios else []
    return _wrong("dead_experts", text, text, *busiest)


def find_learning_rate(snapshot: Snapshot) -> Symptom | None:
    """Return a learning rate near zero before the run is near its end."""
    points, training, run = snapshot.series.learning_rate, snapshot.training, snapshot.run
    peak = training.learning_rate if training else None
    rates = [value for _, value in points]
    if not rates:
        return None
    step = points[-1][0]
    warmup = training.warmup_steps if training else 0
    is_long_run = bool(run.steps and run.steps >= threshold("warmup_run_steps"))
    if is_long_run and warmup > WARMUP_SHARE * (run.steps or 0) and peak and rates[-1] < SMALL_RATE * peak:
        text = f"warms up for {warmup:,} of its {run.steps:,} steps, with a learning rate of {rates[-1]:.2g} so far"
        return _wrong("warmup_too_long", text, f"the learning rate is to reach {peak:.2g} at step {warmup:,}")
    if len(rates) < 2 * NEWEST or step <= warmup or (run.steps and step > LATE_SHARE * run.steps):
        return None
    highest = max([*rates, peak or 0.0])
    limit = max(threshold("zero_learning_rate"), threshold("early_rate_share") * highest)
    if max(rates[-2 * NEWEST :]) > limit:
        return None
    since = points[_since([value <= limit for value in rates])][0]
    text = f"trains with a learning rate of {rates[-1]:.2g}, which changes nothing"
    of = f" of {run.steps}" if run.steps else ""
    line = f"the learning rate has been at most {limit:.2g} since step {since}{of}; its highest was {highest:.2g}"
    return _wrong("learning_rate_zero", text, line)


def _wrong(sign: str, text: str, *evidence: str) -> Symptom:
    return Symptom("wrong", text, evidence, lost_share=1.0 if sign in LOSES_ALL else 0.0, sign=sign)


LOSES_ALL = (
    "labels_masked",
    "labels_not_shifted",
    "repeated_data",
    "constant_tokens",
    "learning_rate_zero",
    "weight_decay_high",
)


def _since(bad: Sequence[bool]) -> int:
    """Return the index since which all are bad."""
    good = [index for index, is_bad in enumerate(bad) if not is_bad]
    return min(len(bad) - 1, good[-1] + 1 if good else 0)
