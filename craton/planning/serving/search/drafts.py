"""Speculative decoding in a plan of a load: steps with draft tokens, and what they gain in the chosen deployment.

Where the job states no acceptance, it is assumed. The published range of acceptances counts as an 80% interval, and
widens that of all step times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from craton.job import Job
from craton.planning.fitting import QUANTILE_80
from craton.planning.rates import MachineRates
from craton.planning.serving.own_engine import draft_steps
from craton.planning.serving.profile import OWN_ENGINE, EngineProfile
from craton.planning.serving.search.result import Deployment, PlannedDrafts
from craton.planning.serving.served_model import ServedModel
from craton.planning.serving.speculation import (
    ASSUMED_ACCEPTANCE,
    AUTO_LENGTHS,
    HOST_SECONDS,
    PUBLISHED_ACCEPTANCE,
    expected_tokens,
)
from craton.planning.serving.step_times import ServedSteps

NGRAMS = "n-grams"


@dataclass(frozen=True)
class SpeculativeSteps:
    """Steps that each give a request one token, on average: a share of a step that verifies draft tokens. Of several
    numbers of draft tokens, each step has the fastest, as the engine chooses it. A prompt takes as long as without."""

    steps: Any
    lengths: tuple[int, ...]
    acceptance: float
    host_seconds: float  # of a step with drafts
    draft: ServedSteps | None = None  # None: n-grams of the text, which cost nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def decode_seconds(self, batch: Any, context: Any) -> Any:
        return reduce(np.minimum, self.seconds_of_lengths(batch, context, self.acceptance))

    def mixed_seconds(self, batch: Any, context: Any, tokens: Any, prompt: Any) -> Any:
        added = self.steps.mixed_seconds(batch, context, tokens, prompt) - self.steps.decode_seconds(batch, context)
        return self.decode_seconds(batch, context) + np.maximum(added, 0.0)

    def seconds_of_lengths(self, batch: Any, context: Any, acceptance: float) -> list[Any]:
        """Return the seconds per token of a request with each number of draft tokens."""
        return [self._seconds(length, batch, context, acceptance) for length in self.lengths]

    def _seconds(self, length: int, batch: Any, context: Any, acceptance: float) -> Any:
        whole = self.steps.verify_seconds(batch, context, length)
        if length:
            whole = whole + self.host_seconds
        if length and self.draft is not None:
            whole = whole + length * self.draft.decode_seconds(batch, context)
        return whole / expected_tokens(acceptance, length)


def speculative_steps(
    job: Job, machine: MachineRates, profile: EngineProfile, steps: Any, acceptance: float | None
) -> SpeculativeSteps:
    """Return the steps of a server with the drafts of the job."""
    assert job.serve is not None
    draft = None
    if job.draft_shape is not None:
        model = ServedModel(job.draft_shape, job.draft_precision, job.serve.kv_precision)
        draft = draft_steps(model, machine, profile).scaled(1.0)
    lengths = (0, *AUTO_LENGTHS) if job.serve.draft_auto else (job.serve.draft_tokens,)
    host_seconds = HOST_SECONDS if profile.engine == OWN_ENGINE else 0.0
    accepted = ASSUMED_ACCEPTANCE if acceptance is None else acceptance
    return SpeculativeSteps(steps, lengths, accepted, host_seconds, draft)


def acceptance_deviation(steps: SpeculativeSteps, batch: float, context: float) -> float:
    """Return the standard deviation of log(step time) because the acceptance is assumed; of the first candidate."""
    low, high = (
        min(float(np.ravel(seconds)[0]) for seconds in steps.seconds_of_lengths(batch, context, acceptance))
        for acceptance in PUBLISHED_ACCEPTANCE
    )
    return abs(math.log(low / high)) / (2.0 * QUANTILE_80)


def planned_drafts(job: Job, steps: Any, context: float, stated: float | None, chosen: Deployment) -> PlannedDrafts:
    """Return what the drafts gain in the chosen deployment; `steps`: of its replica alone."""
    assert job.serve is not None
    batch = max(chosen.decoding / chosen.layout.replicas, 1.0)
    plain = float(np.ravel(steps.steps.decode_seconds(batch, context))[0])

    def at(acceptance: float) -> tuple[int, float]:
        seconds = [float(np.ravel(each)[0]) for each in steps.seconds_of_lengths(batch, context, acceptance)]
        best = int(np.argmin(seconds))
        return steps.lengths[best], plain / seconds[best]

    accepted = steps.acceptance
    low, high = PUBLISHED_ACCEPTANCE if stated is None else (accepted, accepted)
    tokens, speedup = at(accepted)
    return PlannedDrafts(
        model=job.draft_shape.name if job.draft_shape is not None else NGRAMS,
        draft_tokens=tokens,
        is_auto=job.serve.draft_auto,
        acceptance=accepted,
        acceptance_low=low,
        acceptance_high=high,
        is_assumed=stated is None,
        speedup=speedup,
        speedup_low=at(low)[1],
        speedup_high=at(high)[1],
    )
