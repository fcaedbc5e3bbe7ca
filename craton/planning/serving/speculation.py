"""Speculative decoding with a draft model: expected tokens per step, speed-up, and the best number of draft tokens.

A step drafts γ tokens and verifies them with the last one. Each is accepted with probability α if those before it are,
and the verifying model gives one token more, so a step gives

    E[tokens] = (1 - α^(γ+1)) / (1 - α)                      (Leviathan, Kalman, Matias 2023, arXiv:2211.17192, eq. 1)
    speed-up  = E[tokens] · T(1) / (γ · t + T(γ + 1) + h)    (theorem 3.8 there, with T(γ + 1) = T(1) and h = 0)

with the step time T(n) of the model for n tokens per request, t of the draft model for one, and the host time h of a
step whose output must be known before the next one starts. Draft and model share their sampling noise, for which
α ≥ (1 - D) / (1 + D) with the total variation distance D of their distributions (Daliri, Musco, Suresh 2024,
arXiv:2408.07978).

Guarantees: pure functions of plain numbers; more acceptance never makes a step give fewer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from craton.planning.rates import machine
from craton.planning.serving.own_engine import draft_steps, own_steps, roofline_steps
from craton.planning.serving.served_model import ServedModel
from craton.planning.serving.step_times import ServedSteps

AUTO_LENGTHS = (1, 2, 3, 4, 6, 8)  # numbers of draft tokens to choose from
ASSUMED_ACCEPTANCE = 0.7  # of a draft token, before any was measured
# Leviathan et al., section 4: between 0.5 and 0.9 for most of their pairs of models.
PUBLISHED_ACCEPTANCE = (0.5, 0.9)
# One request of an 8B shape: 243 tokens/s without drafts, 215 with drafts that propose nothing (one H200, 2026-11-15,
# docs/measurements.md): the host reads every step before it starts the next one.
HOST_SECONDS = 0.0005


@dataclass(frozen=True)
class SpeculationCosts:
    """Step times of a model and of its draft model, and the host's time of a step with drafts."""

    model: ServedSteps
    draft: ServedSteps
    host_seconds: float = 0.0

    def plain_seconds(self, batch: int, context: float) -> float:
        """Return the time of a decode step without drafts."""
        return float(self.model.decode_seconds(float(batch), context))

    def draft_seconds(self, batch: int, context: float) -> float:
        """Return the time in which the draft model makes one token for each request."""
        return float(self.draft.decode_seconds(float(batch), context))

    def step_seconds(self, batch: int, context: float, length: Any) -> Any:
        """Return the time of a step with `length` draft tokens of each request; of an array of lengths, all times."""
        verifying = self.model.verify_seconds(float(batch), context, length)
        return length * self.draft_seconds(batch, context) + verifying + self.host_seconds


def speculation_costs(model: ServedSteps, draft: ServedSteps, *, is_cpu: bool) -> SpeculationCosts:
    """Return the costs of drafts in a server. A CPU has no host beside it that works ahead."""
    return SpeculationCosts(model, draft, 0.0 if is_cpu else HOST_SECONDS)


def roofline_costs(model: ServedModel, draft: ServedModel) -> SpeculationCosts:
    """Return costs at the roofline of an H200, where neither the machine nor the engine's profile is known."""
    known = machine("H200-SXM", 1, 1, 1.0, 0)
    return SpeculationCosts(roofline_steps(own_steps(model, known)), roofline_steps(draft_steps(draft, known)))


def expected_tokens(acceptance: float, length: Any) -> Any:
    """Return the mean number of tokens that a step with `length` draft tokens gives a request."""
    if acceptance >= 1.0:
        return length + 1.0
    return (1.0 - acceptance ** (length + 1.0)) / (1.0 - acceptance)


def speculation_speedup(acceptance: float, length: int, costs: SpeculationCosts, batch: int, context: float) -> float:
    """Return tokens per second with drafts over those without; without draft tokens 1."""
    if not length:
        return 1.0
    step = costs.step_seconds(batch, context, length)
    return float(expected_tokens(acceptance, length) * costs.plain_seconds(batch, context) / step)


def best_draft_length(
    acceptance: float, costs: SpeculationCosts, batch: int, context: float, lengths: Sequence[int] = AUTO_LENGTHS
) -> int:
    """Return the number of draft tokens with the largest speed-up; 0 if none is faster than no drafts."""
    tried = np.array(lengths, float)
    rates = expected_tokens(acceptance, tried) / costs.step_seconds(batch, context, tried)
    best = int(np.argmax(rates))
    return lengths[best] if float(rates[best]) * costs.plain_seconds(batch, context) > 1.0 else 0


@dataclass(frozen=True)
class SpeculationPlan:
    """Drafts of one request of the plan's mean context, with an assumed acceptance and its published range."""

    model: str  # the draft model
    draft_tokens: int  # per step; 0: drafts would cost more than they save
    is_auto: bool
    acceptance: float
    acceptance_low: float
    acceptance_high: float
    tokens_per_step: float
    speedup: float
    speedup_low: float
    speedup_high: float
    single_tokens_per_second: float


def plan_speculation(
    model: str, costs: SpeculationCosts, context: float, length: int | None, acceptance: float = ASSUMED_ACCEPTANCE
) -> SpeculationPlan:
    """Plan the drafts of one request; `length` None: the best number of draft tokens, as the engine chooses it."""

    def speedup(rate: float) -> float:
        drafted = best_draft_length(rate, costs, 1, context) if length is None else length
        return speculation_speedup(rate, drafted, costs, 1, context)

    low, high = min(acceptance, PUBLISHED_ACCEPTANCE[0]), max(acceptance, PUBLISHED_ACCEPTANCE[1])
    chosen = best_draft_length(acceptance, costs, 1, context) if length is None else length
    return SpeculationPlan(
        model=model,
        draft_tokens=chosen,
        is_auto=length is None,
        acceptance=acceptance,
        acceptance_low=low,
        acceptance_high=high,
        tokens_per_step=expected_tokens(acceptance, chosen),
        speedup=speedup(acceptance),
        speedup_low=speedup(low),
        speedup_high=speedup(high),
        single_tokens_per_second=speedup(acceptance) / costs.plain_seconds(1, context),
    )


class AcceptanceEstimate:
    """A running estimate of α from verified drafts.

    A draft with a rejected token tells of the accepted tokens and of that one; what follows it was never tested. Older
    drafts count less, so that at most `window` tested tokens carry weight."""

    def __init__(self, value: float = ASSUMED_ACCEPTANCE, weight: float = 16.0, window: float = 1024.0) -> None:
        self._accepted, self._tested, self._window = value * weight, weight, window

    @property
    def value(self) -> float:
        return self._accepted / self._tested

    def record(self, accepted: int, length: int) -> None:
        """Count a draft of `length` tokens of which the first `accepted` were accepted."""
        self._accepted += accepted
        self._tested += accepted + (accepted < length)
        if self._tested > self._window:
            share = self._window / self._tested
            self._accepted, self._tested = self._accepted * share, self._tested * share
