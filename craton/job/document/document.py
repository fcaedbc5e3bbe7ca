"""The YAML reader: plain data with the line of every key and value.

Guarantees: a file that is missing, a directory, too large, not UTF-8, empty, tab-indented, with a duplicate key, an
alias (and so a "YAML bomb"), a tag or absurd nesting ends in one FileError line. Scalars follow YAML 1.2: only `true`
and `false` are booleans, so `on: slurm` and `peer: off` mean what they say, and `3e-4` is a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import yaml

from craton.job.errors import FileError
from craton.nearest import did_you_mean
from craton.telemetry import RunDirectory
from craton.telemetry.files import open_regular

MAX_FILE_BYTES = 1_000_000  # a job file of a thousand lines has 50 kB
MAX_DEPTH = 20

Location = tuple[str | int, ...]  # ("checkpoint", "tiers", 0, "every")


@dataclass(frozen=True)
class Document:
    """The data of one file, and the line on which each location is written."""

    name: str  # as the user gave it, for messages
    folder: Path  # where relative paths in the file start
    data: dict[str, object]
    lines: dict[Location, int]

    def line(self, location: Location) -> int:
        """Return the line of a key, or of the nearest enclosing key if it is not written."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


def read_document(path: Path | str) -> Document:
    """Read one YAML mapping from a file."""
    path = Path(path)
    try:
        if path.is_dir():
            raise FileError(f"{path}: is a directory; give the YAML file in it")
        with _opened(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            size_bytes = max(len(content), path.stat().st_size)
            raise FileError(
                f"{path}: has {size_bytes:,} bytes, more than the {MAX_FILE_BYTES:,} allowed; "
                "a job file refers to data and must not contain it"
            )
    except FileNotFoundError:
        beside = [file.stem for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        raise FileError(f"{path}: no such file{did_you_mean(path.stem, beside)}") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(f"{path}:{line}: is not UTF-8 (byte 0x{content[error.start]:02x}); save it as UTF-8") from None
    return parse_document(text, name=str(path), folder=path.resolve().parent)


def _opened(path: Path) -> BinaryIO:
    """Open a run's own job.yaml, which another user may have written, with the checks for files of runs."""
    return open_regular(path) if RunDirectory(path.parent).looks_like_a_run() else open(path, "rb")


def parse_document(text: str, name: str = "job.yaml", folder: Path | str = ".") -> Document:
    """Parse a YAML mapping from a string; `name` appears in messages, relative paths start at `folder`."""
    lines: dict[Location, int] = {(): 1}
    builder = _Builder(name, lines)
    try:
        data = builder.build(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise FileError(f"{name}:{line}: contains a character that YAML forbids (0x{_code_point(error):02x})") from None
    except yaml.MarkedYAMLError as error:
        raise FileError(_syntax_message(name, text, error)) from None
    return Document(name=name, folder=Path(folder), data=data, lines=lines)


def reads_as_text(text: str) -> bool:
    """Return whether an unquoted text is read as a string, not as a number, a boolean or null."""
    return isinstance(_plain_scalar(text), str)


def _code_point(error: yaml.reader.ReaderError) -> int:
    character = error.character
    return character if isinstance(character, int) else ord(character)


class _Builder:
    """Builds plain data from the parser's events; events, unlike nodes, show every alias."""

    def __init__(self, name: str, lines: dict[Location, int]) -> None:
        self.name = name
        self.lines = lines
        self.events: Iterator[yaml.Event] = iter(())

    def build(self, text: str) -> dict[str, object]:
        self.events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        data: object = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error(event, "a second YAML document starts here; write one job per file")
                data = self._value(next(self.events), ())
        if data is None:
            raise FileError(f"{self.name}: is empty; write at least `kind:`, `model:` and `cluster:`")
        if not isinstance(data, dict):
            kind = "a list" if isinstance(data, list) else f"the single value {str(data)[:40]!r}"
            raise FileError(f"{self.name}:{self.lines[()]}: the file is {kind}; it must be a mapping of `key: value`")
        return data

    def _value(self, event: yaml.Event, location: Location) -> object:
        self.lines.setdefault(location, _line(event))
        if len(location) > MAX_DEPTH:
            raise self._error(event, f"values are nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise self._error(event, f"aliases are not allowed (*{event.anchor}); write the value out")
        if (tag := getattr(event, "tag", None)) not in (None, "!"):
            raise self._error(event, f"tags are not allowed ({tag}); write a plain value")
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else _plain_scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(location)
        assert isinstance(event, yaml.MappingStartEvent), event
        return self._mapping(location)

    def _sequence(self, location: Location) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*location, len(items))))
        return items

    def _mapping(self, location: Location) -> dict[str, object]:
        mapping: dict[str, object] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(event, "a key must be a plain word, not a list, a mapping or an alias")
            key = event.value
            child = (*location, key)
            if key in mapping:
                raise self._error(event, f"key {key!r} is given twice, first on line {self.lines[child]}; remove one")
            self.lines[child] = _line(event)
            mapping[key] = self._value(next(self.events), child)
        return mapping

    def _error(self, event: yaml.Event, message: str) -> FileError:
        return FileError(f"{self.name}:{_line(event)}: {message}")


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, event
    return event.start_mark.line + 1


_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}


def _plain_scalar(text: str) -> object:
    """YAML 1.2 core schema, without its octal, hexadecimal, infinity and not-a-number forms."""
    if text in _NULLS:
        return None
    if text in _WORDS:
        return _WORDS[text]
    if len(text) < 40 and _INTEGER.fullmatch(text):
        return int(text)
    if len(text) < 40 and _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text  # keep 1e400 as written, for the error message
    return text


def _syntax_message(name: str, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{name}: is not YAML: {error.problem or error}"
    lines = text.splitlines()
    for number in (mark.line, mark.line - 1):
        line = lines[number] if 0 <= number < len(lines) else ""
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return f"{name}:{number + 1}: is indented with a tab; YAML allows only spaces"
    context = f" {error.context}" if error.context else ""
    return f"{name}:{mark.line + 1}: is not YAML: {error.problem}{context} (column {mark.column + 1})"
