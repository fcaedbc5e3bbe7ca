"""Parses Llama 3's tool calls: `{"name": …, "parameters": …}`, optionally after `<|python_tag|>`, several of them
separated by `;`, and for its built-in tools `<|python_tag|>name.call(argument="…")`.

Other JSON is content: without the mark, a call must name one of the request's tools.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Literal

from craton.ml.serving.server.tools.json_calls import ARGUMENT_KEYS, NAME_KEYS, OTHER_KEYS, JsonCall
from craton.ml.serving.server.tools.parsed import LetterParser, Lookout, Parsed

MARK = "<|python_tag|>"

_BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)\s*", re.DOTALL)
_BUILT_IN_BEGINS = re.compile(r"\w+(\.(c(a(l(l\(?)?)?)?)?)?")


class LlamaParser(LetterParser):
    """Parser of Llama 3's style. `tools` are the names that a call without the mark may have."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        super().__init__()
        self._lookout = Lookout([MARK])
        self._place: Literal["begin", "text", "marked", "built-in", "call", "between"] = "begin"
        self._call = JsonCall()
        self._is_marked = False
        self._text = ""  # of a call of a built-in tool
        self._has_arguments = False

    @property
    def _is_in_content(self) -> bool:
        return self._place == "text" and not self._lookout.held

    def finish(self) -> Parsed:
        if self._place == "built-in":
            self._end_built_in()
        elif self._place == "call" and not self._is_call():
            self._findings.content(self._call.raw)
        self._findings.content(self._lookout.release())
        return self._findings.take(is_end=True)

    def _step(self, letter: str) -> None:
        if self._place == "call":
            self._in_call(letter)
        elif self._place == "marked":
            self._after_mark(letter)
        elif self._place == "built-in":
            self._in_built_in(letter)
        else:
            text, mark = self._lookout.step(letter)
            for item in text:
                self._in_text(item)
            if mark is not None:
                self._place, self._is_marked = "marked", True

    def _in_text(self, letter: str) -> None:
        if self._place == "call":
            self._in_call(letter)
        elif self._place != "text" and letter == "{":
            self._begin_call(letter)
        elif self._place == "text" or not (letter.isspace() or (letter == ";" and self._place == "between")):
            self._place = "text"
            self._findings.content(letter)
        elif self._place == "begin":
            self._findings.content(letter)

    def _after_mark(self, letter: str) -> None:
        if letter == "{":
            self._begin_call(letter)
        elif not letter.isspace():
            self._place, self._text, self._has_arguments = "built-in", "", False
            self._in_built_in(letter)

    def _in_built_in(self, letter: str) -> None:
        self._text += letter
        if self._has_arguments:
            return
        if _BUILT_IN_BEGINS.fullmatch(self._text) is None:
            self._place = "text"
            self._findings.content(self._text)
        self._has_arguments = letter == "("

    def _end_built_in(self) -> None:
        match = _BUILT_IN.fullmatch(self._text)
        arguments = None if match is None else _keywords(match[2])
        if match is None or arguments is None:
            self._findings.content(self._text)
        else:
            self._findings.begin(match[1])
            self._findings.arguments(json.dumps(arguments, ensure_ascii=False))

    def _begin_call(self, letter: str) -> None:
        self._place, self._call = "call", JsonCall()
        self._in_call(letter)

    def _in_call(self, letter: str) -> None:
        call = self._call
        call.step(letter)
        if self._is_call():
            if call.give_out(self._findings):
                self._place = "between"
        elif call.state != "open" or call.name is not None or self._is_foreign():
            self._place = "text"
            self._findings.content(call.raw)

    def _is_call(self) -> bool:
        return self._call.name is not None and (self._is_marked or self._call.name in self._tools)

    def _is_foreign(self) -> bool:
        """Whether the object has keys that a call cannot have, so that it is content."""
        return not self._is_marked and any(
            key not in (*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS) for key in self._call.keys
        )


def _keywords(text: str) -> dict[str, object] | None:
    """Return `a=1, b="x"` as a dict; None for anything else."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(keywords)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return None if None in keywords else {str(name): value for name, value in keywords.items()}
