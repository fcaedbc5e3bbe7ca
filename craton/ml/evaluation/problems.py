"""The problems of a suite: rows of a file or of a generator, with their prompts, in a fixed order.

A problem is a function of the suite and its data alone. Its digest names its prompt, row and verifiers, so that a
result is never reused for another problem.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from craton.formatting import counted
from craton.job.sections.suites import Suite, SuiteData, SuiteTemplate
from craton.ml.data import DataError
from craton.ml.data.rows import read_rows
from craton.ml.evaluation.errors import EvaluationError
from craton.ml.evaluation.reasoning import reasoning_rows

DEFAULT_PROBLEMS = 500  # of a generator
GROUP = "group"  # field of a row by which accuracies are also reported
SEED_BITS = 20  # seeds of one problem; as many problems may be in a suite
_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class SuiteProblem:
    """One problem: a text or the messages of a chat, and the row that its verifiers read."""

    index: int
    prompt: str | tuple[Mapping[str, Any], ...]
    row: Mapping[str, Any]
    digest: str

    @property
    def group(self) -> str:
        return str(self.row.get(GROUP, ""))

    @cached_property
    def content(self) -> str | list[dict[str, Any]]:
        """The prompt as verifiers get it."""
        return self.prompt if isinstance(self.prompt, str) else [dict(message) for message in self.prompt]

    def seed(self, suite_seed: int) -> int:
        """Return the seed of its first sample. Sample i adds i, of fewer than 2^20: no two problems share one."""
        return (suite_seed << (2 * SEED_BITS)) | (self.index << SEED_BITS)


def open_problems(suite: Suite, limit: int | None = None) -> list[SuiteProblem]:
    """Return the problems, the first `limit` of them; EvaluationError names the first row that cannot be used."""
    wanted = min(filter(None, (suite.data.problems, limit)), default=None)
    verification = [term.model_dump(mode="json", exclude_none=True) for term in suite.reward]
    problems: list[SuiteProblem] = []
    for where, row in islice(_rows(suite.data), wanted if suite.data.path else wanted or DEFAULT_PROBLEMS):
        renamed = _renamed(row, suite.columns, where)
        prompt = prompt_of(renamed, suite.template, where)
        _check_references(renamed, suite, where)
        text = json.dumps([len(problems), prompt, renamed, verification, suite.threshold], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        problems.append(SuiteProblem(len(problems), prompt, renamed, digest))
    if not problems:
        raise EvaluationError(f"{suite.data.path}: has no problems")
    if len(problems) > 1 << SEED_BITS:
        raise EvaluationError(
            f"the suite has {counted(len(problems), 'problem')}; at most {1 << SEED_BITS:,} are evaluated: set "
            "data.problems"
        )
    return problems


def prompt_of(row: Mapping[str, Any], template: SuiteTemplate | None, where: str) -> str | tuple[dict[str, Any], ...]:
    """Return the prompt of a row: that of its template, else its field `prompt`, a text or the messages of a chat."""
    if template is None:
        prompt = row.get("prompt")
        is_chat = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
        if isinstance(prompt, str) and prompt:
            return prompt
        if is_chat and isinstance(prompt, list):
            return tuple(prompt)
        names = ", ".join(map(repr, row)) or "none"
        raise EvaluationError(
            f"{where}: has no prompt (a text or a list of messages) in the field 'prompt'; its fields are {names}: "
            "name the column under columns, e.g. columns: {prompt: question}, or write a template"
        )
    if template.text is not None:
        return _filled(template.text, row, where)
    assert template.chat is not None
    system = [] if template.system is None else [{"role": "system", "content": _filled(template.system, row, where)}]
    return (*system, {"role": "user", "content": _filled(template.chat, row, where)})


def _filled(template: str, row: Mapping[str, Any], where: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        if match[1] not in row:
            names = ", ".join(map(repr, row)) or "none"
            raise EvaluationError(f"{where}: has no field {match[1]!r}, which the template names; its fields: {names}")
        found = row[match[1]]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return _FIELD.sub(value, template)


def _rows(data: SuiteData) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of every row."""
    if data.generate == "arithmetic":
        yield from _named("arithmetic", arithmetic_rows(data.seed, data.digits or (2,)))
    elif data.generate == "reasoning_gym":
        count = data.problems or DEFAULT_PROBLEMS
        yield from _named("reasoning_gym", reasoning_rows(data.tasks, count, data.seed))
    else:
        assert data.path is not None
        path = Path(data.path)
        if not path.exists():
            raise EvaluationError(f"data.path: {data.path} does not exist; give a file of JSONL or Parquet")
        if not path.is_file() and not path.is_dir():
            raise EvaluationError(f"data.path: {data.path} is a device or a pipe; give a file of JSONL or Parquet")
        if path.is_file() and not path.stat().st_size:
            raise EvaluationError(f"data.path: {data.path} is empty; write one problem per line")
        try:
            yield from read_rows([data.path])
        except DataError as error:
            raise EvaluationError(str(error)) from None


def _named(name: str, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows, 1):
        yield f"{name}:{number}", row


def arithmetic_rows(seed: int, digits: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield sums of two numbers with as many digits, for each of `digits` in turn."""
    draw = random.Random(f"arithmetic {seed}")
    while True:
        for size in digits:
            first, second = (draw.randrange(10 ** (size - 1) if size > 1 else 0, 10**size) for _ in range(2))
            name = f"{size} digit{'s' if size > 1 else ''}"
            yield {"a": first, "b": second, "answer": str(first + second), GROUP: name}


def _renamed(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the row with its columns also under the names that are read: {prompt: question}."""
    for written in columns.values():
        if written not in row:
            names = ", ".join(map(repr, row)) or "none"
            raise EvaluationError(f"{where}: has no field {written!r}, which columns names; its fields: {names}")
    return {**row, **{name: row[written] for name, written in columns.items()}}


def _check_references(row: Mapping[str, Any], suite: Suite, where: str) -> None:
    """Refuse a row without the field that a verifier compares with, before anything is generated."""
    for term in suite.reward:
        brings_own = term.pattern is not None or term.json_schema is not None or term.verifier == "judge"
        if term.verifier is None or (brings_own and term.field is None):
            continue
        if row.get(term.answer_field) is None:
            names = ", ".join(map(repr, row)) or "none"
            has = "has only null in the field" if term.answer_field in row else "has no field"
            raise EvaluationError(
                f"{where}: {has} {term.answer_field!r}, which verifier {term.verifier} compares with; its "
                f"fields: {names}; name one with columns: {{{term.answer_field}: NAME}}, or the verifier's field"
            )
