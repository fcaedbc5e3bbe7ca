"""Texts that differ in their numbers only: lines and messages of several ranks."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\bnan\b|\binf\b")


def without_numbers(text: str) -> str:
    """Return the text with every number replaced by `#`: indices, addresses, times and losses."""
    return _NUMBERS.sub("#", text)
