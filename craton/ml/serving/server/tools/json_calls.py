"""Parses tool calls as JSON objects with a name and arguments, one character at a time.

Arguments are returned unchanged, as soon as the name is known. Hermes and Qwen put each call between marks:
`<tool_call>{"name": …, "arguments": …}</tool_call>`.
"""

from __future__ import annotations

import json
from typing import Literal

from craton.ml.serving.server.tools.parsed import Findings, LetterParser, Lookout, Parsed

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
BEGIN, END = "<tool_call>", "</tool_call>"

_SPACE = " \t\r\n"
_Place = Literal["begin", "key", "in key", "colon", "value", "in string", "in nested", "in scalar", "after"]


class JsonCall:
    """One JSON object. It ends as `closed`, or as `broken` at the first character that is invalid JSON."""

    def __init__(self) -> None:
        self.state: Literal["open", "closed", "broken"] = "open"
        self.name: str | None = None
        self.keys: list[str] = []
        self.raw = ""
        self._place: _Place = "begin"
        self._text = ""  # of the current key or value
        self._arguments = ""  # not returned yet
        self._has_arguments = False
        self._is_given = False
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False

    def step(self, letter: str) -> None:
        assert self.state == "open"
        self.raw += letter
        if self._place in ("in key", "in string"):
            self._in_quotes(letter)
        elif self._place == "in nested":
            self._in_nested(letter)
        elif self._place == "in scalar" and letter not in ",}" + _SPACE:
            self._text += letter
        else:
            self._between(letter)

    def give_out(self, findings: Findings) -> bool:
        """Add what is known to the findings; return whether the call is complete.

        A call that breaks after its name was returned stays as it is; before that, the caller handles it.
        """
        if self.name is None:
            return False
        if not self._is_given:
            findings.begin(self.name)
            self._is_given = True
        findings.arguments(self._arguments)
        self._arguments = ""
        return self.state != "open"

    def _between(self, letter: str) -> None:
        if self._place == "in scalar":
            self._value_ends()
        if letter in _SPACE or self.state == "broken":
            return
        if self._place == "begin" and letter == "{":
            self._place = "key"
        elif self._place == "key" and letter == '"':
            self._place, self._text = "in key", letter
        elif self._place == "colon" and letter == ":":
            self._place = "value"
        elif self._place == "value" and letter not in ",:]}":
            self._value_begins(letter)
        elif self._place == "after" and letter == ",":
            self._place = "key"
        elif letter == "}" and (self._place == "after" or (self._place == "key" and not self.keys)):
            self._close()
        else:
            self.state = "broken"

    def _close(self) -> None:
        self.state = "broken" if self.name is None else "closed"
        if not self._has_arguments:
            self._arguments = "{}"

    def _in_quotes(self, letter: str) -> None:
        self._text += letter
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            if self._place == "in key":
                self.keys.append(str(self._loaded()))
                self._place = "colon"
            else:
                self._value_ends()

    def _in_nested(self, letter: str) -> None:
        self._add(letter)
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_quoted:
            self._is_escaped = letter == "\\"
            self._is_quoted = letter != '"'
        elif letter == '"':
            self._is_quoted = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if not self._depth:
                self._place = "after"
                self._has_arguments = self._has_arguments or self.keys[-1] in ARGUMENT_KEYS

    def _value_begins(self, letter: str) -> None:
        self._text = ""
        if letter in "{[":
            self._place, self._depth, self._is_quoted = "in nested", 1, False
            self._add(letter)
        else:
            self._place = "in string" if letter == '"' else "in scalar"
            self._text = letter

    def _value_ends(self) -> None:
        """End a string or scalar; nested values were returned on the way."""
        self._place = "after"
        key, value = self.keys[-1], self._loaded()
        if key in NAME_KEYS and self.name is None:
            if not isinstance(value, str) or not value:
                self.state = "broken"
                return
            self.name = value
        elif key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            # Some models write the arguments as a JSON string, and null for none.
            self._arguments += "{}" if value is None else value if isinstance(value, str) else self._text

    def _add(self, letter: str) -> None:
        if self.keys[-1] in ARGUMENT_KEYS and not self._has_arguments:
            self._arguments += letter

    def _loaded(self) -> object:
        try:
            return json.loads(self._text, strict=False)
        except ValueError:
            self.state = "broken"
            return None


class CallList:
    """`[{"name": …, "arguments": …}, …]`, as a grammar enforces it; anything else is content."""

    def __init__(self) -> None:
        self._findings = Findings()
        self._call: JsonCall | None = None
        self._is_content = False

    def feed(self, text: str) -> Parsed:
        for letter in text:
            self._step(letter)
        return self._findings.take()

    def finish(self) -> Parsed:
        if self._call is not None and self._call.name is None:
            self._findings.content(self._call.raw)
        return self._findings.take(is_end=True)

    def _step(self, letter: str) -> None:
        if self._is_content:
            self._findings.content(letter)
        elif self._call is not None:
            self._call.step(letter)
            if self._call.give_out(self._findings):
                self._call = None
            elif self._call.state == "broken":
                self._findings.content(self._call.raw)
                self._call, self._is_content = None, True
        elif letter == "{":
            self._call = JsonCall()
            self._call.step(letter)
        elif letter not in "[,]" + _SPACE:
            self._is_content = True
            self._findings.content(letter)


class NamedCall:
    """The whole answer is the arguments of one call, whose name the request gave."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._findings = Findings()

    def feed(self, text: str) -> Parsed:
        if text and not self._findings.num_calls:
            self._findings.begin(self._name)
        self._findings.arguments(text)
        return self._findings.take()

    def finish(self) -> Parsed:
        return Parsed()


class HermesParser(LetterParser):
    """Parser of Hermes' and Qwen's style. Text outside calls is content, and so is a call without a valid name."""

    def __init__(self) -> None:
        super().__init__()
        self._lookout = Lookout([BEGIN])
        self._call: JsonCall | None = None
        self._tail: Lookout | None = None  # after a call, up to its end mark
        self._extra = ""  # unexpected text there; it is content, unless the end mark follows

    @property
    def _is_in_content(self) -> bool:
        return self._call is None and self._tail is None and not self._lookout.held

    def finish(self) -> Parsed:
        if self._call is not None and self._call.name is None:
            self._findings.content(BEGIN + self._call.raw)
        if self._tail is not None:
            self._findings.content(self._extra + self._tail.release())
        self._findings.content(self._lookout.release())
        return self._findings.take(is_end=True)

    def _step(self, letter: str) -> None:
        if self._call is not None:
            self._in_call(self._call, letter)
        elif self._tail is not None:
            text, mark = self._tail.step(letter)
            self._extra += text
            if mark is not None:
                self._tail, self._extra = None, ""
            if mark == BEGIN:
                self._call = JsonCall()
        else:
            text, mark = self._lookout.step(letter)
            self._findings.content(text)
            if mark is not None:
                self._call = JsonCall()

    def _in_call(self, call: JsonCall, letter: str) -> None:
        call.step(letter)
        if call.give_out(self._findings):
            self._call, self._tail = None, Lookout([BEGIN, END])
        elif call.state == "broken":
            self._call = None
            self._findings.content(BEGIN + call.raw)
