"""How numbers and events of runs are written, in a terminal and on the page: short, three digits, the unit always said,
`–` for what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from craton.digits import digits as plain_digits

NONE = "–"
PHASE_STYLES = {  # colours of a terminal, as rich names them
    "data": "cyan",
    "compute": "blue",
    "communication": "yellow",
    "optimizer": "magenta",
    "checkpoint": "green",
}
_THOUSANDS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
_STAMP = ("time", "generation", "event", "node", "step", "rank", "pid")  # of an event, told elsewhere
_BARS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def digits(value: float | None) -> str:
    """Three significant digits without an exponent: 5.12, 51.2, 5,120, 0.00512."""
    return NONE if value is None or not math.isfinite(value) else plain_digits(value)


def loss(value: float | None) -> str:
    """The same; a loss that is not a number is said to be so."""
    return "NaN" if value is not None and math.isnan(value) else digits(value)


def amount(value: float | None) -> str:
    """4.59k, 1.2M, 850."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit, scale in _THOUSANDS:
        if abs(value) >= scale * 0.9995:
            return f"{digits(value / scale)}{unit}"
    return digits(value)


def duration(seconds: float | None) -> str:
    """12 µs, 865 ms, 12.1 s, 1 min 44 s, 3 h 12 min, 4 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{digits(seconds)} s"
    for small, large, unit_seconds, limit in (("s", "min", 1, 3600), ("min", "h", 60, 86400), ("h", "d", 3600, 0)):
        units = round(seconds / unit_seconds)
        if not limit or units * unit_seconds < limit:
            per_large = 24 if small == "h" else 60
            return f"{units // per_large} {large} {units % per_large} {small}"
    raise AssertionError("every duration has a unit")


def remaining(seconds: float | None) -> str:
    """A duration that counts down, without digits that only flicker."""
    return f"{seconds:.0f} s" if seconds is not None and seconds < 59.5 else duration(seconds)


def size(num_bytes: float | None) -> str:
    """1.73 GiB, 512 MiB, 306 KiB, 0 bytes."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return NONE
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{digits(num_bytes / scale)} {unit}"
    return f"{digits(num_bytes)} bytes"


def percent(share: float | None) -> str:
    """70 %, 99.9 %; what would round up to a false 100 % keeps a decimal."""
    if share is None or not math.isfinite(share):
        return NONE
    text = f"{100 * share:.0f}" if share < 0.995 or share >= 1 else f"{min(100 * share, 99.9):.1f}"
    return f"{text} %"


def change(measured: float | None, planned: float | None) -> str:
    """How far a measured number is from the planned one: +3 %, −12 %, ±0 %, ×3.1."""
    if not measured or not planned or not math.isfinite(measured / planned):
        return NONE
    ratio = measured / planned
    if ratio >= 2:
        return f"×{ratio:.1f}"
    rounded = round(100 * (ratio - 1))
    return f"{'+' if rounded > 0 else '−' if rounded < 0 else '±'}{abs(rounded)} %"


def dollars(amount_dollars: float | None) -> str:
    if amount_dollars is None or not math.isfinite(amount_dollars):
        return NONE
    return f"${amount_dollars:,.2f}" if amount_dollars < 1000 else f"${amount(amount_dollars)}"


def clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%H:%M:%S}"


def sparkline(values: list[float], width: int) -> str:
    """A curve of `width` characters; where there are more values than characters, each is a mean."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def bar(share: float, width: int) -> str:
    """A bar of at most `width` characters, to an eighth of one."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    if share > 0 and eighths == 0:
        eighths = 1
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def event_fields(event: Mapping[str, Any]) -> str:
    """The fields of an event as they are: `tier shared · 20 GiB · took 210 ms`."""
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
        return f"{name.removesuffix('seconds').strip() or 'took'} {duration(value)}"
    if name.endswith("bytes"):
        return f"{name.removesuffix('bytes')}{size(value)}".strip()
    return f"{name} {value}" if isinstance(value, int) else f"{name} {digits(value)}"
