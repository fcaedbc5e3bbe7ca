"""Validation of a document into frozen models; each problem is `file:line: key: what is wrong, what is allowed`.

`Section` is the base of all models of a user's file. `parse_section` turns pydantic's errors into messages a user can
act on: the line in the file, the key, the allowed names and the nearest match.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo

from craton.job.document.document import Document, Location
from craton.job.document.foreign import key_here, value_here
from craton.job.errors import ContentError
from craton.nearest import did_you_mean, nearest_name

MAX_PROBLEMS = 10
_LIMITS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}  # as pydantic names them


class Section(BaseModel):
    """A mapping of a user's file: frozen, and every key must be known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def parse(cls, value: object, info: ValidationInfo) -> Self:
        """Validate a section inside another validator, keeping the locations of errors within the section."""
        try:
            return cls.model_validate(value, context=info.context)
        except ValidationError as error:
            raise SectionError(cls, error) from None


class SectionError(ValueError):
    """Problems inside a section that a validator parsed; `at`: its location in the validator's value."""

    def __init__(self, section: type[Section], error: ValidationError, at: Location = ()) -> None:
        self.section = section
        self.error = error
        self.at = at
        super().__init__(str(error))


class KeyConflictError(ValueError):
    """A conflict between keys; `keys` are relative to the section, and the message gives their lines."""

    def __init__(self, message: str, *keys: Location) -> None:
        self.keys = keys
        super().__init__(message)


AnySection = TypeVar("AnySection", bound=Section)


def parse_section(section: type[AnySection], document: Document) -> AnySection:
    """Return the document as a model; ContentError lists its problems in line order."""
    try:
        return section.model_validate(document.data, context=_context(document))
    except ValidationError as error:
        problems = sorted(_problems(section, error, document, ()))
        texts = list(dict.fromkeys(text for _, text in problems))
        if len(texts) > MAX_PROBLEMS:
            more = len(texts) - MAX_PROBLEMS
            texts = [*texts[:MAX_PROBLEMS], f"{document.name}: and {more} more; fix these first"]
        raise ContentError(texts) from None


def section_problems(section: type[Section], error: ValidationError, where: str) -> list[str]:
    """Return the problems of a value that is in no file: `where.key: ...`, without lines."""
    found = _problems(section, error, Document(where, Path(), {}, {}), (where,))
    return [text.removeprefix(f"{where}:1: ") for _, text in found]


def _context(document: Document) -> dict[str, object]:
    """Return what validators see of the document beside their values."""
    return {"folder": document.folder, "name": document.name, "kind": document.data.get("kind")}


def _problems(
    section: type[Section], error: ValidationError, document: Document, prefix: Location
) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each error; `prefix` is the section's location in the document."""
    misspelt = {
        (*finding["loc"][:-1], nearest_name(str(finding["loc"][-1]), allowed_keys(section, finding["loc"][:-1])))
        for finding in error.errors()
        if finding["type"] == "extra_forbidden"
    }
    for finding in error.errors():
        if finding["type"] == "missing" and finding["loc"] in misspelt:
            continue  # it is present under a misspelt name, which is reported
        # pydantic marks an error in a mapping's key, not its value, with a last part "[key]".
        location = (*prefix, *(part for part in finding["loc"] if part != "[key]"))
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, SectionError):
            yield from _problems(cause.section, cause.error, document, (*location, *cause.at))
        elif isinstance(cause, ContentError):  # from another file, with its own line numbers
            yield from ((document.line(location), problem) for problem in cause.problems)
        else:
            line, text = _problem(section, finding, cause, document, location, prefix)
            yield line, f"{document.name}:{line}: {text}"


def _problem(
    section: type[Section],
    finding: Any,
    cause: object,
    document: Document,
    location: Location,
    prefix: Location,
) -> tuple[int, str]:
    where = dotted(location)
    line = document.line(location)
    if finding["type"] == "extra_forbidden":
        return line, _unknown_key(section, location, prefix, document.data.get("kind"))
    if finding["type"] == "missing":
        parent = dotted(location[:-1])
        under = f"under {parent}" if parent else "at the top"
        return document.line(location[:-1]), f"key {location[-1]!r} is missing {under}"
    if isinstance(cause, KeyConflictError):
        lines = sorted({document.line((*location, *key)) for key in cause.keys})
        message = f" (lines {' and '.join(map(str, lines))})" if len(lines) > 1 else ""
        return (lines[0] if lines else line), f"{cause}{message}"
    if isinstance(cause, ValueError):
        return line, f"{where}: {cause}" if where else str(cause)
    return line, f"{where}: {_plain_words(finding, location)}"


def _unknown_key(root: type[Section], location: Location, prefix: Location, kind: object) -> str:
    key = str(location[-1])
    allowed = allowed_keys(root, location[len(prefix) : -1])
    parent = dotted(location[:-1])
    under = f"under {parent}" if parent else "at the top"
    homes = [name for name, field in root.model_fields.items() if key in _fields(field.annotation)]
    near = did_you_mean(key, allowed)
    if (ours := key_here(kind, key)) is not None:
        near = f"; use {ours}"
    elif homes and not parent:
        near = f"; it belongs under {homes[0]}"
    elif parent and not near and not prefix and key in root.model_fields:
        near = f"; it belongs at the top of the file, not under {parent}"
    return f"key {key!r} is not known {under}; allowed: {', '.join(allowed)}{near}"


def allowed_keys(root: type[Section], location: Location) -> list[str]:
    """Return the keys that a section allows at a location; empty if there is no section."""
    section: type[Section] | None = root
    for part in location:
        if isinstance(part, str):
            field = section.model_fields.get(part) if section else None
            section = _inner_section(field.annotation) if field else None
    return list(section.model_fields) if section else []


def _fields(annotation: object) -> set[str]:
    section = _inner_section(annotation)
    return set(section.model_fields) if section else set()


def _inner_section(annotation: object) -> type[Section] | None:
    """Return the section inside `X`, `X | None`, `list[X]`, `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in typing.get_args(annotation):
        if (inner := _inner_section(argument)) is not None:
            return inner
    return None


def _plain_words(finding: Any, location: Location) -> str:
    value = finding["input"]
    shown = "nothing" if value is None else repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    if finding["type"] == "literal_error":
        allowed = typing.cast(str, finding["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        ours = value_here(location, value)
        near = did_you_mean(str(value), allowed) if ours is None else f"; {ours}"
        return f"{shown} is not allowed; allowed: {', '.join(allowed)}{near}"
    wanted = {
        "model_type": "a mapping of `key: value`",
        "model_attributes_type": "a mapping of `key: value`",
        "dict_type": "a mapping of `key: value`",
        "list_type": "a list",
        "tuple_type": "a list",
        "string_type": "a text",
        "bool_parsing": "true or false",
        "bool_type": "true or false",
        "float_parsing": "a number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "int_parsing": "a whole number",
        "int_type": "a whole number",
        "date_from_datetime_parsing": "a date such as 2026-11-15",
        "date_parsing": "a date such as 2026-11-15",
        "date_type": "a date such as 2026-11-15",
    }.get(finding["type"])
    if wanted:
        return f"{shown} is not {wanted}"
    limits = [f"{words} {finding['ctx'][name]:g}" for name, words in _LIMITS.items() if name in finding.get("ctx", {})]
    if limits:
        return f"{shown} is not allowed; give a number {' and '.join(limits)}"
    message = str(finding["msg"])
    return f"{shown}: {message[:1].lower()}{message[1:]}"


def dotted(location: Location) -> str:
    """Return a location as `checkpoint.tiers[0].every`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
