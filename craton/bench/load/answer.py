"""Reads a streamed answer as its bytes arrive: when tokens came, how many they were, and how it ended.

This runs once a token of every request, so it looks at bytes: a piece like the many before it is known by its
`finish_reason`, still null, and only counted. JSON is read where something is to be learnt: up to the first token, at
the end, and from whatever looks different.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

# Quotes inside of a text are escaped in JSON, so these bytes can only be the key itself.
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')
_MAYBE_NO_TOKEN = re.compile(rb'"role"\s*:\s*"|"delta"\s*:\s*\{\}|"error"\s*:')
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "text")
_SHOWN_CHARACTERS = 200
EMPTY = "empty answer"


class StreamedResponse:
    """One streamed answer. After its end: `error` is empty when it was whole."""

    __slots__ = (
        "_done",
        "_rest",
        "cached_tokens",
        "chunk_times",
        "end_time",
        "error",
        "error_detail",
        "finish_reason",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.chunk_times = array("d")
        self.end_time: float | None = None  # when the last token, or the word that it was the last, arrived
        self.output_tokens: int | None = None  # these three as the server counted them
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error = ""
        self.error_detail = ""
        self._done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Takes what arrived at the time `now`; an event may be split anywhere."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # the empty line between two events, or a comment that keeps the connection open
            if self.chunk_times and _UNFINISHED.search(line) and not _MAYBE_NO_TOKEN.search(line):
                self.chunk_times.append(now)
                self.end_time = now
            else:
                self._read(line[5:].strip(), now)

    def close(self) -> None:
        """Says in `error` what is missing, now that nothing more comes."""
        if self.error:
            return
        if self.finish_reason in ("abort", "error"):
            self.error = f"ended by the server: {self.finish_reason}"
        elif self.finish_reason is None and not self._done:
            self.error, self.error_detail = "cut short", f"the stream ended after {len(self.chunk_times)} pieces"
        elif not self.chunk_times:
            self.error, self.error_detail = EMPTY, f"no token came; finish_reason {self.finish_reason}"

    def _read(self, text: bytes, now: float) -> None:
        if text == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._fail("not OpenAI's format", text)
            return
        if event.get("error"):
            self._fail("error in the stream", text)
            return
        if usage := event.get("usage"):
            self._count(usage)
        for choice in event.get("choices") or ():
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
                self.end_time = now
            if _has_token(choice):
                self.chunk_times.append(now)
                self.end_time = now

    def _count(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens")
        self.output_tokens = usage.get("completion_tokens")
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _fail(self, kind: str, text: bytes) -> None:
        if not self.error:
            self.error, self.error_detail = kind, text[:_SHOWN_CHARACTERS].decode(errors="replace")


def _has_token(choice: dict[str, Any]) -> bool:
    """A piece without text can still carry a token (part of a character, a special token), but not where a chat only
    says who speaks, nor where an answer only says that it has ended."""
    piece = choice.get("delta", choice)
    if any(piece.get(name) for name in _TEXTS):
        return True
    if choice.get("finish_reason"):
        return False
    return "text" in piece or ("content" in piece and not piece.get("role"))
