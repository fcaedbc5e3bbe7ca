"""How a plan writes its numbers for people: three significant digits, the unit always said.

Device memory is in GiB because cards report MiB; everything that is sent or stored is in decimal GB and TB, because
networks, disks and buckets are sold so.
"""

from __future__ import annotations

import math
from datetime import date

_GIBIBYTE = 2**30
_NO_VALUE = "–"

# (name, how many of the base unit), smallest first. A unit is used from one of itself upwards, except that minutes,
# hours and years start at two: "90 s" says more than "1.5 min".
_COUNTS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12), ("P", 1e15))
_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15))
_SECONDS = (
    ("µs", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("min", 60.0),
    ("h", 3600.0),
    ("days", 86400.0),
    ("years", 31557600),
)
_FIRST_USED_AT = {"min": 120.0, "h": 7200.0, "days": 2 * 86400.0, "years": 2 * 31557600.0}


def digits(value: float) -> str:
    """Three significant digits without an exponent: 5.12, 51.2, 512, 5,120."""
    if not math.isfinite(value):
        return _NO_VALUE
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.0995:
        return f"{value:.2f}"
    return f"{value:.{min(2 - math.floor(math.log10(size)), 6)}f}"


def count(value: float) -> str:
    """A number of things: 406 B parameters, 15.6 T tokens, 1 T, 850."""
    if abs(value) < 10_000 and value == int(value):
        return f"{int(value):,}"
    return _without_zeros(_scaled(value, _COUNTS))


def day(moment: date) -> str:
    return f"{moment.day} {moment:%b %Y}"


def day_range(first: date, last: date) -> str:
    """4 Feb – 18 Mar 2027; the year stands once where it is the same."""
    start = f"{first.day} {first:%b}" if first.year == last.year else day(first)
    return f"{start} – {day(last)}"


def duration(seconds: float) -> str:
    return _scaled(seconds, _SECONDS)


def duration_range(low_seconds: float, high_seconds: float) -> str:
    return _scaled_range(low_seconds, high_seconds, _SECONDS)


def setting(seconds: float) -> str:
    """A duration somebody chose, in the largest unit that it is a whole number of: 90 s, 5 min, 2 h, 1 day."""
    for unit, scale in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale and seconds % scale == 0:
            number = round(seconds / scale)
            return f"{number:,} {unit}{'s' if unit == 'day' and number > 1 else ''}"
    return _without_zeros(duration(seconds))


def memory(num_bytes: float) -> str:
    return f"{digits(num_bytes / _GIBIBYTE)} GiB"


def gibibytes(num_bytes: float) -> str:
    """Memory without its unit, for a column or list that names the unit once: one decimal while that says something."""
    size = num_bytes / _GIBIBYTE
    return f"{size:.1f}" if 0.05 <= size < math.inf else digits(size)


def stored(num_bytes: float) -> str:
    return _scaled(num_bytes, _BYTES)


def rate(bytes_per_second: float) -> str:
    text = _scaled(bytes_per_second, _BYTES)
    return text if text == _NO_VALUE else f"{text}/s"


def percent(share: float) -> str:
    """One decimal; two where one would round up to a false 100 %."""
    if not math.isfinite(share):
        return _NO_VALUE
    if share == 1:
        return "100 %"
    if 0.9995 <= share < 1:
        return f"{min(100 * share, 99.99):.2f} %"
    return f"{100 * share:.1f} %"


def percent_range(low: float, high: float) -> str:
    return percent(low) if low == high else f"{percent(low).removesuffix(' %')} – {percent(high)}"


def signed_percent(change: float) -> str:
    """A relative change: +3.1 %, −12 %."""
    if not math.isfinite(change):
        return _NO_VALUE
    number = f"{abs(100 * change):.{0 if abs(change) >= 0.0995 else 1}f}"
    sign = "" if float(number) == 0 else "+" if change > 0 else "−"
    return f"{sign}{number} %"


def dollars(amount: float) -> str:
    """$3.20, $850, $12,400, $182 k, $1.82 M, $1.34 B."""
    if not math.isfinite(amount):
        return _NO_VALUE
    if abs(amount) < 999.5:
        return f"${amount:.2f}" if abs(amount) < 99.995 else f"${amount:.0f}"
    return f"${_scaled(amount, _COUNTS)}"


def dollars_range(low: float, high: float) -> str:
    return f"{dollars(low)} – {dollars(high)}"


def _unit_for(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    chosen = units[0]
    for name, scale in units:
        # 0.9995 and not 1: what would round to 1,000 of this unit is 1.00 of the next.
        if abs(value) >= _FIRST_USED_AT.get(name, scale) * 0.9995:
            chosen = (name, scale)
    return chosen


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if not math.isfinite(value):
        return _NO_VALUE
    name, scale = ("s", 1.0) if value == 0 and units is _SECONDS else _unit_for(value, units)
    return f"{digits(value / scale)} {name}".strip()


def _scaled_range(low: float, high: float, units: tuple[tuple[str, float], ...]) -> str:
    """Both ends in the unit of the upper one, so that they compare at a glance."""
    if not math.isfinite(high):
        return f"{_scaled(low, units)} or more"
    name, scale = _unit_for(high, units)
    return f"{digits(low / scale)} – {digits(high / scale)} {name}".strip()


def _without_zeros(text: str) -> str:
    number, space, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit
