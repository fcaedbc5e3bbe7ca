"""Read what is known of a model's samples: RUN/evaluation.json of `craton eval`, or accuracies that a user writes.

An entry of kind `sample` has plain samples; all others are measurements that predictions are shown beside.
Guarantees: PlanError in one line for a file that cannot be read, or holds no plain samples.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from craton.errors import CratonError
from craton.job.sections.strategy import BestOfStrategy, BudgetStrategy, VoteStrategy, parse_strategy
from craton.job.sections.suites import BUILT_IN_SUITES
from craton.nearest import did_you_mean
from craton.planning.setting import PlanError
from craton.planning.strategies.posterior import KnownAccuracy
from craton.planning.strategies.usage import SampleLengths, StrategyShape

EVALUATION = "evaluation.json"
PROBLEMS = "problems.jsonl"
PLAIN = "sample"  # the kind of an entry without a strategy
DEFAULT_PROBLEMS = 500  # where accuracies are given without it
_KEYS = ("pass_at", "majority_at", "problems", "samples", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class MeasuredRow:
    """A measured strategy."""

    shape: StrategyShape
    accuracy: float
    low: float | None = None
    high: float | None = None
    tokens_per_problem: float | None = None  # with the prompt once, as a plan counts them
    dollars_per_problem: float | None = None
    latency_seconds: float | None = None
    is_same_samples: bool = False  # estimated from the plain samples


@dataclass(frozen=True)
class SampleRecord:
    """What is known of a model's samples on a suite, and where it comes from."""

    known: KnownAccuracy
    lengths: SampleLengths | None
    title: str  # for people: suite and model, or where the numbers were given
    measured: tuple[MeasuredRow, ...] = ()
    seconds_per_token: float | None = None
    dollars_per_token: float | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)
    wanted: tuple[StrategyShape, ...] = ()  # strategies of the suite, beside the usual ones
    lengths_source: str = ""  # how the lengths are known, if they are not those of the samples


def read_record(path: Path) -> SampleRecord:
    """Read a run's folder, its evaluation.json, or a YAML file of accuracies."""
    if path.is_dir():
        path = path / EVALUATION
    if path.exists() and not path.is_file():
        raise PlanError(f"--eval {path}: is a device or a pipe; name the evaluation.json of a run")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        hint = "a suite, a run of `craton eval`, its evaluation.json, or a YAML file with pass_at"
        near = did_you_mean(path.name, BUILT_IN_SUITES)
        raise PlanError(f"--eval {path}: no such suite, run or file; name {hint}{near}") from None
    try:
        document = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)
    except (ValueError, yaml.YAMLError):
        raise PlanError(f"--eval {path}: neither JSON nor YAML; name the evaluation.json of a run") from None
    if not isinstance(document, dict):
        raise PlanError(f"--eval {path}: holds no mapping; name the evaluation.json of a run")
    if "strategies" not in document:
        return _of_user(document, f"--eval {path}")
    return _of_evaluation(document, path)


def parse_accuracy(text: str, num_problems: int | None = None) -> SampleRecord:
    """Read `1:0.55,4:0.7`: the share of problems with a correct answer among so many samples. `num_problems`: of the
    suite that it was measured on."""
    given: dict[int, float] = {}
    for part in text.split(","):
        samples, colon, share = part.partition(":")
        try:
            given[int(samples)] = float(share)
        except ValueError:
            colon = ""
        if not colon:
            raise PlanError(f"--accuracy {text!r}: {part!r} is not SAMPLES:SHARE; write e.g. 1:0.55,4:0.7")
    return _of_user({"pass_at": given, **({"problems": num_problems} if num_problems else {})}, "--accuracy")


def _of_user(document: Mapping[str, Any], where: str) -> SampleRecord:
    for key in document:
        if key not in _KEYS:
            raise PlanError(
                f"{where}: key {key!r} is not known; allowed: {', '.join(_KEYS)}{did_you_mean(str(key), _KEYS)}"
            )
    passes, votes = (_shares(document.get(key, {}), f"{where}: {key}") for key in ("pass_at", "majority_at"))
    if not passes:
        raise PlanError(f"{where}: pass_at is missing; write e.g. pass_at: {{1: 0.55, 4: 0.7}}")
    if any(later < earlier for earlier, later in zip(*_neighbours(passes), strict=True)):
        raise PlanError(
            f"{where}: pass_at falls with more samples, and a correct sample stays correct; check the numbers"
        )
    problems = _number(document.get("problems", DEFAULT_PROBLEMS), f"{where}: problems", 2)
    samples = (
        _number(document["samples"], f"{where}: samples", 1) if document.get("samples") else max((*passes, *votes))
    )
    notes = (
        [] if "problems" in document else [f"{DEFAULT_PROBLEMS} problems are assumed; give `problems` in a YAML file"]
    )
    lengths = None
    if "completion_tokens" in document:
        lengths = SampleLengths(
            float(_number(document.get("prompt_tokens", 0), f"{where}: prompt_tokens", 0)),
            float(_number(document["completion_tokens"], f"{where}: completion_tokens", 1)),
        )
    known = KnownAccuracy(problems, passes, votes, samples)
    return SampleRecord(known, lengths, "given accuracies", tuple(_from_samples(passes, votes)), notes=tuple(notes))


def _of_evaluation(document: Mapping[str, Any], path: Path) -> SampleRecord:
    try:
        entries = [entry for entry in document["strategies"] if entry.get("accuracy") is not None]
        plain = [entry for entry in entries if _is_plain(entry)]
        if not plain:
            raise PlanError(
                f"--eval {path}: holds no plain samples, only strategies; run `craton eval` with --samples 4"
            )
        entry = max(reversed(plain), key=lambda item: int(item["n"]))
        return _of_entry(document, entry, entries, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CratonError):
            raise
        raise PlanError(f"--eval {path}: is not an evaluation.json of this version; run `craton eval` again") from None


def _is_plain(entry: Mapping[str, Any]) -> bool:
    return bool(entry["strategy"]["kind"] == PLAIN)


def _of_entry(document: Mapping[str, Any], entry: Mapping[str, Any], entries: list[Any], path: Path) -> SampleRecord:
    passes = _shares(entry.get("pass_at") or {1: entry["accuracy"]}, f"--eval {path}: pass_at")
    votes = _shares(entry.get("majority_at", {}), f"--eval {path}: majority_at")
    problems = int(entry.get("num_scored") or document["num_problems"])
    if problems < 1 or int(entry["n"]) < 1:
        raise ValueError("there is nothing to learn from")
    counts = _counts(path.parent / PROBLEMS, entry.get("settings"))
    known = KnownAccuracy(problems, passes, votes, int(entry["n"]), counts if sum(counts.values()) == problems else {})
    lengths = None
    if entry.get("completion_tokens_mean"):
        lengths = SampleLengths(float(entry.get("prompt_tokens_mean") or 0.0), float(entry["completion_tokens_mean"]))
    measured = [_row(StrategyShape("sample"), entry), *_from_samples(passes, votes)]
    step = entry.get("checkpoint")
    measured += [_measured(other) for other in entries if not _is_plain(other) and other.get("checkpoint") == step]
    tokens = entry.get("completion_tokens_per_problem") or _product(entry.get("completion_tokens_mean"), entry["n"])
    return SampleRecord(
        known,
        lengths,
        f"{document.get('model', 'model')} on {document.get('suite', 'suite')}",
        tuple(measured),
        _ratio(entry.get("seconds_per_problem"), tokens),
        _ratio(entry.get("dollars_per_problem"), tokens),
    )


def _from_samples(passes: Mapping[int, float], votes: Mapping[int, float]) -> list[MeasuredRow]:
    return [
        MeasuredRow(StrategyShape(kind, samples), share, is_same_samples=True)
        for kind, found in (("best_of", passes), ("vote", votes))
        for samples, share in found.items()
        if samples > 1
    ]


def _measured(entry: Mapping[str, Any]) -> MeasuredRow:
    return _row(shape_of(entry["strategy"], "--eval: strategy"), entry, entry.get("latency_seconds_mean"))


def _row(shape: StrategyShape, entry: Mapping[str, Any], latency_seconds: float | None = None) -> MeasuredRow:
    prompt, completions = entry.get("prompt_tokens_mean"), entry.get("completion_tokens_per_problem")
    return MeasuredRow(
        shape,
        float(entry["accuracy"]),
        entry.get("low"),
        entry.get("high"),
        None if completions is None else (prompt or 0.0) + completions,
        entry.get("dollars_per_problem"),
        latency_seconds,
    )


def shape_of(value: object, where: str = "strategy") -> StrategyShape:
    """Return the shape of a strategy as job files, requests and evaluations write it; StrategyError if it is none."""
    strategy = parse_strategy(value, where)
    if isinstance(strategy, VoteStrategy):
        return StrategyShape("vote", strategy.n, strategy.stop)
    if isinstance(strategy, BestOfStrategy):
        return StrategyShape("best_of", strategy.n, score=strategy.score)
    if isinstance(strategy, BudgetStrategy):
        return StrategyShape("budget", at_least=strategy.at_least, at_most=strategy.at_most or 0)
    tokens = strategy.step.tokens or 0
    return StrategyShape(
        strategy.kind, strategy.n, score=strategy.score, width=strategy.width, depth=strategy.depth, step_tokens=tokens
    )


def _counts(path: Path, settings: object) -> dict[tuple[int, int], int]:
    """Return (correct, samples) → problems, of the newest line of each problem with these settings; a torn last line is
    skipped."""
    newest: dict[object, tuple[int, int]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            result = json.loads(line)
            if settings is not None and result.get("settings") != settings:
                continue
            newest[result.get("digest", result["problem"])] = _verdicts(result)
        except (ValueError, AttributeError, TypeError, KeyError):
            continue
    return dict(Counter(verdicts for verdicts in newest.values() if verdicts[1]))


def _verdicts(result: Mapping[str, Any]) -> tuple[int, int]:
    samples = result.get("samples")
    if isinstance(samples, list):
        found = [bool(sample["is_right"]) for sample in samples if sample.get("is_right") is not None]
        return sum(found), len(found)
    return int(result["correct"]), int(samples or 0)


def _shares(found: object, where: str) -> dict[int, float]:
    if not isinstance(found, Mapping):
        raise PlanError(f"{where}: {found!r} is not a mapping of samples to shares; write e.g. {{1: 0.55, 4: 0.7}}")
    result = {}
    for samples, share in found.items():
        size = _number(samples, where, 1)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise PlanError(f"{where}: {share!r} at {size} is not a share; write a number from 0 to 1, e.g. 0.55")
        result[size] = float(share)
    return dict(sorted(result.items()))


def _number(value: object, where: str, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if isinstance(value, float) and value == int(value):
        number = int(value)
    if number < least:
        raise PlanError(f"{where}: {value!r} is not a whole number of {least} or more")
    return number


def _neighbours(shares: Mapping[int, float]) -> tuple[list[float], list[float]]:
    values = [shares[size] for size in sorted(shares)]
    return values[:-1], values[1:]


def _product(value: float | None, times: float) -> float | None:
    return value * times if value else None


def _ratio(value: float | None, tokens: float | None) -> float | None:
    return value / tokens if value is not None and tokens and math.isfinite(value) else None
