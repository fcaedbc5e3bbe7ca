"""Hermes' and Qwen's way to call tools: `<tool_call>{"name": …, "arguments": …}</tool_call>`, as often as it likes."""

from __future__ import annotations

from craton.ml.serving.server.tools.json_calls import JsonCall
from craton.ml.serving.server.tools.parsed import LetterParser, Lookout, Parsed

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(LetterParser):
    """What is no call is content, and so is a call without a name that can be read."""

    def __init__(self) -> None:
        super().__init__()
        self._lookout = Lookout([BEGIN])
        self._call: JsonCall | None = None
        self._tail: Lookout | None = None  # behind a call, up to its end mark
        self._slip = ""  # what stands there though nothing should; content, unless the end mark still comes

    @property
    def _is_in_content(self) -> bool:
        return self._call is None and self._tail is None and not self._lookout.held

    def finish(self) -> Parsed:
        if self._call is not None and self._call.name is None:
            self._findings.content(BEGIN + self._call.raw)
        if self._tail is not None:
            self._findings.content(self._slip + self._tail.release())
        self._findings.content(self._lookout.release())
        return self._findings.take(is_end=True)

    def _step(self, letter: str) -> None:
        if self._call is not None:
            self._in_call(self._call, letter)
        elif self._tail is not None:
            text, mark = self._tail.step(letter)
            self._slip += text
            if mark is not None:
                self._tail, self._slip = None, ""
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
