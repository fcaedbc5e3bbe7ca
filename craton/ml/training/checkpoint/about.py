"""Validation of COMPLETE: types, ranges, and that the step matches the name of the folder.

Another user may have written it, with matching checksums. After `check_about` no reader meets a value of a wrong type,
a number that no run reaches, or terminal control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_STEP = 10**15 - 1
MAX_WORLD = 10**7  # ranks
MAX_NUMBER = 2**63 - 1  # samples and bytes
MAX_NAME_LETTERS = 4096  # a tier may be named by its path
MAX_TIERS = 64
MAX_PENDING = 10**6  # samples that are generated ahead


def check_about(about: Mapping[str, Any], step: int) -> None:
    """Raise ValueError for an invalid COMPLETE of this step, KeyError for a missing field."""
    _whole("step", about["step"], 0, MAX_STEP)
    if about["step"] != step:
        raise ValueError(f"it belongs to step {about['step']}, but the folder to step {step}")
    for name, lowest, highest in (("world", 1, MAX_WORLD), ("bytes", 0, MAX_NUMBER)):
        if name in about:
            _whole(name, about[name], lowest, highest)
    seconds = about.get("time", 0.0)
    if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_NUMBER:  # NaN is neither
        raise ValueError("its time is not a number of seconds")
    _text("save", about["save"])
    tiers = about["tiers"]
    if type(tiers) is not list or len(tiers) > MAX_TIERS:
        raise ValueError(f"its tiers are not a list of at most {MAX_TIERS} names")
    for tier in tiers:
        _text("tier", tier)
    _check_counters(about["counters"], step)


def _check_counters(counters: Any, step: int) -> None:
    if type(counters) is not dict:
        raise ValueError("its counters are not a JSON object")
    if counters.get("step", step) != step:
        raise ValueError("its counters belong to another step")
    if "next_sample" in counters:
        _whole("next_sample", counters["next_sample"], 0, MAX_NUMBER)
    pending = counters.get("pending") or []
    if type(pending) is not list or len(pending) > MAX_PENDING:
        raise ValueError(f"its pending samples are not a list of at most {MAX_PENDING:,}")
    for index in pending:
        _whole("pending sample", index, 0, MAX_NUMBER)
    records = counters.get("records") or []
    if type(records) is not list or not all(type(record) is dict for record in records):
        raise ValueError("its records are not a list of JSON objects")
    for record in records:
        _whole("step of a record", record.get("step"), 0, step)
        if not all(_is_recorded(value) for value in record.values()):
            raise ValueError("its records have an invalid value")


def _is_recorded(value: Any) -> bool:
    return value is None or type(value) in (int, float, str, bool)


def _whole(name: str, value: Any, lowest: int, highest: int) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(f"its {name} is not an integer from {lowest:,} to {highest:,}")


def _text(name: str, value: Any) -> None:
    if type(value) is not str or not 0 < len(value) <= MAX_NAME_LETTERS or not value.isprintable():
        raise ValueError(f"its {name} is not a string of 1 to {MAX_NAME_LETTERS:,} printable characters")
