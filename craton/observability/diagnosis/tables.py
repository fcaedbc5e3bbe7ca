"""The TOML tables of this package, read once: causes, thresholds and log patterns."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

FIRST_HAND = 0.95  # confidence in what a process reports about its own end
LAYERS = ("scheduler", "device", "fabric", "collective", "framework", "storage", "host")


@dataclass(frozen=True)
class Cause:
    """A cause that a verdict can name."""

    name: str
    layer: str
    confidence: float  # that the layer is right, when found with good evidence
    action: str
    is_symptom: bool = False  # says where the run is affected, not why
    needs: tuple[str, ...] = ()  # traits of the runs in which it can occur
    variants: tuple[tuple[tuple[str, ...], str], ...] = ()  # traits → action, instead of `action`


@dataclass(frozen=True)
class LogPattern:
    name: str
    expression: re.Pattern[str]
    cause: str
    meaning: str
    is_echo: bool = False  # usually the consequence of another rank's failure


@dataclass(frozen=True)
class ErrorKind:
    """What a report of a process about its own end means; everything that is given must match."""

    name: str
    cause: str
    type: re.Pattern[str] | None  # matches the name of the exception
    errno: tuple[int, ...]
    message: re.Pattern[str] | None
    frame: re.Pattern[str] | None  # matches the innermost frame
    confidence: float


@cache
def causes() -> dict[str, Cause]:
    return {
        name: Cause(
            name,
            row["layer"],
            float(row["confidence"]),
            row["action"],
            bool(row.get("symptom", False)),
            tuple(row.get("needs", ())),
            tuple((tuple(variant["when"]), variant["action"]) for variant in row.get("variants", ())),
        )
        for name, row in _table("causes.toml").items()
    }


@cache
def threshold(name: str) -> float:
    return float(_table("thresholds.toml")["values"][name]["value"])


@cache
def log_patterns() -> tuple[LogPattern, ...]:
    return tuple(
        LogPattern(row["name"], re.compile(row["expression"]), row["cause"], row["meaning"], bool(row.get("echo")))
        for row in _table("logs.toml")["pattern"]
    )


@cache
def error_kinds() -> tuple[ErrorKind, ...]:
    return tuple(
        ErrorKind(
            row["name"],
            row["cause"],
            re.compile(row["type"]) if "type" in row else None,
            tuple(row.get("errno", ())),
            re.compile(row["message"]) if "message" in row else None,
            re.compile(row["frame"]) if "frame" in row else None,
            float(row.get("confidence", FIRST_HAND)),
        )
        for row in _table("errors.toml")["error"]
    )


@cache
def log_pattern(name: str) -> LogPattern | None:
    return next((pattern for pattern in log_patterns() if pattern.name == name), None)


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("craton.observability.diagnosis").joinpath(name).read_text(encoding="utf-8"))
