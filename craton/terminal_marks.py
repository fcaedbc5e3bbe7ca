"""Sparklines, bars and colours for terminals."""

from __future__ import annotations

import math
from itertools import pairwise

PHASE_STYLES = {  # terminal colours by their names in rich
    "rollout": "bright_green",
    "reward": "bright_magenta",
    "sync": "bright_yellow",
    "data": "cyan",
    "compute": "blue",
    "communication": "yellow",
    "optimizer": "magenta",
    "checkpoint": "green",
}
_BARS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def sparkline(values: list[float], width: int) -> str:
    """Return a curve of `width` characters; with more values than characters, each character shows a mean."""
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
    """Return a bar of up to `width` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    if share > 0 and eighths == 0:
        eighths = 1
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")
