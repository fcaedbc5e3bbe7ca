"""Made-up curves of trainings: ordinary ones with all kinds of noise, and sick ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fake_snapshots import healthy, with_run

from craton.observability.diagnosis.collect.metrics import thinned
from craton.observability.diagnosis.snapshot import Series, Snapshot, TrainingFacts

VOCABULARY = 4096
ENTROPY = TrainingFacts(
    objective="cross_entropy",
    vocabulary=VOCABULARY,
    has_files=True,
    learning_rate=3e-4,
    usual_learning_rate=3e-4,
    warmup_steps=100,
    is_new=True,
)
TUNING = replace(ENTROPY, learning_rate=2e-5, usual_learning_rate=2e-5, warmup_steps=10, is_new=False)
BASE = healthy(1, 2, on="local", is_accelerated=False)
CUSTOM = replace(ENTROPY, objective="mine.losses:contrastive")


@dataclass(frozen=True)
class Curve:
    name: str
    losses: list[float]
    norms: list[float]
    facts: TrainingFacts | None
    evaluations: tuple[tuple[int, float], ...] = ()


# Student's t with 3 degrees of freedom, of variance 1; drawn once, since a curve takes thousands.
HEAVY = (np.random.default_rng(0).standard_t(3, 1 << 16) / math.sqrt(3.0)).tolist()


def heavy(dice: random.Random) -> float:
    value: float = HEAVY[dice.getrandbits(16)]
    return value


def ordinary(seed: int) -> Curve:
    """Draw an ordinary curve of one of several kinds."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    length = int(math.exp(dice.uniform(math.log(12), math.log(2000))))
    return kind(dice, length)


def _pretraining(dice: random.Random, length: int) -> Curve:
    """Warm-up, a power law, noise of any size with heavy tails, and sometimes a cycle of the learning rate."""
    noise, speed = dice.choice((0.01, 0.05, 0.15, 0.4)), dice.uniform(0.12, 0.3)
    floor, cycle, bump = dice.uniform(1.2, 2.6), dice.choice((0, 0, dice.randint(50, 2000))), dice.choice((0.0, 0.5))
    losses = []
    for step in range(length):
        level = floor + (math.log(VOCABULARY) + 0.4 - floor) * (1 + step / 12) ** -speed
        level += bump * math.exp(-(((step - 40) / 15) ** 2))  # of the warm-up
        level *= 1.0 + (0.05 * math.sin(2 * math.pi * step / cycle) if cycle else 0.0)
        losses.append(max(0.05, level + noise * heavy(dice)))
    return Curve("pretraining", losses, _norms(dice, length), ENTROPY)


def _small_batches(dice: random.Random, length: int) -> Curve:
    """Fine-tuning with one sample a step: losses of single answers, of lognormal size."""
    spread, level = dice.uniform(0.3, 0.8), dice.uniform(0.6, 2.0)
    losses = [
        level * (0.7 + 0.3 * math.exp(-step / 200)) * math.exp(spread * dice.gauss(0.0, 1.0)) for step in range(length)
    ]
    return Curve("small batches", losses, [math.exp(dice.gauss(0.0, 0.8)) for _ in range(length)], TUNING)


def _custom(dice: random.Random, length: int) -> Curve:
    """A user's objective: it may be negative, cross zero, rise slowly, or wander."""
    start, end = dice.uniform(-3.0, 5.0), dice.uniform(-8.0, 4.0)
    noise, rate = dice.uniform(0.02, 1.0), dice.uniform(0.001, 0.05)
    wander, losses = 0.0, []
    for step in range(length):
        wander = 0.98 * wander + 0.1 * noise * dice.gauss(0.0, 1.0)
        losses.append(end + (start - end) * math.exp(-rate * step) + wander + noise * heavy(dice))
    return Curve("custom", losses, _norms(dice, length), CUSTOM)


def _rewards(dice: random.Random, length: int) -> Curve:
    """A policy gradient: a loss around zero, of either sign."""
    losses = [0.02 * heavy(dice) * (1 + step / length) for step in range(length)]
    return Curve("rewards", losses, _norms(dice, length), replace(CUSTOM, objective="grpo"))


def _command(dice: random.Random, length: int) -> Curve:
    """A command whose loss has an unknown meaning."""
    scale = 10 ** dice.uniform(-3.0, 3.0)
    losses = [scale * (1 + 4 * (1 + step / 20) ** -0.5) * (1 + 0.1 * heavy(dice)) for step in range(length)]
    return Curve("command", [abs(loss) for loss in losses], _norms(dice, length), None)


def _spikes_that_pass(dice: random.Random, length: int) -> Curve:
    """Pretraining with short spikes, in which the gradient norm rises too."""
    curve = _pretraining(dice, length)
    losses, norms = list(curve.losses), list(curve.norms)
    for _ in range(length // 60):
        at = dice.randrange(max(1, length - 6))
        for place in range(at, min(length - 5, at + dice.randint(1, 4))):
            losses[place] *= dice.uniform(1.5, 4.0)
            norms[place] *= dice.uniform(5.0, 50.0)
    return replace(curve, name="spikes", losses=losses, norms=norms)


def _with_evaluations(dice: random.Random, length: int) -> Curve:
    curve = _pretraining(dice, length)
    every = max(1, length // dice.randint(4, 20))
    gap = dice.uniform(0.0, 0.5)
    places = range(every, length + 1, every)
    points = tuple((step, curve.losses[step - 1] * 0.02 + _level(curve.losses, step) + gap) for step in places)
    return replace(curve, name="evaluations", evaluations=points)


def _level(losses: Sequence[float], step: int) -> float:
    part = losses[max(0, step - 40) : step]
    return sum(part) / len(part)


def _norms(dice: random.Random, length: int) -> list[float]:
    start, end = dice.uniform(0.5, 10.0), dice.uniform(0.2, 1.5)
    return [
        (end + (start - end) * math.exp(-step / 50)) * math.exp(0.3 * dice.gauss(0.0, 1.0)) for step in range(length)
    ]


KINDS: tuple[Callable[[random.Random, int], Curve], ...] = (
    _pretraining,
    _small_batches,
    _custom,
    _rewards,
    _command,
    _spikes_that_pass,
    _with_evaluations,
)


def run_of(
    losses: Sequence[float],
    norms: Sequence[float] = (),
    facts: TrainingFacts | None = ENTROPY,
    first: int = 1,
    evaluations: tuple[tuple[int, float], ...] = (),
    **series: Sequence[float],
) -> Snapshot:
    """Return a healthy run on CPUs with these curves, recorded as a snapshot records them."""

    def points(values: Sequence[float]) -> tuple[tuple[int, float], ...]:
        return thinned(list(enumerate(values, start=first)))

    others = {name: points(values) for name, values in series.items()}
    run = with_run(BASE, step=first + len(losses) - 1, steps=100_000)
    run = with_run(run, kind="command" if facts is None else "pretrain")
    return replace(
        run,
        training=facts,
        series=Series(loss=points(losses), gradient_norm=points(norms), evaluation_loss=evaluations, **others),
    )
