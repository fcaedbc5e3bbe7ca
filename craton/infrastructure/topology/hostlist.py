"""Expand and compress Slurm's hostlists: `g[1-4,7],h01`.

Guarantees: `expand(compress(names))` has the same names; leading zeros are kept; an implausibly large range is
rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from craton.infrastructure.errors import TopologyError
from craton.infrastructure.topology.topology import natural

MAX_NAMES = 200_000
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]+)")


def expand(text: str) -> list[str]:
    """Return the names of a hostlist; brackets may occur anywhere, more than once, as in `r[1-2]n[01-08]`."""
    names: list[str] = []
    for part in _split(text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]*)(?:\[([^\[\]]*)\])?", part):
            endings = _numbers(ranges, text) if ranges else [""]
            if len(expanded) * len(endings) + len(names) > MAX_NAMES:
                raise TopologyError(f"{text[:60]!r} has more than {MAX_NAMES} hosts; check the range")
            expanded = [name + literal + ending for name in expanded for ending in endings]
        names += expanded
    return names


def compress(names: Iterable[str]) -> str:
    """Return a hostlist of the names: runs of numbers with the same prefix and width become ranges."""
    groups: dict[tuple[str, int], list[int]] = {}
    order: list[tuple[str, int] | str] = []
    for name in sorted(set(names), key=natural):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            order.append(name)
            continue
        digits = match["digits"]
        # g1 and g10 may share a range, g01 and g1 may not: width counts only where a number has leading zeros
        key = (match["prefix"], len(digits) if digits.startswith("0") and len(digits) > 1 else 0)
        padded = (match["prefix"], len(digits))
        if padded in groups and not key[1]:
            key = padded
        if key not in groups:
            groups[key] = []
            order.append(key)
        groups[key].append(int(digits))
    return ",".join(item if isinstance(item, str) else _ranges(*item, groups[item]) for item in order)


def _ranges(prefix: str, width: int, numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first:0{width}d}" + (f"-{last:0{width}d}" if last > first else "") for first, last in runs]
    if len(texts) == 1 and "-" not in texts[0]:
        return prefix + texts[0]
    return f"{prefix}[{','.join(texts)}]"


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    if not re.fullmatch(r"[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*", text):
        raise TopologyError(f"{text[:60]!r} is not a list of hosts; brackets do not match")
    return [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]


def _numbers(ranges: str, text: str) -> list[str]:
    names: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if match is None:
            raise TopologyError(f"{text[:60]!r} is not a list of hosts; {part!r} is not a number or a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MAX_NAMES:
            raise TopologyError(f"{text[:60]!r} has more than {MAX_NAMES} hosts; check the range")
        names += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return names
