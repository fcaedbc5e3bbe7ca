"""Parses a streamed answer as its bytes arrive: token times and counts, and how it ended.

This runs for every token of every request, so it works on bytes: an ordinary chunk, recognized by its null
`finish_reason`, is only counted. JSON is parsed up to the first token, at the end, and for unusual chunks.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

# Quotes inside a JSON text are escaped, so these bytes can only be the key itself.
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')
_MAYBE_NO_TOKEN = re.compile(rb'"role"\s*:\s*"|"delta"\s*:\s*\{\}|"error"\s*:')
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "text")
_SHOWN_CHARACTERS = 200
EMPTY = "empty answer"


class StreamedResponse:
    """One streamed answer. After its end, `error` is empty if it is complete."""

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
        self.end_time: float | None = None  # arrival of the last token or of the finish_reason
        self.output_tokens: int | None = None  # this and the next two are the server's usage
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error = ""
        self.error_detail = ""
        self._done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Process data that arrived at the time `now`; an event may be split anywhere."""
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
        """End the answer; set `error` if it is incomplete."""
        if self.error:
            return
        if self.finish_reason in ("abort", "error"):
            self.error = f"ended by the server: {self.finish_reason}"
        elif self.finish_reason is None and not self._done:
            self.error, self.error_detail = "cut short", f"the stream ended after {len(self.chunk_times)} chunks"
        elif not self.chunk_times:
            self.error, self.error_detail = EMPTY, f"no tokens; finish_reason {self.finish_reason}"

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
    """Whether a chunk has a token. One without text can (part of a character, a special token), but not a chat's role
    chunk or a chunk with only a finish_reason."""
    piece = choice.get("delta", choice)
    if any(piece.get(name) for name in _TEXTS):
        return True
    if choice.get("finish_reason"):
        return False
    return "text" in piece or ("content" in piece and not piece.get("role"))
