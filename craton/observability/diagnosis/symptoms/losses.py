"""Curves of a training: losses that diverge, spike, stay where they began or fall only on the training data, gradients
that explode.

A curve is judged by its own past, with medians of windows: noise, warm-up, cycles of the learning rate and single bad
steps are not symptoms. Only a cross entropy has a scale (ln of the vocabulary, never negative). The loss of a user's
objective may have any sign and scale, so only a rise far above everything before counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Symptom

Points = Sequence[tuple[int, float]]

NEWEST_LOSSES, MIN_LOSSES = 5, 24
FEW_LOSSES = 10  # enough for a loss that explodes from the first steps on
MIN_WINDOW, MAX_WINDOW = 8, 25  # points whose median is a level
NORMAL_DEVIATION = 1.48  # standard deviations in a median absolute deviation
LONG_POINTS = 20  # a rise of fewer recorded steps is a spike
HIGH_POINTS, HIGH_RATIO = 10, 3.0  # a larger rise is a divergence after fewer steps
MIN_RISE = 0.2  # nats of cross entropy
EXPLODED = 3.0  # times ln(vocabulary) or the lowest loss, in the first steps
CONSTANT_LOSSES = 20  # equal losses in a row
CLEAR_DIGITS = 1000  # a loss in units of the last digit that is printed
CONSTANT_PRINTED = 100  # the same of a command, which prints rounded numbers; twice as many if it never changed
UNBOUNDED, ACCELERATED = 3.0, 1.5  # times the first losses, below 0; the fall of a part relative to the one before
JUMPED = 5.0  # times the range of all losses before, within a step
HUGE_RISE = 10.0  # of a user's loss, relative to its level and range before
RECOVERED_SHARE = 0.5  # of the rise; a loss that came down by more is recovering
MIN_EVALUATIONS, RISING_EVALUATIONS = 5, 3


@dataclass(frozen=True)
class LossScale:
    """How much of a rise counts."""

    ratio: float  # to the best level; 0: the loss may be negative, so ratios mean nothing
    noises: float
    min_rise: float = 0.0
    vocabulary: int | None = None  # of a cross entropy

    @property
    def guess(self) -> float | None:
        """The cross entropy of a model that knows nothing."""
        return math.log(self.vocabulary) if self.vocabulary and self.vocabulary > 1 else None


def scale_of(snapshot: Snapshot, losses: Sequence[float]) -> LossScale:
    """Return the scale of the run's loss: of a cross entropy, of a positive loss, or of a loss of any kind."""
    training = snapshot.training
    is_known = training is not None or snapshot.run.kind in ("pretrain", "sft")
    is_entropy = is_known and (training is None or training.objective == "cross_entropy")
    spreads = threshold("diverged_spreads")
    if is_entropy and min(losses, default=0.0) >= 0.0:
        vocabulary = training.vocabulary if training else None
        return LossScale(threshold("diverged_ratio"), spreads, MIN_RISE, vocabulary)
    if training is None and min(losses, default=0.0) > 0.0:  # a command: most losses are positive
        return LossScale(threshold("spike_ratio"), 1.5 * spreads)
    return LossScale(0.0, threshold("any_loss_spreads"))


def find_loss_trouble(snapshot: Snapshot) -> Symptom | None:
    """Return a loss that diverges, spiked, or shows that nothing is learned."""
    points = _finite(snapshot.series.loss)
    losses = [value for _, value in points]
    scale = scale_of(snapshot, losses)
    return (
        _falls_without_end(points)
        or _explodes_at_once(points, scale)
        or _diverges(points, scale)
        or _stays_high(points, scale)
        or _above_guessing(points, scale)
        or _spikes(points, scale)
        or _is_constant(snapshot, points)
        or _learns_nothing(snapshot, points, scale)
    )


def _falls_without_end(points: Points) -> Symptom | None:
    """Return a loss that is far below 0 and falls at least as fast as before: it is maximized where it should be
    minimized, or has no lower bound."""
    losses = [value for _, value in points]
    if len(losses) < MIN_LOSSES:
        return None
    third = len(losses) // 3
    start, first, second, newest = (
        statistics.median(part)
        for part in (losses[:3], losses[:third], losses[third : 2 * third], losses[-NEWEST_LOSSES:])
    )
    if newest >= 0.0 or -newest < UNBOUNDED * max(abs(start), 10.0 * _noise(losses[:third])):
        return None
    if second - newest < ACCELERATED * max(0.0, first - second) or newest > statistics.median(losses[-third:]):
        return None  # returns and densities may fall below 0 at a steady pace
    text = f"has a loss that falls without end: it began at {start:.3g} and is {newest:.3g}"
    return Symptom("wrong", text, (_latest(points),), lost_share=1.0, sign="loss_unbounded")


def _explodes_at_once(points: Points, scale: LossScale) -> Symptom | None:
    losses = [value for _, value in points]
    if not scale.ratio or not FEW_LOSSES <= len(losses) < MIN_LOSSES:
        return None
    limit = EXPLODED * max(*losses[:3], scale.guess or 0.0)
    if min(losses[-NEWEST_LOSSES:]) <= limit:
        return None
    return _diverged(points, losses[0], losses[-1], points[_began([value > limit for value in losses])][0])


def _diverges(points: Points, scale: LossScale) -> Symptom | None:
    if len(points) < MIN_LOSSES:
        return None
    losses = [value for _, value in points]
    width = _width(losses)
    levels = _levels(losses[:-width], width)
    best = min(levels)
    newest = statistics.median(losses[-width:])
    if not _rises(losses, best, newest, scale):
        return None
    high = [value > best + RECOVERED_SHARE * (newest - best) for value in losses]
    since = _began(high)
    length = len(losses) - since
    if length < LONG_POINTS and not (scale.ratio and newest > HIGH_RATIO * best and length >= HIGH_POINTS):
        return None
    peak = max(_levels(losses[since:], min(width, length)))
    latest = statistics.median(losses[-NEWEST_LOSSES:])
    if latest < best + RECOVERED_SHARE * (peak - best) or latest < newest - 2.0 * _noise(losses):
        return None  # on its way back
    first = statistics.median(losses[:3])  # before the first window, if it rose from the first steps on
    return _diverged(points, min(best, first), latest, points[since][0])


def _stays_high(points: Points, scale: LossScale) -> Symptom | None:
    """Return a loss that jumped far above everything before within a step, and has stayed there. It counts until it is
    back at the levels before the jump, although it falls: a recovery from there takes as long as the training did."""
    losses = [value for _, value in points]
    jump = next((index for index in range(FEW_LOSSES, len(losses)) if _jumps(losses, index, scale)), None)
    if jump is None or len(losses) - jump < LONG_POINTS:
        return None
    highest = max(losses[:jump])
    if min(losses[jump:]) <= highest + JUMPED * (highest - min(losses[:jump])):
        return None
    peak, newest = max(losses[jump:]), statistics.median(losses[-NEWEST_LOSSES:])
    text = f"has a loss spike from {losses[jump - 1]:.3g} to {peak:.3g} that lasts: the loss is {newest:.3g}"
    evidence = (f"the loss jumped at step {points[jump][0]}", _latest(points))
    return Symptom("wrong", text, evidence, lost_share=1.0, sign="loss_spike")


def _jumps(losses: Sequence[float], index: int, scale: LossScale) -> bool:
    """Return whether a loss is far above all before it, by most of that distance since the one before."""
    before, value = losses[:index], losses[index]
    highest = max(before)
    if value <= highest + JUMPED * (highest - min(before)) or value - before[-1] < 0.5 * (value - highest):
        return False
    return value > highest + JUMPED * max(10.0 * _noise(before), scale.min_rise)


def _above_guessing(points: Points, scale: LossScale) -> Symptom | None:
    """Return a cross entropy that stays above that of a random guess, as if it had never been low."""
    if scale.guess is None or len(points) < MIN_LOSSES:
        return None
    losses = [value for _, value in points]
    width = _width(losses)
    first, newest = statistics.median(losses[:width]), statistics.median(losses[-width:])
    steps = points[-1][0] - points[0][0]
    if newest < threshold("guess_ratio") * scale.guess + 1.0 or steps < threshold("guess_steps"):
        return None
    if newest < 0.7 * first and steps < threshold("plateau_steps"):
        return None  # a large start that comes down
    text = (
        f"diverges: its loss is {newest:.3g} after {steps} recorded steps, above {scale.guess:.3g}, "
        "the loss of random guesses (ln of the vocabulary)"
    )
    return Symptom("wrong", text, (_latest(points),), lost_share=1.0, sign="diverged")


def _diverged(points: Points, best: float, newest: float, since: int) -> Symptom:
    text = f"diverges: its loss rose from {best:.3g} to {newest:.3g}"
    evidence = (f"the loss has been high since step {since}", _latest(points))
    return Symptom("wrong", text, evidence, lost_share=1.0, sign="diverged")


def _spikes(points: Points, scale: LossScale) -> Symptom | None:
    """Return a spike that lasts; training may recover from it, so it costs nothing yet."""
    if len(points) < MIN_LOSSES:
        return None
    losses = [value for _, value in points]
    newest = statistics.median(losses[-NEWEST_LOSSES:])
    quarter = max(MIN_WINDOW, len(losses) // 4)
    before = statistics.median(losses[-quarter - NEWEST_LOSSES : -NEWEST_LOSSES])
    rise = newest - before
    if scale.ratio and newest < threshold("spike_ratio") * before:
        return None
    if not scale.ratio and rise < max(abs(before), 2.0 * _range(losses[:-NEWEST_LOSSES])):
        return None
    if rise < max(threshold("spike_spreads") * _noise(losses[:-NEWEST_LOSSES]), scale.min_rise):
        return None
    limit = before + RECOVERED_SHARE * rise
    if min(losses[-NEWEST_LOSSES:]) <= limit:
        return None  # shorter than the newest steps: most spikes pass
    since = points[_began([value > limit for value in losses])][0]
    text = f"has a loss spike from {before:.3g} to {newest:.3g}"
    evidence = (f"the spike began at step {since}", _latest(points))
    return Symptom("wrong", text, evidence, lost_share=0.0, sign="loss_spike")


def _is_constant(snapshot: Snapshot, points: Points) -> Symptom | None:
    """Return a loss that is the same to the last digit: nothing is learned, or it does not depend on the data."""
    values = [value for _, value in points]
    length = next((count for count, value in enumerate(reversed(values)) if value != values[-1]), len(values))
    if snapshot.training is not None:
        if length < CONSTANT_LOSSES or float(f"{values[-1]:.5g}") == values[-1]:
            return None
    elif length < (CONSTANT_PRINTED if length < len(values) else 2 * CONSTANT_PRINTED) or _is_coarse(values, length):
        return None
    text = f"learns nothing: its loss has been exactly {values[-1]:.6g} in each of the last {length} recorded steps"
    return Symptom("wrong", text, (_latest(points),), lost_share=1.0, sign="plateau")


def _is_coarse(losses: Sequence[float], length: int) -> bool:
    """Return whether a command prints too few digits, or one loss for many steps, for equal losses to mean anything."""
    before = losses[: len(losses) - length]
    changes = sum(later != earlier for earlier, later in pairwise(before))
    decimals = max(len(repr(value).partition(".")[2]) for value in losses)  # trailing zeros of a loss are not seen
    return abs(losses[-1]) < CLEAR_DIGITS / 10.0**decimals or 2 * changes < len(before) - 1


def _learns_nothing(snapshot: Snapshot, points: Points, scale: LossScale) -> Symptom | None:
    """Return a new model whose cross entropy stays at that of a random guess, long after the warm-up."""
    training = snapshot.training
    if training is None or scale.guess is None or not training.is_new or len(points) < MIN_LOSSES:
        return None
    late = [(step, value) for step, value in points if step > training.warmup_steps]
    if len(late) < MIN_LOSSES or late[-1][0] - late[0][0] < threshold("plateau_steps"):
        return None
    losses = [value for _, value in late]
    width = _width(losses)
    first, newest = statistics.median(losses[:width]), statistics.median(losses[-width:])
    share = threshold("plateau_share")
    if not (1.0 - share) * scale.guess <= newest <= 1.5 * scale.guess or newest < (1.0 - share / 3) * first:
        return None
    steps = late[-1][0] - late[0][0]
    text = (
        f"learns nothing: for {steps} steps its loss has been {newest:.3g}, like random guesses "
        f"(ln of the vocabulary is {scale.guess:.3g})"
    )
    return Symptom("wrong", text, (_latest(points),), lost_share=1.0, sign="plateau")


def find_gradient_explosion(snapshot: Snapshot) -> Symptom | None:
    """Return gradient norms far above every level that the run had before."""
    points = [(step, value) for step, value in _finite(snapshot.series.gradient_norm) if value > 0.0]
    if len(points) < 2 * MIN_LOSSES:
        return None
    norms = [value for _, value in points]
    newest = statistics.median(norms[-NEWEST_LOSSES:])
    before = norms[:-NEWEST_LOSSES]
    usual = statistics.median(before)
    # Levels of few points: a rare large gradient is usual for this run if it comes again and again.
    highest = max(_levels(before[: -2 * NEWEST_LOSSES], NEWEST_LOSSES))
    if newest < threshold("exploded_ratio") * usual or newest < 0.5 * threshold("exploded_ratio") * highest:
        return None
    if min(norms[-NEWEST_LOSSES:]) < 0.5 * threshold("exploded_ratio") * usual:
        return None  # shorter than the newest steps, as of a spike that passes
    since = points[_began([value > 0.5 * newest for value in norms])][0]
    text = f"has exploding gradients: their norm rose from {usual:.3g} to {newest:.3g}"
    evidence = (f"the gradient norm has been high since step {since}",)
    return Symptom("wrong", text, evidence, lost_share=0.0, sign="gradient_explosion")


def find_bad_evaluation(snapshot: Snapshot) -> Symptom | None:
    """Return an evaluation loss that is not finite although the training loss is."""
    points = snapshot.series.evaluation_loss
    if not points or math.isfinite(points[-1][1]):
        return None
    since = points[_began([not math.isfinite(value) for _, value in points])][0]
    evidence = (f"the evaluation loss has been NaN or Inf since step {since}, while the training loss is finite",)
    return Symptom(
        "wrong", "has an evaluation loss that is NaN or Inf", evidence, lost_share=0.0, sign="bad_evaluation"
    )


def find_overfitting(snapshot: Snapshot) -> Symptom | None:
    """Return an evaluation loss that rises, while the training loss keeps falling."""
    evaluations = _finite(snapshot.series.evaluation_loss)
    losses = _finite(snapshot.series.loss)
    if len(evaluations) < MIN_EVALUATIONS or len(losses) < MIN_LOSSES:
        return None
    lowest = min(range(len(evaluations)), key=lambda index: evaluations[index][1])
    after = evaluations[lowest + 1 :]
    step, best = evaluations[lowest]
    changes = [abs(later - earlier) for (_, earlier), (_, later) in pairwise(evaluations)]
    rise = max(threshold("overfitting_share") * abs(best), 2.0 * statistics.median(changes))
    newest = after[-RISING_EVALUATIONS:]
    if len(newest) < RISING_EVALUATIONS or any(value < best + rise for _, value in newest):
        return None
    then = [value for at, value in losses if at <= step][-MAX_WINDOW:]
    now = [value for _, value in losses][-MAX_WINDOW:]
    if len(then) < NEWEST_LOSSES:
        return None
    before, trained = statistics.median(then), statistics.median(now)
    if trained > before - 0.02 * abs(before):
        return None  # the training loss rises too: that is divergence
    text = (
        f"overfits: its evaluation loss rose from {best:.3g} at step {step} to {after[-1][1]:.3g}, "
        f"while the training loss fell from {before:.3g} to {trained:.3g}"
    )
    return Symptom("wrong", text, (text,), lost_share=0.0, sign="overfitting")


def _rises(losses: Sequence[float], best: float, newest: float, scale: LossScale) -> bool:
    rise = newest - best
    if rise <= max(scale.noises * _noise(losses), scale.min_rise):
        return False
    if scale.ratio:
        return newest > scale.ratio * best
    # A user's loss may rise to another level for good reasons, as when the weight of one of its terms grows.
    first = statistics.median(losses[: _width(losses)])
    usual = max(abs(best), 2.0 * abs(first - best))
    third = statistics.median(losses[2 * len(losses) // 3 :][: _width(losses)])
    return rise > usual and (
        newest - third > 0.25 * rise or rise > HUGE_RISE * max(usual, abs(first), 10.0 * _noise(losses))
    )


def _width(values: Sequence[float]) -> int:
    return max(MIN_WINDOW, min(MAX_WINDOW, len(values) // 12))


def _levels(values: Sequence[float], width: int) -> list[float]:
    """Return the medians of windows that overlap by half."""
    starts = range(0, max(1, len(values) - width + 1), max(1, width // 2))
    return [statistics.median(values[start : start + width]) for start in starts]


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of a value around its level, from medians, so that outliers do not count."""
    width = _width(values)
    steps = [later - earlier for earlier, later in pairwise(values)]
    jumps = NORMAL_DEVIATION * statistics.median(abs(step) for step in steps) / math.sqrt(2.0) if steps else 0.0
    within = []
    for start in range(0, max(1, len(values) - width + 1), width):
        window = values[start : start + width]
        level = statistics.median(window)
        within.append(NORMAL_DEVIATION * statistics.median(abs(value - level) for value in window))
    return max(jumps, statistics.median(within) if within else 0.0)


def _range(values: Sequence[float]) -> float:
    levels = _levels(values, _width(values))
    return max(levels) - min(levels)


def _began(high: Sequence[bool]) -> int:
    """Return the index since which nearly all values are high: at most one in ten is not."""
    low = 0
    began = len(high) - 1
    for index in range(len(high) - 1, -1, -1):
        low += not high[index]
        if 10 * low > len(high) - index + 9:
            break
        if high[index]:
            began = index
    return began


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _latest(points: Points) -> str:
    return "latest losses: " + ", ".join(f"{value:.3g}" for _, value in points[-4:])
