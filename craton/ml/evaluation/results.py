"""The numbers of an evaluation: RUN/evaluation.json, from the results of its problems alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from craton.ml.evaluation.errors import EvaluationError
from craton.ml.evaluation.records import PROBLEMS_FILE, ProblemResult, busy_seconds, read_results
from craton.ml.evaluation.statistics import (
    PairedComparison,
    accuracy_interval,
    compare_paired,
    majority_at,
    pass_at,
    powers_of_two,
)
from craton.telemetry import RunDirectory, read_json

EVALUATION_FILE = "evaluation.json"
NUM_ERRORS = 3  # that are shown


@dataclass(frozen=True)
class EvaluationPrices:
    """Dollars per million tokens, or per hour of the evaluation's own node; None: unknown."""

    prompt: float | None = None
    completion: float | None = None
    per_hour: float | None = None

    def dollars(self, results: Sequence[ProblemResult]) -> float | None:
        """Return what these results cost; None without prices or token counts."""
        if self.prompt is not None and self.completion is not None:
            counts = [result.prompt_tokens for result in results]
            prompts = sum(count for count in counts if count is not None)
            if None in counts:
                return None
            completions = sum(result.completion_tokens for result in results)
            return (self.prompt * prompts + self.completion * completions) / 1e6
        return None if self.per_hour is None else self.per_hour * busy_seconds(results) / 3600.0


def summarize_results(
    results: Sequence[ProblemResult], strategy: Mapping[str, Any], n: int, prices: EvaluationPrices, num_problems: int
) -> dict[str, Any]:
    """Return an entry of evaluation.json. Accuracy is over problems with at least one verdict. What is counted per
    problem is for one answer, as the accuracy is: a plain sample, or all that a strategy has sampled for its answer."""
    scored = [result for result in results if result.share is not None]
    shares = [result.share for result in scored if result.share is not None]
    is_single = all(len(result.samples) == 1 for result in scored)
    low, high = accuracy_interval(shares, is_single) if shares else (None, None)
    samples = [sample for result in results for sample in result.samples]
    failed = [sample for sample in samples if sample.is_right is None]
    errors = Counter(sample.error or "no reason given" for sample in failed).most_common(NUM_ERRORS)
    prompts = [result.prompt_tokens for result in results if result.prompt_tokens is not None]
    completion_tokens = sum(result.completion_tokens for result in results)
    num_generated = sum(result.num_samples for result in results)
    seconds, dollars = busy_seconds(results), prices.dollars(results)
    solved, count = sum(sum(result.verdicts) for result in results), len(samples)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        "strategy": dict(strategy),
        "n": n,
        "accuracy": _mean(shares),
        "low": low,
        "high": high,
        "interval": "wilson" if is_single else "bootstrap over problems",
        "mean_reward": _mean(rewards),
        "num_problems": num_problems,
        "num_evaluated": len(results),
        "num_scored": len(scored),
        "num_failures": len(failed),
        "failure_share": len(failed) / len(samples) if samples else 0.0,
        "errors": [{"error": error, "count": number} for error, number in errors],
        "pass_at": _pass_at(scored),
        "majority_at": _majority_at(scored),
        "groups": _groups(scored),
        "tokens_per_problem": (completion_tokens + sum(prompts)) / count if count else None,
        "prompt_tokens_mean": sum(prompts) / num_generated if prompts else None,
        "completion_tokens_mean": completion_tokens / num_generated if num_generated else None,
        "completion_tokens_per_problem": completion_tokens / count if count else None,
        "tokens_per_solved": completion_tokens / solved if solved else None,
        "seconds": seconds,
        "seconds_per_problem": seconds / count if count else None,
        "seconds_per_solved": seconds / solved if solved else None,
        "latency_seconds_mean": _mean([result.seconds for result in results]),
        "dollars": dollars,
        "dollars_per_problem": dollars / count if dollars is not None and count else None,
        "dollars_per_solved": dollars / solved if dollars is not None and solved else None,
        "truncated_share": _mean([float(sample.finish == "length") for sample in samples]),
    }


def read_evaluation(run: RunDirectory) -> dict[str, Any]:
    """Return the evaluation.json of a run; EvaluationError if it has none."""
    document = read_json(run.path / EVALUATION_FILE)
    if not document.get("strategies"):
        raise EvaluationError(f"{run.name} has no results of an evaluation; `craton eval MODEL SUITE` makes them")
    return document


def compare_runs(first: RunDirectory, second: RunDirectory) -> list[dict[str, Any]]:
    """Compare two evaluations on the problems that both have, for the first setting of each, and for every further one
    that both have. EvaluationError if they share no problem."""
    ours, theirs = read_evaluation(first)["strategies"], read_evaluation(second)["strategies"]
    pairs = [(ours[0], theirs[0])]
    for entry in ours[1:]:
        same = [other for other in theirs[1:] if _key(other) == _key(entry)]
        pairs += [(entry, same[0])] if same else []
    return [
        {"strategy": entry["strategy"], "words": entry["words"], **_compared(first, entry, second, other)}
        for entry, other in pairs
    ]


def write_evaluation(path: Path, document: Mapping[str, Any]) -> None:
    from craton.telemetry.files import replace_text

    replace_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _compared(
    first: RunDirectory, entry: Mapping[str, Any], second: RunDirectory, other: Mapping[str, Any]
) -> dict[str, Any]:
    ours, theirs = _shares(first, entry), _shares(second, other)
    shared = [digest for digest in ours if digest in theirs]
    if not shared:
        raise EvaluationError(
            f"{first.name} and {second.name} have no problem in common; evaluate both with the same suite"
        )
    found: PairedComparison = compare_paired([ours[name] for name in shared], [theirs[name] for name in shared])
    accuracies = [fmean(side[name] for name in shared) for side in (ours, theirs)]
    return {"first": first.name, "second": second.name, "accuracies": accuracies, **asdict(found)}


def _shares(run: RunDirectory, entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        result.digest: result.share
        for result in read_results(run.path / PROBLEMS_FILE)
        if result.settings == entry["settings"] and result.share is not None
    }


def _key(entry: Mapping[str, Any]) -> tuple[str, Any]:
    return json.dumps(entry["strategy"], sort_keys=True), entry.get("checkpoint")


def _pass_at(scored: Sequence[ProblemResult]) -> dict[str, float]:
    """Return k → pass@k, for each k that every problem has samples for."""
    fewest = min((len(result.verdicts) for result in scored), default=0)
    return {
        str(k): fmean(pass_at(len(result.verdicts), sum(result.verdicts), k) for result in scored)
        for k in (powers_of_two(fewest) if fewest else [])
    }


def _majority_at(scored: Sequence[ProblemResult]) -> dict[str, float]:
    """Return k → majority@k, likewise; empty for a single sample."""
    fewest = min((len(result.verdicts) for result in scored), default=0)
    if fewest < 2:
        return {}
    kept = [[sample for sample in result.samples if sample.is_right is not None] for result in scored]
    return {
        str(k): fmean(
            majority_at([sample.answer for sample in samples], [bool(sample.is_right) for sample in samples], k)
            for samples in kept
        )
        for k in powers_of_two(fewest)
    }


def _groups(scored: Sequence[ProblemResult]) -> dict[str, dict[str, float]]:
    """Return the accuracy of each group of problems, if they have groups."""
    shares: dict[str, list[float]] = defaultdict(list)
    for result in scored:
        if result.group and result.share is not None:
            shares[result.group].append(result.share)
    return {group: {"accuracy": fmean(values), "num_problems": len(values)} for group, values in shares.items()}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
