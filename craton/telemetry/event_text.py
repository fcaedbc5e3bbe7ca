"""Format the fields of an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton import formatting

_STAMP = ("time", "generation", "event", "node", "step", "rank", "pid")  # shown elsewhere


def event_fields(event: Mapping[str, Any]) -> str:
    """Return the fields of an event as text: `tier shared · 21.5 GB · took 210 ms`."""
    reason = str(event.get("reason") or "")
    words = [
        _event_field(key, value)
        for key, value in event.items()
        if key not in _STAMP and isinstance(value, int | float | str) and not isinstance(value, bool)
        if not (key == "tier" and f"tier {value}" in reason) and not (key == "bytes" and not value)
    ]
    return " · ".join(word for word in words if word)


def _event_field(key: str, value: float | str) -> str:
    name = key.replace("_", " ")
    if isinstance(value, str):
        text = value.splitlines()[0] if value else ""
        return text if key in ("message", "reason", "text", "fault") else f"{name} {text}"
    if name.endswith("seconds"):
        return f"{name.removesuffix('seconds').strip() or 'took'} {formatting.duration(value)}"
    if name.endswith("bytes"):
        return f"{name.removesuffix('bytes')}{formatting.stored(value)}".strip()
    return f"{name} {value}" if isinstance(value, int) else f"{name} {formatting.digits(value)}"
