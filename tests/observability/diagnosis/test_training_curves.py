"""Curves of trainings: sick ones are found with their steps, ordinary noisy ones are left alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from curves import CUSTOM, ENTROPY, VOCABULARY, heavy, ordinary, run_of

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect.metrics import series_of, thinned
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotBadStep
from craton.observability.diagnosis.symptoms.wrong import find_wrong
from craton.telemetry import RunDirectory

SEEDS = 300
GUESS = math.log(VOCABULARY)


def test_ordinary_curves_are_left_alone() -> None:
    for seed in range(SEEDS):
        curve = ordinary(seed)
        for share in (0.4, 1.0):
            length = max(6, round(share * len(curve.losses)))
            evaluations = tuple(point for point in curve.evaluations if point[0] <= length)
            run = run_of(curve.losses[:length], curve.norms[:length], curve.facts, evaluations=evaluations)
            assert find_wrong(run) == [], (seed, curve.name, length)


@pytest.mark.slow
def test_thousands_of_ordinary_curves_are_left_alone() -> None:
    for seed in range(SEEDS, 3000):
        curve = ordinary(seed)
        run = run_of(curve.losses, curve.norms, curve.facts, evaluations=curve.evaluations)
        assert find_wrong(run) == [], (seed, curve.name)


def grown(first: float, last: float, length: int) -> list[float]:
    dice = random.Random(length)
    return [first * (last / first) ** (step / length) + 0.02 * first * heavy(dice) for step in range(length)]


def noisy(length: int, level: Callable[[int], float], noise: float = 0.05) -> list[float]:
    dice = random.Random(length)
    return [level(step) + noise * heavy(dice) for step in range(length)]


@pytest.mark.parametrize(
    ("losses", "sign"),
    [
        (grown(5.0, 490.0, 3000), "diverged"),
        (grown(5.0, 490.0, 60), "diverged"),
        (grown(5.0, 490.0, 15), "diverged"),
        (noisy(500, lambda step: 28.0 + 62.0 * (step * 0.618 % 1.0)), "diverged"),
        (noisy(2040, lambda step: 3.0 if step < 2000 else 7.0), "diverged"),
        (noisy(2008, lambda step: 3.0 if step < 2000 else 7.0), "loss_spike"),
        (noisy(2000, lambda step: 3.0 + 1.5 * max(0, step - 1000) / 1000), "diverged"),
        (noisy(600, lambda step: 8.3 - 4 * min(1, step / 300) + max(0, step - 400) / 50), "diverged"),
        (noisy(900, lambda _: GUESS + 0.02, 0.02), "plateau"),
    ],
)
def test_a_sick_cross_entropy_is_found(losses: list[float], sign: str) -> None:
    (symptom,) = find_wrong(run_of(losses))
    assert symptom.sign == sign, symptom
    verdict = diagnose(run_of(losses))
    assert (verdict.condition, verdict.cause, verdict.rank) == ("wrong", sign, None)
    assert "train." in verdict.action


def test_a_divergence_has_its_step_and_values() -> None:
    verdict = diagnose(run_of(noisy(2040, lambda step: 3.0 if step < 2000 else 7.0)))
    assert "its loss rose from 2.9" in verdict.sentence
    assert any(f"high since step {step}" in line for line in verdict.evidence for step in range(2000, 2005))


def test_a_users_objective_may_be_negative_and_move() -> None:
    falls = noisy(600, lambda step: -8.0 * (1 - math.exp(-step / 100)), 0.2)
    assert find_wrong(run_of(falls, facts=CUSTOM)) == []
    rises = noisy(600, lambda step: 3.0 * (1 - math.exp(-step / 100)), 0.1)  # the weight of a term grows
    assert find_wrong(run_of(rises, facts=CUSTOM)) == []
    high = noisy(600, lambda _: 55.0, 1.0)  # above ln(vocabulary), which means nothing here
    assert find_wrong(run_of(high, facts=CUSTOM)) == []
    jumps = noisy(220, lambda step: 6.0 - step / 40 if step < 40 else 16.0 + 30.0 * math.exp(-(step - 40) / 60), 0.2)
    assert [symptom.sign for symptom in find_wrong(run_of(jumps, facts=CUSTOM))] == ["loss_spike"]
    explodes = noisy(420, lambda step: -4.0 + (math.exp(max(0, step - 300) / 20) - 1), 0.1)
    assert [symptom.sign for symptom in find_wrong(run_of(explodes, facts=CUSTOM))] == ["diverged"]


def test_a_plateau_needs_a_new_model_and_time() -> None:
    flat = noisy(900, lambda _: GUESS, 0.02)
    assert find_wrong(run_of(flat[:300])) == []
    assert find_wrong(run_of(flat, facts=replace(ENTROPY, is_new=False))) == []
    assert find_wrong(run_of(flat, facts=replace(ENTROPY, warmup_steps=800))) == []
    learns = noisy(900, lambda step: GUESS - 0.0008 * step, 0.02)
    assert find_wrong(run_of(learns)) == []


def test_the_learning_rate_is_blamed_only_where_the_loss_is_sick() -> None:
    fast = replace(ENTROPY, learning_rate=0.1)
    assert diagnose(run_of(noisy(300, lambda _: 3.0), facts=fast)).condition == "healthy"
    verdict = diagnose(run_of(grown(5.0, 490.0, 300), facts=fast))
    assert (verdict.cause, verdict.layer) == ("learning_rate_high", "framework")
    assert "0.1 is 333 times what is usual" in verdict.sentence


def test_a_learning_rate_near_zero_counts_before_the_end_only() -> None:
    losses = noisy(400, lambda _: 3.0)

    def run(rates: list[float], steps: int) -> Snapshot:
        base = run_of(losses, learning_rate=rates)
        return replace(base, run=replace(base.run, steps=steps))

    early = [3e-4] * 200 + [0.0] * 200
    assert [symptom.sign for symptom in find_wrong(run(early, 10_000))] == ["learning_rate_zero"]
    assert find_wrong(run(early, 400)) == []
    assert find_wrong(run([3e-4 * min(1, step / 100) for step in range(400)], 10_000)) == []


def test_few_rows_alone_are_not_a_fault_until_they_are_memorized() -> None:
    losses = noisy(400, lambda _: 3.0)
    few = {"distinct_row_share": [0.08] * 400}
    assert find_wrong(run_of(losses, **few)) == []
    learned = [0.01] * 400
    assert [symptom.sign for symptom in find_wrong(run_of(learned, **few))] == ["repeated_data"]
    assert [symptom.sign for symptom in find_wrong(run_of(losses, distinct_row_share=[0.004] * 400))] == [
        "repeated_data"
    ]
    assert find_wrong(run_of(losses, distinct_row_share=[1.0] * 400, distinct_tokens=[90.0] * 400)) == []


def test_labels_may_often_equal_their_tokens_but_not_all_of_them() -> None:
    losses = noisy(400, lambda _: 3.0)
    of_an_image = run_of(losses, copied_label_share=[0.97] * 400, distinct_tokens=[30.0] * 400)
    assert find_wrong(of_an_image) == []
    all_of_them = run_of(losses, copied_label_share=[0.1] * 390 + [1.0] * 10, distinct_tokens=[30.0] * 400)
    assert [symptom.sign for symptom in find_wrong(all_of_them)] == ["labels_not_shifted"]
    own = replace(all_of_them, training=replace(ENTROPY, objective="mine:denoise"))
    assert find_wrong(own) == [], "another objective may want them"


def test_a_strong_weight_decay_is_ordinary_until_it_takes_the_weights() -> None:
    losses = noisy(400, lambda _: 3.0)
    strong = replace(ENTROPY, learning_rate=3e-3, weight_decay=1.0)
    assert find_wrong(replace(run_of(losses), training=strong)) == []
    heavy = replace(strong, weight_decay=10.0)
    assert [symptom.sign for symptom in find_wrong(replace(run_of(losses), training=heavy))] == ["weight_decay_high"]


def test_experts_may_be_idle_where_there_are_few_tokens() -> None:
    losses = noisy(400, lambda _: 3.0)
    few = replace(ENTROPY, tokens_per_expert=20.0)
    many = replace(ENTROPY, tokens_per_expert=5000.0)
    assert find_wrong(run_of(losses, facts=few, idle_expert_share=[0.4] * 400)) == []
    assert find_wrong(run_of(losses, facts=many, idle_expert_share=[0.02] * 400)) == []
    (symptom,) = find_wrong(run_of(losses, facts=many, idle_expert_share=[0.4] * 400))
    assert symptom.sign == "dead_experts"


def test_single_bad_steps_are_left_alone_and_many_are_not() -> None:
    losses = noisy(400, lambda _: 3.0)

    def bad(step: int) -> SnapshotBadStep:
        return SnapshotBadStep(step, "the loss is nan", "skip", 0, 0.0, 8 * step, 8 * step + 7)

    run = run_of(losses)
    assert diagnose(replace(run, bad_steps=(bad(390),))).condition == "healthy"
    spiked = SnapshotBadStep(395, "the loss is 9, over 3 times its recent level of 3", "skip")
    assert diagnose(replace(run, bad_steps=(spiked,) * 5)).condition == "healthy"
    verdict = diagnose(replace(run, bad_steps=(bad(40), bad(380), bad(385), bad(390))))
    assert (verdict.condition, verdict.cause) == ("wrong", "not_a_number")
    assert any("first bad step was step 40" in line and "samples 320 to 327" in line for line in verdict.evidence)


def test_a_norm_that_is_not_computed_is_not_a_fault() -> None:
    assert find_wrong(run_of(noisy(400, lambda _: 3.0), [math.nan] * 400)) == []
    assert [symptom.sign for symptom in find_wrong(run_of([math.nan] * 30))] == ["not_a_number"]


def test_the_best_level_of_a_long_run_is_remembered(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    path = run.metrics_path("node-0")
    path.parent.mkdir(parents=True)
    padding = "x" * 400
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, 8001):
            loss = 3.0 if step < 3000 else 8.0
            file.write(f'{{"time": {step}, "step": {step}, "rank": 0, "run_loss": {loss}, "note": "{padding}"}}\n')
    assert path.stat().st_size > 3 << 20
    series = series_of(run, ["node-0"])
    assert series.loss[0] == (1, 3.0)
    assert sum(loss == 3.0 for _, loss in series.loss) > 30
    assert series.loss[-1] == (8000, 8.0)
    assert thinned(series.loss) == series.loss
    (symptom,) = find_wrong(replace(run_of([3.0] * 30), series=series))
    assert symptom.sign == "diverged"
