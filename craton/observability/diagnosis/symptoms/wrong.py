"""Wrong results: a rank that computes other values, and trainings that learn nothing, or the wrong thing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from craton.observability.diagnosis.snapshot import Snapshot, SnapshotBadStep, SnapshotRank
from craton.observability.diagnosis.symptoms.batches import (
    find_constant_tokens,
    find_copied_labels,
    find_dead_experts,
    find_labels,
    find_learning_rate,
    find_repeats,
    find_weight_decay,
)
from craton.observability.diagnosis.symptoms.losses import (
    NEWEST_LOSSES,
    find_bad_evaluation,
    find_gradient_explosion,
    find_loss_trouble,
    find_overfitting,
)
from craton.observability.diagnosis.symptoms.naming import nodes_of
from craton.observability.diagnosis.symptoms.rewards import find_bad_rewards
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import FAILING, Symptom

MIN_STEPS = 30  # before a share of them means anything


def find_wrong(snapshot: Snapshot) -> list[Symptom]:
    result = []
    ranks = _odd_ranks(snapshot)
    if ranks:
        names = ", ".join(str(rank.rank) for rank in ranks)
        text = f"computes different values on rank {names} than on the other ranks"
        result.append(
            Symptom(
                "wrong",
                text,
                tuple(_oddity(rank) for rank in ranks),
                tuple(rank.rank for rank in ranks),
                nodes_of(ranks),
                lost_share=1.0,
                sign="odd_rank",
            )
        )
    serving = snapshot.serving
    if (
        serving is not None
        and serving.num_ended
        and serving.num_failed > max(threshold("failed_requests"), threshold("failed_share") * serving.num_ended)
    ):
        text = f"fails {serving.num_failed} of the last {serving.num_ended} requests"
        result.append(Symptom("wrong", text, (text,), lost_share=serving.num_failed / serving.num_ended, sign=FAILING))
    bad = find_not_a_number(snapshot)
    if bad is not None:
        return [*result, bad]
    rewards = find_bad_rewards(snapshot)
    if rewards:  # without a signal the loss is 0, and so are its gradients
        return [*result, *rewards]
    # Masked labels and repeated rows explain what the loss does: they come first, and alone.
    data = [finder(snapshot) for finder in (find_labels, find_repeats, find_constant_tokens, find_learning_rate)]
    if not any(data):  # rows of one token, too, have labels that equal it
        data = [find_copied_labels(snapshot), find_weight_decay(snapshot)]
    of_data = [symptom for symptom in data if symptom is not None]
    if of_data:
        return [*result, *of_data]
    finders = (find_loss_trouble, find_dead_experts, find_overfitting, find_bad_evaluation)
    curves = [finder(snapshot) for finder in finders]
    if "reward" in snapshot.series.results:  # the loss of a policy has no level to come down to
        curves[0] = None
    if curves[0] is None:
        curves[:1] = [find_gradient_explosion(snapshot), find_skipped_steps(snapshot)]
    return [*result, *(symptom for symptom in curves if symptom is not None)]


def find_not_a_number(snapshot: Snapshot) -> Symptom | None:
    """Return a loss or a gradient that is not finite: in the newest steps, or again and again."""
    series = snapshot.series
    names = [("loss", series.loss)]
    # A norm that was never finite was not computed (`train.clip: 0`), unless the ranks reported it as a fault.
    if snapshot.bad_steps or any(math.isfinite(value) for _, value in series.gradient_norm):
        names.append(("gradient norm", series.gradient_norm))
    quantity, points = next(((name, points) for name, points in names if _ends_badly(points)), ("", ()))
    recent = _recent_bad_steps(snapshot)
    if not quantity and len(recent) < threshold("bad_steps"):
        return None
    evidence = []
    if quantity:
        since = next((step for step, value in points if not math.isfinite(value)), None)
        evidence.append(f"the {quantity} has been NaN or Inf since step {since}")
        text = f"has a {quantity} that is NaN or Inf"
    else:
        text = f"had {len(recent)} steps whose loss or gradient is NaN or Inf among the newest {_window()}"
    if snapshot.bad_steps:
        first = snapshot.bad_steps[0]
        evidence.append(f"the first bad step was step {first.step}: {first.reason}")
    return Symptom(
        "wrong", text, tuple(evidence), lost_share=1.0 if quantity else len(recent) / _window(), sign="not_a_number"
    )


def find_skipped_steps(snapshot: Snapshot) -> Symptom | None:
    """Return spikes of the loss that are skipped again and again: what is skipped teaches nothing."""
    newest = max([step for step, _ in snapshot.series.loss], default=snapshot.run.step or 0)
    skipped = {
        bad.step: bad.reason
        for bad in snapshot.bad_steps
        if not bad.is_not_finite
        and bad.policy == "skip"
        and bad.generation == snapshot.run.generation
        and newest - bad.step < _window()
    }
    share = len(skipped) / min(_window(), max(newest, 1))
    if newest < MIN_STEPS or share < threshold("skipped_share"):
        return None
    text = f"skips at least {len(skipped)} of its newest {min(_window(), newest)} steps as spikes of the loss"
    last = max(skipped)
    evidence = (f"step {last}: {skipped[last]}",)
    return Symptom("wrong", text, evidence, lost_share=share, sign="steps_skipped")


def _recent_bad_steps(snapshot: Snapshot) -> list[SnapshotBadStep]:
    newest = max([step for step, _ in snapshot.series.loss], default=snapshot.run.step or 0)
    return [bad for bad in snapshot.bad_steps if bad.is_not_finite and newest - bad.step < _window()]


def _window() -> int:
    return int(threshold("bad_steps_window"))


def _odd_ranks(snapshot: Snapshot) -> list[SnapshotRank]:
    """Return ranks whose state differs from its replicas, or whose gradient norm is far off its usual value."""
    differ = [rank for rank in snapshot.ranks if rank.differs_from_copies]
    if differ:
        return differ if 2 * len(differ) <= len(snapshot.ranks) or len(differ) == 1 else []
    measured = [rank for rank in snapshot.ranks if rank.gradient_norm is not None]
    broken = [rank for rank in measured if not math.isfinite(rank.gradient_norm or 0.0)]
    if broken and 2 * len(broken) < len(measured):
        return broken
    ratios = {
        rank.rank: (rank.gradient_norm or 0.0) / rank.gradient_norm_usual
        for rank in measured
        if rank.gradient_norm_usual and math.isfinite(rank.gradient_norm or 0.0)
    }
    if len(ratios) < 3:
        return []
    usual = statistics.median(ratios.values())
    limit = threshold("gradient_ratio")
    odd = [rank for rank in measured if usual > 0 and ratios.get(rank.rank, usual) / usual > limit]
    return odd if 2 * len(odd) < len(measured) else []


def _oddity(rank: SnapshotRank) -> str:
    if rank.differs_from_copies:
        return f"the state of rank {rank.rank} on {rank.node} has a different checksum than its replicas on other ranks"
    norm, usual = rank.gradient_norm or 0.0, rank.gradient_norm_usual
    against = f", usually {usual:.3g}" if usual else ""
    return f"rank {rank.rank} on {rank.node} has a gradient norm of {norm:.3g}{against}; the other ranks are normal"


def _ends_badly(points: Sequence[tuple[int, float]]) -> bool:
    """Return whether most of the newest values are not finite: one bad step that was skipped is not a fault."""
    newest = [value for _, value in points[-NEWEST_LOSSES:]]
    return bool(newest) and 2 * sum(not math.isfinite(value) for value in newest) > len(newest)
