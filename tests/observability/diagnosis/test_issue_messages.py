"""Errors of public issue threads: the number of right layers must not fall below what was measured."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from craton.observability.diagnosis import diagnose
from tests.observability.diagnosis.sick_runs import reported

MESSAGES: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("issue_messages.toml").read_text(encoding="utf-8")
)["message"]
MEASURED = 21  # of 24; 17 before rows were added for them (docs/measurements.md)


def is_right(row: dict[str, Any]) -> bool:
    if row.get("printed"):
        verdict = diagnose(reported("", row["message"], code=1))
    else:
        verdict = diagnose(reported(row["kind"], row["message"], errno=row.get("errno")))
    return verdict.condition == "dead" and verdict.layer in row["layers"]


def test_the_layers_of_errors_from_public_issues() -> None:
    assert len(MESSAGES) == len({row["source"] for row in MESSAGES}) == 24
    right = [row["source"] for row in MESSAGES if is_right(row)]
    assert len(right) >= MEASURED, right
