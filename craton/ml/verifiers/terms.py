"""The terms of a reward: which process verifies each, what it is sent, and how their values add up."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from craton.extras import require_extra
from craton.ml.verifiers.answers import UnreadableReferenceError
from craton.ml.verifiers.errors import VerifierError
from craton.ml.verifiers.programs import ProgramTest, program_test
from craton.ml.verifiers.verdict import VerifierSample

if TYPE_CHECKING:
    from craton.job.sections.posttraining import RewardTerm

SEALED = ("exact", "regex", "json_schema", "math")
PACKAGES = {"math": ("math_verify", "latex2sympy2_extended", "sympy"), "json_schema": ("jsonschema",)}


@dataclass(frozen=True)
class TermCall:
    """One term for one sample: the message for a process of its group, and the test of a program."""

    name: str
    weight: float
    group: str
    message: bytes
    program: ProgramTest | None = None

    @property
    def follow_up(self) -> bytes:
        """The second message, which a process asks for."""
        return self.program.follow_up if self.program is not None else b""

    def value(self, reply: Mapping[str, Any]) -> tuple[float | None, str]:
        """Return (value, error) of a reply. Replies of sandboxed processes are not trusted."""
        if reply.get("error"):
            error = str(reply["error"])
            return None, error if error.startswith(f"{self.name} ") else f"{self.name}: {error}"
        if self.program is not None:
            return self.program.value(reply), ""
        value = reply.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None, f"{self.name}: the worker returned no number"
        return float(value), ""


def check_terms(terms: Sequence[RewardTerm]) -> None:
    """Raise for what can be known before the first sample: packages and keys that are missing."""
    for term in terms:
        if term.verifier in PACKAGES:
            require_extra("verify", f"verifier {term.verifier}", PACKAGES[term.verifier])
        key = term.endpoint.key if term.endpoint is not None else None
        if key is not None and not os.environ.get(key):
            raise VerifierError(f"verifier judge: the variable {key} is not set; set it, and name it in run.secrets")


def group_of(term: RewardTerm) -> str:
    """Return which processes verify a term: see `members.py`."""
    if term.verifier in SEALED:
        return "sealed"
    return "program" if term.verifier == "code" else "open"


def term_names(terms: Sequence[RewardTerm]) -> list[str]:
    """Return a name for each term; a second term of the same kind gets a number."""
    names: list[str] = []
    for term in terms:
        same = sum(other.name == term.name for other in terms[: len(names)])
        names.append(term.name if not same else f"{term.name} {same + 1}")
    return names


def call_of(term: RewardTerm, name: str, sample: VerifierSample) -> TermCall:
    """Return what a term asks for a sample; UnreadableReferenceError if the row has no answer to compare with."""
    group = group_of(term)
    if term.verifier is None:
        request: dict[str, Any] = {
            "what": "function",
            "name": term.python,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "row": dict(sample.row),
            "transcript": list(sample.transcript),
        }
        return TermCall(name, term.weight, group, pickle.dumps(request))
    reference = _reference(term, sample.row)
    if term.verifier == "code":
        program = program_test(sample.completion, reference)
        return TermCall(name, term.weight, group, program.request, program)
    if term.verifier == "judge":
        assert term.endpoint is not None
        endpoint = {"url": term.endpoint.url, "model": term.endpoint.model, "key": term.endpoint.key}
        request = {
            "what": "judge",
            "name": name,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "answer": reference,
            "options": {"endpoint": endpoint, "instruction": term.instruction},
        }
        return TermCall(name, term.weight, group, pickle.dumps(request))
    request = {
        "verifier": term.verifier,
        "completion": sample.completion,
        "reference": reference,
        "options": {"pattern": term.pattern, "json_schema": term.json_schema},
    }
    return TermCall(name, term.weight, group, json.dumps(request, default=str).encode())


def weighted_sum(calls: Sequence[TermCall], values: Mapping[str, float | None]) -> float | None:
    """Return the reward; None if any term has no value."""
    total = 0.0
    for call in calls:
        value = values[call.name]
        if value is None:
            return None
        total += call.weight * value
    return total if math.isfinite(total) else None


def _reference(term: RewardTerm, row: Mapping[str, Any]) -> Any:
    """Return the row's field. Terms that bring their own reference, and judges, need none unless they name it."""
    own = term.pattern is not None or term.json_schema is not None
    if own and term.field is None:
        return None
    if term.answer_field in row and row[term.answer_field] is not None:
        return row[term.answer_field]
    if term.verifier == "judge" and term.field is None:
        return None
    fields = ", ".join(map(str, row)) or "none"
    raise UnreadableReferenceError(
        f"{term.name}: the row has no field {term.answer_field!r} to compare with; it has {fields}; name one with "
        "`field`"
    )
