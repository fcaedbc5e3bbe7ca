"""Verifiers that compare a completion with the answer of its row: exact, regex, json_schema.

Each gets (completion, reference, options) and returns 1.0 or 0.0. A reference that cannot be read is the data's
mistake, not the model's: it raises UnreadableReferenceError, and the sample gets no verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from craton.ml.verifiers.errors import VerifierError

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class UnreadableReferenceError(VerifierError):
    """The answer of a row is none that this verifier could compare with."""


def exact(completion: str, reference: Any, options: Mapping[str, Any]) -> float:
    """1 if the completion is the answer, apart from white space around it."""
    return float(completion.strip() == reference_text(reference).strip())


def regex(completion: str, reference: Any, options: Mapping[str, Any]) -> float:
    """1 if the pattern is found. With a pattern and a field, the last match (its first group, if it has one) must be
    the answer."""
    given = options.get("pattern")
    try:
        pattern = re.compile(given if given is not None else reference_text(reference))
    except re.error as error:
        raise UnreadableReferenceError(f"{shortened(reference)} is not a regular expression: {error}") from None
    if given is None or reference is None:
        return float(pattern.search(completion) is not None)
    matches = list(pattern.finditer(completion))
    if not matches:
        return 0.0
    found = matches[-1].group(1 if pattern.groups else 0) or ""
    return float(found.strip() == reference_text(reference).strip())


def json_schema(completion: str, reference: Any, options: Mapping[str, Any]) -> float:
    """1 if the completion (or its last fenced block) is JSON that the schema allows."""
    from jsonschema.exceptions import SchemaError, ValidationError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = options["json_schema"] if options.get("json_schema") is not None else reference
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise UnreadableReferenceError(f"{shortened(schema)} is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise UnreadableReferenceError(f"{shortened(schema)} is not a JSON schema; give an object")
    validator = validator_for(schema)
    try:
        validator.check_schema(schema)
        document = _json_of(completion)
        if document is _NO_JSON:
            return 0.0
        validator(schema, registry=Registry()).validate(document)
    except SchemaError as error:
        raise UnreadableReferenceError(f"{shortened(schema)} is not a JSON schema: {error.message}") from None
    except Unresolvable as error:
        raise UnreadableReferenceError(f"{shortened(schema)} refers to {error}, which is not part of it") from None
    except ValidationError:
        return 0.0
    return 1.0


_NO_JSON = object()


def _json_of(completion: str) -> object:
    blocks = _FENCED.findall(completion)
    for text in (completion.strip(), *blocks[-1:]):
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            continue
    return _NO_JSON


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def reference_text(reference: Any) -> str:
    """Return an answer as text: numbers, lists and objects as JSON."""
    return reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)


def shortened(value: object, length: int = 80) -> str:
    """Return a value for an error message."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"
