"""The TOML tables of this package, read once: causes, thresholds and log patterns."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

LAYERS = ("scheduler", "device", "fabric", "collective", "framework", "storage", "host")


@dataclass(frozen=True)
class Cause:
    """A cause that a verdict can name."""

    name: str
    layer: str
    confidence: float  # that the layer is right, when found with good evidence
    action: str
    is_symptom: bool = False  # says where the run is affected, not why


@dataclass(frozen=True)
class LogPattern:
    name: str
    expression: re.Pattern[str]
    cause: str
    meaning: str
    is_echo: bool = False  # usually the consequence of another rank's failure


@cache
def causes() -> dict[str, Cause]:
    return {
        name: Cause(name, row["layer"], float(row["confidence"]), row["action"], bool(row.get("symptom", False)))
        for name, row in _table("causes.toml").items()
    }


@cache
def threshold(name: str) -> float:
    return float(_table("thresholds.toml")["values"][name]["value"])


@cache
def hung_in(kind: str) -> float | None:
    """Return the seconds without progress after which a rank in this activity is hung; None for the work of a step."""
    row = _table("thresholds.toml")["hung_in"].get(kind)
    return None if row is None else float(row["value"])


@cache
def log_patterns() -> tuple[LogPattern, ...]:
    return tuple(
        LogPattern(row["name"], re.compile(row["expression"]), row["cause"], row["meaning"], bool(row.get("echo")))
        for row in _table("logs.toml")["pattern"]
    )


@cache
def log_pattern(name: str) -> LogPattern | None:
    return next((pattern for pattern in log_patterns() if pattern.name == name), None)


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("craton.observability.diagnosis").joinpath(name).read_text(encoding="utf-8"))
