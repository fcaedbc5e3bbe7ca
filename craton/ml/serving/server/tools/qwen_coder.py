"""Parses Qwen3-Coder's tool calls, which look like XML:

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>

Values are plain text; the tool's schema defines their types. Strings are streamed as JSON; other values are returned
when complete, unchanged if they are JSON, else as strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from craton.ml.serving.server.tools.parsed import LetterParser, Lookout, Parsed

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_Place = Literal["text", "begun", "name", "body", "key", "value", "tail"]
_MARKS: dict[_Place, list[str]] = {
    "text": [BEGIN, FUNCTION],
    "begun": [FUNCTION],
    "name": [">"],
    "body": [PARAMETER, END_FUNCTION],
    "key": [">"],
    "value": [END_PARAMETER],
    "tail": [BEGIN, FUNCTION, END],
}


class QwenCoderParser(LetterParser):
    """Parser of Qwen3-Coder's style. `schemas`: the parameter schemas, by tool name."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        super().__init__()
        self._place: _Place = "text"
        self._lookout = Lookout(_MARKS["text"])
        self._text = ""  # of the current name, key, or value other than a string
        self._name = ""
        self._value: _StringValue | None = None
        self._types: set[str] = set()
        self._num_parameters = 0

    @property
    def _is_in_content(self) -> bool:
        return self._place == "text" and not self._lookout.held

    def finish(self) -> Parsed:
        if self._place == "text":
            self._findings.content(self._lookout.release())
        elif self._place == "begun":
            self._findings.content(BEGIN + self._text + self._lookout.release())
        elif self._place == "name":
            self._findings.content(FUNCTION + self._text)
        elif self._place == "tail":  # text before an end mark is dropped, but the mark is missing
            self._findings.content(self._text + self._lookout.release())
        return self._findings.take(is_end=True)

    def _step(self, letter: str) -> None:
        text, mark = self._lookout.step(letter)
        if text:
            self._add(text)
        if mark is not None:
            self._at(mark)

    def _add(self, text: str) -> None:
        if self._place == "text":
            self._findings.content(text)
        elif self._place == "begun" and not text.isspace():
            self._findings.content(BEGIN + self._text + text)
            self._go("text")
        elif self._value is not None:
            self._findings.arguments(self._value.add(text))
        else:
            self._text += text

    def _at(self, mark: str) -> None:
        if mark == BEGIN:
            self._go("begun")
        elif mark == FUNCTION:
            self._go("name")
        elif self._place == "name":
            self._name = self._text.strip()
            self._num_parameters = 0
            self._findings.begin(self._name)
            self._go("body")
        elif mark == PARAMETER:
            self._go("key")
        elif self._place == "key":
            self._begin_value(self._text.strip())
        elif mark == END_PARAMETER:
            self._end_value()
        elif mark == END_FUNCTION:
            self._findings.arguments("}" if self._num_parameters else "{}")
            self._go("tail")
        else:
            self._go("text")

    def _go(self, place: _Place) -> None:
        self._place = place
        self._lookout = Lookout(_MARKS[place])
        self._text = ""

    def _begin_value(self, key: str) -> None:
        separator = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._findings.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._types = _types(self._schemas.get(self._name), key)
        if self._types == {"string"}:
            self._value = _StringValue()
            self._findings.arguments('"')
        self._go("value")

    def _end_value(self) -> None:
        if self._value is None:
            self._findings.arguments(_as_json(self._text, self._types))
        else:
            self._findings.arguments('"')
            self._value = None
        self._go("body")


class _StringValue:
    """Streams a string value without the line breaks next to its marks."""

    def __init__(self) -> None:
        self._is_first = True
        self._held = ""

    def add(self, text: str) -> str:
        if self._is_first:
            text = text.removeprefix("\n")
            self._is_first = False
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return _escaped(text.removesuffix("\n"))


def _types(schema: Any, key: str) -> set[str]:
    """Return the types of a parameter; {"string"} if the schema does not define it."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    described = properties.get(key) if isinstance(properties, Mapping) else None
    return _types_of(described) or {"string"}


def _types_of(described: Any) -> set[str]:
    if not isinstance(described, Mapping):
        return set()
    stated = described.get("type")
    types = {stated} if isinstance(stated, str) else {name for name in stated or () if isinstance(name, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        for part in described.get(union) or ():
            types |= _types_of(part)
    if not types and "$ref" in described:
        return {"object"}
    if not types and isinstance(described.get("enum"), list):
        return {"string" if isinstance(value, str) else "number" for value in described["enum"]}
    return types


def _as_json(text: str, types: set[str]) -> str:
    """Return the text unchanged if it is JSON, else as a JSON string."""
    text = text.removeprefix("\n").removesuffix("\n")
    literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        value = json.loads(literal)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    # A union with strings: a value without quotes is a string unless one of the other types allows it.
    if "string" in types and not _is_of(value, types):
        return json.dumps(text, ensure_ascii=False)
    return literal


def _is_of(value: Any, types: set[str]) -> bool:
    name = {bool: "boolean", int: "integer", float: "number", str: "", list: "array", dict: "object"}.get(
        type(value), "null"
    )
    return name in types or (name == "integer" and "number" in types)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
