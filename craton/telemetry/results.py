"""The results of post-training in a few words, the same in logs, tables, the live view and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from craton.formatting import amount, digits, percent, score

_SCORES = {
    "reward": "reward",
    "reward_accuracy": "accuracy",
    "reward_margin": "margin",
}
_SUITE = "evaluation_accuracy"
_SUITE_ENDS = ("evaluation_accuracy_low", "evaluation_accuracy_high")
_VALIDATED = ("reward", "reward_accuracy")
_TERM_REWARD, _TERM_FAILURES = "term_reward/", "term_failure_share/"  # before the name of a term
_DETAILS = {  # title and how its number is written
    "completion_tokens": ("length", amount),
    "kl": ("KL", digits),
    "entropy": ("entropy", score),
    "staleness": ("staleness", score),
    "rollout_tokens_per_second": ("rollout tokens/s", amount),
    "rollout_idle_share": ("rollouts idle", percent),
    "trainer_idle_share": ("trainer idle", percent),
    "evaluation_failure_share": ("no verdict", percent),
    "verifier_failure_share": ("verifier failures", percent),  # the last one: its worst step follows
}


def result_words(results: Mapping[str, float]) -> list[str]:
    """Return what the run learns: `reward 0.12`, or `accuracy 0.71` and `margin 0.30`; nothing for other kinds. Names
    are those of the metrics, without `run_`."""
    return [f"{title} {text}" for title, text in result_scores(results)]


def result_scores(results: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the same as title and text."""
    scores = [(title, score(results[name])) for name, title in _SCORES.items() if name in results]
    validated = [(f"validation_{name}", _SCORES[name]) for name in _VALIDATED]
    scores += [(f"validation {title}", score(results[name])) for name, title in validated if name in results]
    if _SUITE in results:
        scores.append(("suite accuracy", with_interval(results[_SUITE], *(results.get(end) for end in _SUITE_ENDS))))
    return scores


def with_interval(value: float, low: float | None, high: float | None) -> str:
    """`0.46 (0.41 to 0.51)`."""
    return score(value) + (f" ({score(low)} to {score(high)})" if low is not None and high is not None else "")


def result_details(results: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the other numbers of a run of reinforcement learning, as title and text; first the terms of the reward,
    if there are several."""
    details = [(label, f"{score(value)}{_failed(results, label)}") for label, value in _terms(results)]
    details += [(title, write(results[name])) for name, (title, write) in _DETAILS.items() if name in results]
    share, worst = (results.get(f"{which}verifier_failure_share") for which in ("", "worst_"))
    if share and worst and worst > share:
        title, text = details.pop()
        details.append((title, f"{text}, worst step {percent(worst)}"))
    return details


def _terms(results: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the terms of the reward and their mean values; NaN for one that has failed on all samples."""
    names = [name.removeprefix(_TERM_FAILURES) for name in results if name.startswith(_TERM_FAILURES)]
    return [(name, results.get(f"{_TERM_REWARD}{name}", math.nan)) for name in names]


def _failed(results: Mapping[str, float], term: str) -> str:
    share = results[f"{_TERM_FAILURES}{term}"]
    return f" ({percent(share)} failed)" if share else ""
