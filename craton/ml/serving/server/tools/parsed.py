"""What is found in an answer's text, and the means to find it one character at a time.

Every parser is a machine over characters, so what it finds cannot depend on how the text was cut into chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallPart:
    """A part of a tool call: its first one has the name, all together have the arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a chunk of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """Feed it an answer's text as it comes, and say when there is no more."""

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed: ...


class Plain:
    """Text that is content and nothing else."""

    def feed(self, text: str) -> Parsed:
        return Parsed(content=text)

    def finish(self) -> Parsed:
        return Parsed()


class Findings:
    """Gathers what a parser finds until it is taken. White space around calls is nobody's content."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._parsed = Parsed()
        self._space = ""  # may be followed by text, and then it counts
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
    """Watches for marks, none of which begins another. What may be the beginning of one is held."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.held = ""
        self._marks = tuple(marks)

    def step(self, letter: str) -> tuple[str, str | None]:
        """(text that is no part of a mark, the mark that this letter completes)."""
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
    """A parser of one style of tool calls, which looks at letters one by one."""

    def __init__(self) -> None:
        self._findings = Findings()

    def feed(self, text: str) -> Parsed:
        if self._is_in_content and "<" not in text:  # with which every mark begins
            self._findings.content(text)
        else:
            for letter in text:
                self._step(letter)
        return self._findings.take()

    @property
    @abstractmethod
    def _is_in_content(self) -> bool:
        """Whether what comes next is content up to the next mark, of which nothing is held back."""

    @abstractmethod
    def _step(self, letter: str) -> None: ...
