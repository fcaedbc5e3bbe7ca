"""Server-sent events from bytes that may be split anywhere, with a limit on the size of one event."""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT_BYTES = 16 << 20  # the first event of an answer may have the ids of a long prompt
SHOWN_BYTES = 80
DONE = b"[DONE]"


class EventFormatError(ValueError):
    """Bytes that are no event of a completion."""


class EventReader:
    """Splits an event stream; `is_done` after OpenAI's last event."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self.is_done = False
        self._max_bytes = max_bytes
        self._rest = bytearray()  # an incomplete line
        self._searched = 0  # bytes of it without a line end
        self._data: list[bytes] = []  # lines of an incomplete event
        self._num_bytes = 0  # of these

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the events that end in this data. Raise EventFormatError for what is no JSON object or too large."""
        self._rest += data
        events = []
        while (end := self._rest.find(b"\n", self._searched)) >= 0:
            line = bytes(self._rest[:end]).removesuffix(b"\r")
            del self._rest[: end + 1]
            self._searched = 0
            if line.startswith(b"data:"):
                self._num_bytes += len(line)
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and (event := self._event()) is not None:
                events.append(event)
            self._check_size()
        self._searched = len(self._rest)
        self._check_size()
        return events

    def _event(self) -> dict[str, Any] | None:
        text, self._data, self._num_bytes = b"\n".join(self._data).strip(), [], 0
        if not text or self.is_done:
            return None
        if text == DONE:
            self.is_done = True
            return None
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:  # also invalid UTF-8
            raise EventFormatError(f"an event is not JSON: {shown(text)} ({type(error).__name__})") from None
        if not isinstance(event, dict):
            raise EventFormatError(f"an event is not an object: {shown(text)}")
        return event

    def _check_size(self) -> None:
        if len(self._rest) + self._num_bytes > self._max_bytes:
            raise EventFormatError(f"an event has more than {self._max_bytes:,} bytes")


def shown(text: bytes) -> str:
    """Return the beginning of bytes for an error message."""
    cut = text[:SHOWN_BYTES].decode(errors="replace")
    return repr(cut + "…" if len(text) > SHOWN_BYTES else cut)
