"""Results of single problems, and the file that holds them: RUN/problems.jsonl, one line a problem.

A line is written once all samples of a problem are verified. An evaluation that ends early loses only the problems in
flight; one that continues reuses every line with the same settings and the same problem.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from craton.ml.evaluation.errors import EvaluationError
from craton.telemetry.files import STORAGE_ERRORS, LineWriter, read_lines

PROBLEMS_FILE = "problems.jsonl"
MAX_TEXT = 20_000  # characters of a stored completion
MAX_TEXTS = 500_000  # of all completions of a problem
WAITING_BYTES = 1 << 30  # of results in memory while the disk is full: more than all problems in flight have


@dataclass(frozen=True)
class SampleResult:
    """One answer: that of a sample, or what a strategy has chosen. `is_right` None: no verdict, see `error`."""

    text: str = ""
    answer: str | None = None  # what majority@k counts
    reward: float | None = None
    is_right: bool | None = None
    tokens: int = 0
    finish: str = ""
    error: str = ""


@dataclass(frozen=True)
class ProblemResult:
    """All samples of one problem under one setting. `settings` and `digest` name what they are results of."""

    settings: str
    problem: int
    digest: str
    samples: tuple[SampleResult, ...]
    group: str = ""
    prompt_tokens: int | None = None  # for each request again; None: the endpoint does not say
    completion_tokens: int = 0  # of all samples, chosen and discarded
    began: float = 0.0  # epoch seconds
    seconds: float = 0.0
    seed: int = 0
    num_samples: int = 1  # generated, also by a strategy
    report: Mapping[str, Any] = field(default_factory=dict)  # of a strategy

    @property
    def verdicts(self) -> list[bool]:
        """Whether each sample with a verdict is right."""
        return [sample.is_right for sample in self.samples if sample.is_right is not None]

    @property
    def share(self) -> float | None:
        """The share of right samples, of those with a verdict; None if there is none."""
        verdicts = self.verdicts
        return sum(verdicts) / len(verdicts) if verdicts else None

    @property
    def num_failures(self) -> int:
        """Samples without a verdict."""
        return sum(sample.is_right is None for sample in self.samples)

    def to_line(self) -> bytes:
        limit = min(MAX_TEXT, MAX_TEXTS // max(1, len(self.samples)))
        document = asdict(self)
        for sample in document["samples"]:
            sample["text"] = sample["text"][:limit]
        return json.dumps(document, ensure_ascii=True, allow_nan=False, default=str).encode()

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> ProblemResult | None:
        """Return the result in a line; None if it has another form."""
        try:
            samples = tuple(SampleResult(**sample) for sample in line["samples"])
            return cls(**{**line, "samples": samples})
        except (KeyError, TypeError):
            return None


class ProblemFile:
    """The results of a run, read once and appended to."""

    def __init__(self, path: Path) -> None:
        self._writer = LineWriter(path, WAITING_BYTES)
        self._found = {(result.settings, result.digest): result for result in read_results(path)}

    def find(self, settings: str, digest: str) -> ProblemResult | None:
        return self._found.get((settings, digest))

    def add(self, result: ProblemResult) -> None:
        self._writer.append([result.to_line()])
        self._found[result.settings, result.digest] = result

    def is_written(self) -> bool:
        """Try to write the results that wait for the disk; EvaluationError if it is no matter of waiting."""
        if self._writer.flush():
            return True
        error = self._writer.error
        if error is not None and error.errno not in STORAGE_ERRORS:
            raise EvaluationError(
                f"{self._writer.path}: results cannot be written ({error.strerror}); make it writable"
            )
        return False

    def close(self) -> None:
        self._writer.close()


def read_results(path: Path) -> Iterable[ProblemResult]:
    """Yield the results in a file, without torn or foreign lines."""
    offset = 0
    while True:
        lines, following = read_lines(path, offset)
        for line in lines:
            if (result := ProblemResult.from_line(line)) is not None:
                yield result
        if following == offset:
            return
        offset = following


def settings_digest(*parts: object) -> str:
    """Return a short name of what results depend on beside their problem."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def busy_seconds(results: Sequence[ProblemResult]) -> float:
    """Return for how long at least one of these problems was in work; a pause between two starts does not count."""
    total, end = 0.0, float("-inf")
    for began, seconds in sorted((result.began, result.seconds) for result in results):
        total += max(0.0, began + seconds - max(began, end))
        end = max(end, began + seconds)
    return total
