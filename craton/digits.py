"""How people read a number: three significant digits."""

from __future__ import annotations

import math


def digits(value: float) -> str:
    """Without an exponent: 5.12, 51.2, 512, 5,120, 0.00512."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    decimals = 1 if size >= 9.995 else 2 if size >= 0.995 else 2 - math.floor(math.log10(size))
    return f"{value:.{min(decimals, 6)}f}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`, `1,024 GPUs`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
