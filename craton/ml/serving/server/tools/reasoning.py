"""Separates the reasoning between `<think>` and `</think>` at the beginning of an answer from the answer.

Many templates end the prompt with the opening mark, so an answer may begin inside the reasoning. Line breaks next to
the marks are dropped, because templates add them again to later turns.
"""

from __future__ import annotations

from typing import Literal

from craton.ml.serving.server.tools.parsed import Lookout, Parsed, Parser
from craton.ml.serving.text import BEGIN, END


def begins_inside(prompt: str) -> bool:
    """Whether the prompt ends with the opening mark."""
    return prompt.rstrip().endswith(BEGIN)


def ends_inside(message: str) -> bool:
    """Whether the message opens a reasoning that it does not close."""
    return message.rfind(BEGIN) > message.rfind(END)


class ReasoningParser:
    """Extracts the reasoning and passes the rest to the next parser.

    `is_continued`: the prompt has the beginning of the answer, inside the reasoning or behind it."""

    def __init__(self, then: Parser, is_inside: bool, is_continued: bool = False) -> None:
        self._then = then
        self._is_inside = is_inside  # also without an opening mark
        self._place: Literal["begin", "inside", "behind", "after"] = "begin"
        self._lookout = Lookout([BEGIN])
        self._space = ""  # before the opening mark, or line breaks inside that may be the last
        self._has_reasoning = is_continued
        if is_continued and is_inside:
            self._go_inside()
        elif is_continued:
            self._place = "after"

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        for place, letter in enumerate(text):
            if self._place == "after":
                _add(parsed, self._then.feed(text[place:]))
                break
            self._step(letter, parsed)
        return parsed

    def finish(self) -> Parsed:
        parsed = Parsed()
        held = self._lookout.release()
        if self._place == "inside" or (self._place == "begin" and self._is_inside):
            self._reason(held, parsed)
        elif self._place == "begin":
            _add(parsed, self._then.feed(self._space + held))
        _add(parsed, self._then.finish())
        return parsed

    def _step(self, letter: str, parsed: Parsed) -> None:
        if self._place == "behind":
            if letter != "\n":
                self._place = "after"
                _add(parsed, self._then.feed(letter))
            return
        text, mark = self._lookout.step(letter)
        if self._place == "begin":
            self._begin(text, mark, parsed)
            return
        self._reason(text, parsed)
        if mark is not None:
            self._place = "behind"

    def _begin(self, text: str, mark: str | None, parsed: Parsed) -> None:
        if mark is not None:
            self._go_inside()
        elif text.isspace():
            self._space += text
        elif text and self._is_inside:
            text += self._lookout.release()
            self._go_inside()
            for letter in text:
                self._step(letter, parsed)
        elif text:
            self._place = "after"
            _add(parsed, self._then.feed(self._space + text + self._lookout.release()))

    def _go_inside(self) -> None:
        self._place, self._space = "inside", ""
        self._lookout = Lookout([END])

    def _reason(self, text: str, parsed: Parsed) -> None:
        text = self._space + text
        if not self._has_reasoning:
            text = text.lstrip("\n")
        stripped = text.rstrip("\n")
        self._space = text[len(stripped) :]
        self._has_reasoning = self._has_reasoning or bool(stripped)
        parsed.reasoning += stripped


def _add(parsed: Parsed, more: Parsed) -> None:
    parsed.content += more.content
    parsed.reasoning += more.reasoning
    parsed.calls += more.calls
