"""How a load test writes its numbers for people: three significant digits, the unit always said, `–` for none."""

from __future__ import annotations

from craton.digits import digits

NONE = "–"


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
