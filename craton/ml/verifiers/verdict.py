"""Samples, verdicts, and what a step's failures mean for the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from craton.formatting import counted, percent
from craton.ml.verifiers.errors import VerifierError

WARNING_SHARE = 0.05
FATAL_SHARE = 0.5
NUM_ERRORS = 3  # that a message shows


@dataclass(frozen=True)
class VerifierSample:
    """A completion, with what it answers: the prompt, the row of the data, and the turns of an environment."""

    prompt: str | list[dict[str, Any]]
    completion: str
    row: Mapping[str, Any]
    transcript: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class SampleVerdict:
    """A reward, or None with the error: a crash, a timeout or an unreadable answer is no 0."""

    reward: float | None
    parts: dict[str, float | None] = field(default_factory=dict)  # by term, without its weight
    error: str = ""
    seconds: float = 0.0


def judge_failures(verdicts: Sequence[SampleVerdict]) -> str:
    """Return a warning if more than 5% of a step's samples have no verdict, else an empty text; VerifierError if more
    than half have none."""
    errors = [verdict.error for verdict in verdicts if verdict.reward is None]
    if not verdicts or len(errors) <= WARNING_SHARE * len(verdicts):
        return ""
    shown = list(dict.fromkeys(error or "no reason given" for error in errors))[:NUM_ERRORS]
    first = "; ".join(shown)
    share = f"{len(errors)} of {counted(len(verdicts), 'sample')} ({percent(len(errors) / len(verdicts))})"
    if len(errors) > FATAL_SHARE * len(verdicts):
        raise VerifierError(f"{share} got no verdict, and more than half end the run; first errors: {first}")
    return f"{share} got no verdict and carry no loss; first errors: {first}"
