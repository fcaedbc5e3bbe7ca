"""The parts of a parsed answer, and the base of its parsers.

Every parser is a state machine over characters, so its result does not depend on how the text is split into chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallPart:
    """A part of a tool call: the first one has the name, all together have the arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """The parts found in a chunk of text."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """Parses an answer's text incrementally; call `finish` at its end."""

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed: ...


class Plain:
    """Passes all text on as content."""

    def feed(self, text: str) -> Parsed:
        return Parsed(content=text)

    def finish(self) -> Parsed:
        return Parsed()


class Findings:
    """Collects the results of a parser. White space around calls is dropped."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._parsed = Parsed()
        self._space = ""  # pending white space, which is content if text follows
        self._is_behind_call = False

    def content(self, text: str) -> None:
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            self._is_behind_call = False
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._parsed.content += stripped

    def begin(self, name: str) -> None:
        self._space = ""
        self._is_behind_call = True
        self._parsed.calls.append(CallPart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if not text:
            return
        if not self._parsed.calls:
            self._parsed.calls.append(CallPart(self.num_calls - 1))
        self._parsed.calls[-1].arguments += text

    def take(self, is_end: bool = False) -> Parsed:
        if is_end and not self.num_calls:
            self._parsed.content += self._space
            self._space = ""
        parsed, self._parsed = self._parsed, Parsed()
        return parsed


class Lookout:
    """Finds marks, none of which is a prefix of another. Text that may begin one is held back."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.held = ""
        self._marks = tuple(marks)

    def step(self, letter: str) -> tuple[str, str | None]:
        """Add a character; return (text outside marks, the mark that this character completes)."""
        self.held += letter
        start = 0
        while start < len(self.held) and not any(mark.startswith(self.held[start:]) for mark in self._marks):
            start += 1
        text, self.held = self.held[:start], self.held[start:]
        if self.held in self._marks:
            mark, self.held = self.held, ""
            return text, mark
        return text, None

    def release(self) -> str:
        held, self.held = self.held, ""
        return held


class LetterParser(ABC):
    """A parser of one style of tool calls, character by character."""

    def __init__(self) -> None:
        self._findings = Findings()

    def feed(self, text: str) -> Parsed:
        if self._is_in_content and "<" not in text:  # every mark begins with it
            self._findings.content(text)
        else:
            for letter in text:
                self._step(letter)
        return self._findings.take()

    @property
    @abstractmethod
    def _is_in_content(self) -> bool:
        """Whether the parser is in content and holds nothing back."""

    @abstractmethod
    def _step(self, letter: str) -> None: ...
