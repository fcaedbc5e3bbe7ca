"""How a load test writes its numbers for people: three significant digits, the unit always said, `–` for none."""

from __future__ import annotations

import math

NONE = "–"


def digits(value: float) -> str:
    """5.12, 51.2, 512, 5,120; 0.00512."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    decimals = 1 if size >= 9.995 else 2 if size >= 0.995 else 2 - math.floor(math.log10(size))
    return f"{value:.{min(decimals, 6)}f}"


def duration(seconds: float | None) -> str:
    """62 µs, 8.65 ms, 865 ms, 12.1 s."""
    if seconds is None:
        return NONE
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"
    return f"{digits(seconds * 1e3)} ms" if abs(seconds) < 0.9995 else f"{digits(seconds)} s"


def rate(per_second: float | None, of: str) -> str:
    return NONE if per_second is None else f"{digits(per_second)} {of}/s"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %".replace(".0 %", " %")
