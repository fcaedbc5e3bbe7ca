"""The fit: it finds constants again that it was given, says honestly how sure it is, and learns only from its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from craton.infrastructure import cluster_of
from craton.job.layout import Layout
from craton.job.model import model_preset
from craton.planning.calibration import corpus, effect_labels, row_of
from craton.planning.fitting import (
    LEVELS,
    QUANTILE_80,
    SCALES,
    Array,
    Composition,
    Fit,
    FitRow,
    Prediction,
    linearise,
)
from craton.planning.rates import machine_of
from craton.planning.software import INDEX, NAMES, SPREAD, Traits, prior_log
from craton.planning.step import TRAINING_STEP, StepModel, StepTerms, compose, stack

TRAITS = Traits()
PLACES = {name: machine_of(cluster_of(name, 8)) for name in ("p5.48xlarge", "p4de.24xlarge")}
LAYOUTS = (
    Layout(fsdp=64),
    Layout(fsdp=64, recompute="full"),
    Layout(fsdp=64, zero=1),
    Layout(fsdp=16, tp=4),
    Layout(pp=4, fsdp=16, zero=1),
    Layout(pp=2, fsdp=8, tp=4, zero=1, recompute="selective"),
    Layout(replicate=8, fsdp=8, micro_batch=2),
    Layout(fsdp=32, cp=2),
)
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b")


def all_terms(place: str) -> list[StepTerms]:
    """One step of every model, layout and batch: enough shapes to tell constants apart."""
    machine = PLACES[place]
    return [
        StepModel(model_preset(name), 4096, batch, machine.rates, machine.network, TRAITS).terms(layout)
        for name in MODELS
        for layout in LAYOUTS
        for batch in (128, 512)
    ]


def seconds_of(terms: Sequence[StepTerms], log_constants: np.ndarray) -> np.ndarray:
    return np.asarray(compose(stack(terms), np.exp(log_constants)).step_seconds)


def rows_of(
    family: str, terms: Sequence[StepTerms], seconds: Sequence[float] | np.ndarray, generation: str = "hopper"
) -> list[FitRow[StepTerms]]:
    labels = effect_labels(family=family, release="1", gpu="H100-SXM", generation=generation, model="m", moe=False)
    return [
        FitRow(term, math.log(second), labels, prior_log(TRAITS)) for term, second in zip(terms, seconds, strict=True)
    ]


@pytest.fixture(scope="module")
def h100_terms() -> list[StepTerms]:
    return all_terms("p5.48xlarge")


def test_a_fit_predicts_what_known_constants_made(h100_terms: list[StepTerms]) -> None:
    """Half of the steps are measured with 2% noise; the others come out within it, and far better than the prior."""
    random = np.random.default_rng(7)
    truth = np.array(prior_log(TRAITS)) + np.array(SPREAD) * np.where(np.arange(len(NAMES)) % 2, 0.8, -0.8)
    true_seconds = seconds_of(h100_terms, truth)
    measured = true_seconds * np.exp(0.02 * random.standard_normal(len(true_seconds)))
    known, unknown = list(range(0, len(h100_terms), 2)), list(range(1, len(h100_terms), 2))
    fit = Fit(TRAINING_STEP, rows_of("ours", [h100_terms[i] for i in known], measured[known]))
    labels = rows_of("ours", [h100_terms[0]], [1.0])[0].labels
    errors = [abs(fit.predict(h100_terms[i], labels, prior_log(TRAITS)).seconds / true_seconds[i] - 1) for i in unknown]
    untold = np.abs(
        seconds_of([h100_terms[i] for i in unknown], np.array(prior_log(TRAITS))) / true_seconds[unknown] - 1
    )
    assert np.median(errors) < 0.015
    assert max(errors) < 0.06
    assert np.median(errors) < 0.3 * np.median(untold)


def test_constants_that_matter_most_are_found_again(h100_terms: list[StepTerms]) -> None:
    truth = np.array(prior_log(TRAITS))
    truth[INDEX["gemm_efficiency"]] = math.log(0.75)
    truth[INDEX["bubble"]] = math.log(2.4)
    fit = Fit(TRAINING_STEP, rows_of("ours", h100_terms, seconds_of(h100_terms, truth)))
    labels = rows_of("ours", [h100_terms[0]], [1.0])[0].labels
    found = np.exp(fit.constants(labels, prior_log(TRAITS)))
    assert found[INDEX["gemm_efficiency"]] == pytest.approx(0.75, rel=0.06)
    assert found[INDEX["bubble"]] == pytest.approx(2.4, rel=0.25)
    usual = math.exp(prior_log(TRAITS)[INDEX["fp8_efficiency"]])
    assert found[INDEX["fp8_efficiency"]] == pytest.approx(usual, rel=0.01)  # no row says anything about fp8
    # and it knows what it knows
    spread = np.sqrt(np.diag(fit.posterior(labels, prior_log(TRAITS))[1]))
    prior = np.array(SPREAD) * math.sqrt(sum(share**2 for share in LEVELS.values()))
    assert spread[INDEX["gemm_efficiency"]] < 0.7 * prior[INDEX["gemm_efficiency"]]
    assert spread[INDEX["fp8_efficiency"]] == pytest.approx(prior[INDEX["fp8_efficiency"]])


def test_80_percent_intervals_hold_80_percent(h100_terms: list[StepTerms]) -> None:
    """Worlds drawn from the model's own assumptions: the interval must be neither vain nor cowardly."""
    inside = total = 0
    random = np.random.default_rng(11)
    strength = math.sqrt(sum(share**2 for share in LEVELS.values()))
    scale = math.sqrt(sum(deviation**2 for deviation in SCALES.values()))
    labels = rows_of("ours", [h100_terms[0]], [1.0])[0].labels
    for _ in range(4):
        constants = np.array(prior_log(TRAITS)) + strength * np.array(SPREAD) * random.standard_normal(len(NAMES))
        noise = 0.035 * random.standard_normal(len(h100_terms))
        measured = seconds_of(h100_terms, constants) * np.exp(scale * random.standard_normal() + noise)
        chosen = random.permutation(len(h100_terms))
        fit = Fit(TRAINING_STEP, rows_of("ours", [h100_terms[i] for i in chosen[:8]], measured[chosen[:8]]))
        for i in chosen[8:]:
            step = fit.predict(h100_terms[i], labels, prior_log(TRAITS))
            inside += step.low <= measured[i] <= step.high
            total += 1
    assert 0.72 < inside / total < 0.92


def test_an_unknown_family_gets_a_wider_interval(h100_terms: list[StepTerms]) -> None:
    fit = Fit(TRAINING_STEP, rows_of("ours", h100_terms[::2], seconds_of(h100_terms[::2], np.array(prior_log(TRAITS)))))
    known = rows_of("ours", [h100_terms[1]], [1.0])[0].labels
    stranger = rows_of("theirs", [h100_terms[1]], [1.0])[0].labels
    other_card = rows_of("theirs", [h100_terms[1]], [1.0], generation="blackwell")[0].labels
    widths = [
        fit.predict(h100_terms[1], labels, prior_log(TRAITS)).log_deviation for labels in (known, stranger, other_card)
    ]
    assert widths[0] < 0.6 * widths[1]
    assert widths[1] < widths[2]


def test_a_row_with_more_unshared_spread_teaches_and_knows_less(h100_terms: list[StepTerms]) -> None:
    """A slow model with a wide own effect says little of the stack, and its own kind is predicted less surely."""
    slow = 1.3 * seconds_of(h100_terms[:1], np.array(prior_log(TRAITS)))
    (row,) = rows_of("ours", h100_terms[:1], slow)
    other = {**row.labels, "model": "ours/other", "group": "ours/H100-SXM/other"}
    fits = {factor: Fit(TRAINING_STEP, [replace(row, unshared=factor)]) for factor in (1.0, 4.0)}
    moved = [fit.predict(h100_terms[1], other, prior_log(TRAITS)).seconds for fit in fits.values()]
    assert moved[0] > 1.02 * moved[1]
    widths = [fits[4.0].predict(h100_terms[1], other, prior_log(TRAITS), unshared=u).log_deviation for u in (1.0, 4.0)]
    assert widths[1] > 1.1 * widths[0]


def test_more_rows_make_the_interval_narrower(h100_terms: list[StepTerms]) -> None:
    seconds = seconds_of(h100_terms, np.array(prior_log(TRAITS)))
    labels = rows_of("ours", [h100_terms[0]], [1.0])[0].labels
    widths = [
        Fit(TRAINING_STEP, rows_of("ours", h100_terms[1:count], seconds[1:count]))
        .predict(h100_terms[0], labels, prior_log(TRAITS))
        .log_deviation
        for count in (3, 8, 40)
    ]
    assert widths[0] > widths[1] > widths[2]


def test_one_family_says_little_of_another(h100_terms: list[StepTerms]) -> None:
    """A slow stack drags a stranger's prediction a little, and its own fully."""
    slow = 1.5 * seconds_of(h100_terms, np.array(prior_log(TRAITS)))
    fit = Fit(TRAINING_STEP, rows_of("ours", h100_terms[::2], slow[::2]))
    labels = [rows_of(family, [h100_terms[1]], [1.0])[0].labels for family in ("ours", "theirs")]
    ours, theirs = (fit.predict(h100_terms[1], label, prior_log(TRAITS)).seconds / slow[1] * 1.5 for label in labels)
    assert ours == pytest.approx(1.5, rel=0.05)
    assert 1.0 < theirs < 1.3


def test_an_empty_label_shares_nothing_with_another_empty_label(h100_terms: list[StepTerms]) -> None:
    """Two stacks that name no release, one half slower than the other, are not the same release."""

    def unnamed(family: str, terms: Sequence[StepTerms], seconds: np.ndarray) -> list[FitRow[StepTerms]]:
        nothing = {"release": "", "release-kind": ""}
        return [replace(row, labels={**row.labels, **nothing}) for row in rows_of(family, terms, seconds)]

    seconds = seconds_of(h100_terms, np.array(prior_log(TRAITS)))
    slow = unnamed("slow", h100_terms[:20], 1.5 * seconds[:20])
    usual = unnamed("usual", h100_terms[20:40], seconds[20:40])
    fit = Fit(TRAINING_STEP, [*slow, *usual])
    for rows, factor in ((slow, 1.5), (usual, 1.0)):
        step = fit.predict(h100_terms[44], rows[0].labels, prior_log(TRAITS))
        assert step.seconds == pytest.approx(factor * seconds[44], rel=0.05)


def test_one_wrong_row_does_not_drag_the_others(h100_terms: list[StepTerms]) -> None:
    seconds = seconds_of(h100_terms, np.array(prior_log(TRAITS)))
    labels = rows_of("ours", [h100_terms[0]], [1.0])[0].labels
    spoiled = seconds.copy()
    spoiled[10] *= 3.0
    clean, dirty = (
        Fit(TRAINING_STEP, rows_of("ours", h100_terms[2:], values[2:]))
        .predict(h100_terms[1], labels, prior_log(TRAITS))
        .seconds
        for values in (seconds, spoiled)
    )
    assert dirty == pytest.approx(clean, rel=0.03)


def test_order_does_not_matter() -> None:
    rows = [row_of(case) for case in corpus() if case.family in ("torchtitan", "nanotron", "fms-fsdp")]
    forwards, backwards = Fit(TRAINING_STEP, rows), Fit(TRAINING_STEP, rows[::-1])
    for row in rows[::8]:
        one, other = (fit.predict(row.terms, row.labels, row.prior_log) for fit in (forwards, backwards))
        assert one.seconds == pytest.approx(other.seconds, rel=1e-6)
        assert one.log_deviation == pytest.approx(other.log_deviation, rel=1e-6)


def test_removing_a_family_changes_its_predictions() -> None:
    cases = [case for case in corpus() if case.family in ("torchtitan", "nanotron", "llm-foundry")]
    everything = Fit(TRAINING_STEP, [row_of(case) for case in cases])
    without = Fit(TRAINING_STEP, [row_of(case) for case in cases if case.family != "nanotron"])
    for case in [case for case in cases if case.family == "nanotron"][::5]:
        row = row_of(case)
        known, unknown = (fit.predict(row.terms, row.labels, row.prior_log) for fit in (everything, without))
        assert abs(known.seconds / case.measured_step_seconds - 1) < abs(
            unknown.seconds / case.measured_step_seconds - 1
        )
        assert known.log_deviation < unknown.log_deviation


def test_the_derivative_is_the_derivative(h100_terms: list[StepTerms]) -> None:
    theta = np.tile(np.array(prior_log(TRAITS)), (len(h100_terms), 1))
    value, jacobian = linearise(TRAINING_STEP, stack(h100_terms), theta)
    moved = theta + 1e-3
    expected = value + 1e-3 * jacobian.sum(axis=1)
    assert np.log(compose(stack(h100_terms), np.exp(moved.T)).step_seconds) == pytest.approx(expected, abs=1e-5)


def test_a_composition_other_than_a_training_step_is_fitted() -> None:
    """Time to first token of two servers: seconds per prompt token and an overhead, seven prompt lengths measured."""
    first_token: Composition[Array] = Composition(
        stack=np.stack,
        seconds=lambda prompt_tokens, constants: constants[0] * prompt_tokens + constants[1],
        spread=(0.6, 0.8),
    )
    prior = (math.log(1e-4), math.log(0.02))
    truth = {"fast": (6e-5, 0.03), "slow": (1.8e-4, 0.012)}
    labels = {family: effect_labels(family=family, release="1", gpu="", generation="hopper") for family in truth}
    measured, held_out = [2**power for power in range(3, 17, 2)], [2**power for power in range(4, 17, 2)]
    random = np.random.default_rng(5)

    def measure(family: str, prompt_tokens: float) -> float:
        per_token, overhead = truth[family]
        return float((per_token * prompt_tokens + overhead) * math.exp(0.02 * random.standard_normal()))

    fit = Fit(
        first_token,
        [
            FitRow(np.array(tokens), math.log(measure(family, tokens)), labels[family], prior)
            for family in truth
            for tokens in measured
        ],
    )
    for family, constants in truth.items():
        assert np.exp(fit.constants(labels[family], prior)) == pytest.approx(constants, rel=0.1)
        for tokens in held_out:
            prediction = fit.predict(np.array(tokens), labels[family], prior)
            assert prediction.low < measure(family, tokens) < prediction.high
            unknown = fit.predict(np.array(tokens), {}, prior)
            assert prediction.log_deviation < 0.3 * unknown.log_deviation


def test_an_interval_is_the_80_percent_of_a_normal_distribution() -> None:
    step = Prediction(2.0, 0.1)
    assert (step.low * step.high, step.high / step.low) == pytest.approx((4.0, math.exp(2 * 0.1 * QUANTILE_80)))
    assert math.erf(QUANTILE_80 / math.sqrt(2)) == pytest.approx(0.8, abs=1e-4)
