"""Format numbers for people, the same way on every screen, page and report: three significant digits, always with the
unit, and `–` for unknown values.

    1.46M tokens/s   8.03B   $24.3k   20%   350 ms   2h 5m   79.6 GiB   2.55 GB   0.9–1.1 s

Memory is in GiB, as GPUs and hosts report it. Data that is sent or stored is in decimal GB, as networks, disks and
buckets are sold. Both ends of a range use the unit of the upper end, so that they are easy to compare.
"""

from __future__ import annotations

import math
import time
from datetime import date, datetime

UNKNOWN = "–"
_GIBIBYTE = 2**30
_THOUSANDS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
_DOLLARS = (("B", 1e9), ("M", 1e6), ("k", 1e3))
_PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_YEAR_SECONDS = 365.25 * 86400
# (unit, seconds per unit, smallest value in seconds that uses it). A value that would round to 1,000 ms is 1.00 s.
_SHORT_UNITS = ((" s", 1.0, 0.9995), (" ms", 1e-3, 0.9995e-3), (" µs", 1e-6, 0.0))
# For ranges, whose ends use one unit only: "90–110 s" is clearer than "1.5–1.83m".
_RANGE_UNITS = (
    (" years", _YEAR_SECONDS, 2 * _YEAR_SECONDS),
    ("d", 86400.0, 2 * 86400.0),
    ("h", 3600.0, 2 * 3600.0),
    ("m", 60.0, 2 * 60.0),
    *_SHORT_UNITS,
)


def digits(value: float | None) -> str:
    """Without an exponent: 5.12, 51.2, 512, 5,120, 0.00512."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    decimals = 1 if size >= 9.995 else 2 if size >= 0.9995 else 2 - math.floor(math.log10(size))
    text = f"{value:.{min(decimals, 6)}f}"
    return text if float(text) else "0"


def loss(value: float | None) -> str:
    """Like `digits`, but show NaN and infinity: a reader looks for exactly these."""
    if value is not None and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "−inf"
    return digits(value)


def score(value: float | None) -> str:
    """A reward, accuracy or divergence, with two decimals: 0.12, 0.70, −1.50; NaN and infinity like a loss."""
    if value is None or not math.isfinite(value) or abs(value) >= 99.995:
        return loss(value)
    return f"{value:.2f}".replace("-", "−")


def amount(value: float | None) -> str:
    """A measured number: 1.46M, 4.59k, 850."""
    return UNKNOWN if value is None or not math.isfinite(value) else _scaled(value, _THOUSANDS)


def amount_range(low: float, high: float) -> str:
    """5.63–9.47k."""
    unit, scale = next((item for item in _THOUSANDS if high >= item[1] * 0.9995), ("", 1.0))
    return f"{_ends(low / scale, high / scale)}{unit}"


def count(value: float | None) -> str:
    """A number of things, exact while it is short: 2,640 steps, 8.03B parameters, 15.6T tokens, 1T."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 10_000 and value == int(value):
        return f"{int(value):,}"
    text = _scaled(value, _THOUSANDS)
    unit = text[-1] if text[-1].isalpha() else ""
    return _without_zeros(text.removesuffix(unit)) + unit


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`, `1,024 GPUs`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def rate(per_second: float | None, noun: str) -> str:
    """1.46M tokens/s."""
    return UNKNOWN if per_second is None or not math.isfinite(per_second) else f"{amount(per_second)} {noun}/s"


def duration(seconds: float | None) -> str:
    """12.3 µs, 865 ms, 12.1 s, 1m 44s, 3h 12m, 4d 3h, 123d, 2.51 years."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    size = abs(seconds)
    if size < 59.95:
        return "0 s" if size == 0 else _in_unit(seconds, _SHORT_UNITS)
    sign = "−" if seconds < 0 else ""
    for small, large, unit_seconds, per_large, limit in (
        ("s", "m", 1, 60, 3600),
        ("m", "h", 60, 60, 86400),
        ("h", "d", 3600, 24, 100 * 86400),
    ):
        units = round(size / unit_seconds)
        if units * unit_seconds < limit:
            whole, rest = divmod(units, per_large)
            return f"{sign}{whole}{large}" + (f" {rest}{small}" if rest else "")
    if size < 2 * _YEAR_SECONDS:
        return f"{sign}{size / 86400:.0f}d"
    return f"{sign}{digits(size / _YEAR_SECONDS)} years"


def setting(seconds: float | None) -> str:
    """A configured duration, without the trailing zeros of a measurement: 30 s, 1.5 s, 5m, 2h."""
    number, space, unit = duration(seconds).partition(" ")
    return f"{_without_zeros(number)}{space}{unit}"


def whole_duration(seconds: float | None) -> str:
    """A duration that counts down, in whole seconds so that it does not flicker."""
    return f"{seconds:.0f} s" if seconds is not None and 0 <= seconds < 59.5 else duration(seconds)


def duration_range(low_seconds: float, high_seconds: float) -> str:
    """0.9–1.1 s, 2.9–3.4h; without an upper limit `41d 6h or more`."""
    if not math.isfinite(high_seconds):
        return f"{duration(low_seconds)} or more"
    name, scale = _unit_of(high_seconds, _RANGE_UNITS) if high_seconds else (" s", 1.0)
    return f"{_ends(low_seconds / scale, high_seconds / scale)}{name}"


def memory(num_bytes: float | None) -> str:
    """Bytes of memory: 1.73 GiB, 512 MiB, 306 KiB."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    for unit, scale in (("GiB", _GIBIBYTE), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{digits(num_bytes / scale)} {unit}"
    return f"{digits(num_bytes)} B"


def gibibytes(num_bytes: float) -> str:
    """Memory without its unit, for a column or list that names the unit once; one decimal where it is significant."""
    size = num_bytes / _GIBIBYTE
    return f"{size:.1f}" if 0.05 <= size < math.inf else digits(size)


def stored(num_bytes: float | None) -> str:
    """Bytes that are sent or stored: 2.55 GB, 1.2 TB."""
    return with_prefix(num_bytes, "B")


def bandwidth(bytes_per_second: float | None) -> str:
    return with_prefix(bytes_per_second, "B/s")


def with_prefix(value: float | None, unit: str) -> str:
    """722 GFLOP, 3.35 TB/s, 12 B."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for prefix, scale in _PREFIXES:
        if abs(value) >= scale * 0.9995:
            return f"{digits(value / scale)} {prefix}{unit}"
    return f"{_without_zeros(digits(value))} {unit}"


def percent(share: float | None) -> str:
    """20%, 5.2%, 98.4%: a decimal near either end, and two where one would round to a false 0% or 100%."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    if 0 < abs(share) < 0.00005:
        return "<0.01%"
    return f"{_without_zeros(_hundredths(share, _percent_decimals(share)))}%"


def percent_range(low: float, high: float) -> str:
    """95.1–97.3%."""
    decimals = max(_percent_decimals(low), _percent_decimals(high))
    ends = [_hundredths(end, decimals) for end in (low, high)]
    if all(end.endswith("0") for end in ends):
        ends = [_without_zeros(end) for end in ends]
    return f"{ends[0]}%" if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}%"


def signed_percent(relative: float | None) -> str:
    """A relative change: +3.1%, −12%, ±0%."""
    if relative is None or not math.isfinite(relative):
        return UNKNOWN
    number = _without_zeros(f"{abs(100 * relative):.{1 if abs(relative) < 0.0995 else 0}f}")
    return f"{'±' if number == '0' else '+' if relative > 0 else '−'}{number}%"


def change(measured: float | None, planned: float | None) -> str:
    """Measured relative to planned: +3.1%, −12%, ±0%, ×3.1."""
    if not measured or not planned or not math.isfinite(measured / planned):
        return UNKNOWN
    ratio = measured / planned
    return f"×{ratio:.1f}" if ratio >= 2 else signed_percent(ratio - 1)


def dollars(amount_dollars: float | None) -> str:
    """$3.20, $850, $24.3k, $1.82M."""
    if amount_dollars is None or not math.isfinite(amount_dollars):
        return UNKNOWN
    sign, size = ("−" if amount_dollars < 0 else ""), abs(amount_dollars)
    if size < 999.5:
        return f"{sign}${size:.2f}" if size < 99.995 else f"{sign}${size:.0f}"
    return f"{sign}${_scaled(size, _DOLLARS)}"


def small_dollars(amount_dollars: float | None) -> str:
    """Like `dollars`, with two significant digits below ten cents: $0.000008."""
    if amount_dollars is None or not 0 < amount_dollars < 0.1:
        return dollars(amount_dollars)
    return f"${amount_dollars:.{1 - math.floor(math.log10(amount_dollars))}f}".rstrip("0")


def dollars_range(low: float, high: float) -> str:
    """$3.20–4.10, $21.1–25.6k."""
    if high < 999.5:
        return f"${_ends(low, high, 2 if high < 99.995 else 0)}"
    unit, scale = next(item for item in _DOLLARS if high >= item[1] * 0.9995)
    return f"${_ends(low / scale, high / scale)}{unit}"


def clock(moment_seconds: float) -> str:
    return f"{datetime.fromtimestamp(moment_seconds):%H:%M:%S}"


def moment(then: float | None) -> str:
    """Time of day for today, date and time otherwise."""
    if then is None:
        return UNKNOWN
    at = time.localtime(then)
    return time.strftime("%H:%M:%S" if at[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", at)


def day(when: date) -> str:
    return f"{when.day} {when:%b %Y}"


def day_range(first: date, last: date) -> str:
    """4 Feb – 18 Mar 2027; the year appears once if both dates share it."""
    start = f"{first.day} {first:%b}" if first.year == last.year else day(first)
    return f"{start} – {day(last)}"


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    for unit, scale in units:
        # 0.9995 and not 1: a value that would round to 1,000 of this unit is 1.00 of the next.
        if abs(value) >= scale * 0.9995:
            return f"{digits(value / scale)}{unit}"
    return digits(value)


def _unit_of(seconds: float, units: tuple[tuple[str, float, float], ...]) -> tuple[str, float]:
    return next((name, scale) for name, scale, first_seconds in units if abs(seconds) >= first_seconds)


def _in_unit(seconds: float, units: tuple[tuple[str, float, float], ...]) -> str:
    name, scale = _unit_of(seconds, units)
    return f"{digits(seconds / scale)}{name}"


def _ends(low: float, high: float, decimals: int | None = None) -> str:
    """Both ends with the decimals of the upper one, without shared trailing zeros."""
    if decimals is None:
        decimals = len(digits(high).partition(".")[2])
        while decimals and all(f"{end:.{decimals}f}".endswith("0") for end in (low, high)):
            decimals -= 1
    first, last = f"{low:,.{decimals}f}", f"{high:,.{decimals}f}"
    return first if first == last else f"{first}–{last}"


def _percent_decimals(share: float) -> int:
    size = abs(share)
    if 0 < size < 0.0005 or 0.9995 <= share < 1:
        return 2
    return 1 if size < 0.0995 or 0.9 <= share < 1 else 0


def _hundredths(share: float, decimals: int) -> str:
    return f"{min(100 * share, 99.99) if share < 1 else 100 * share:.{decimals}f}"


def _without_zeros(number: str) -> str:
    return number.rstrip("0").rstrip(".") if "." in number else number
