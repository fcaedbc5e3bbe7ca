"""Summaries of runs that have ended, remembered from one `craton ui` to the next: a ledger of a month is read once.

A file of the user's cache, one for each folder of runs. What was written by another version, is torn, or cannot be
written is as good as nothing: the runs are read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from craton.infrastructure.storage import cache_root
from craton.telemetry import RunSummary
from craton.telemetry.files import read_regular

FIELDS = [field.name for field in fields(RunSummary)]  # another version of Craton may have others


@dataclass(frozen=True)
class Remembered:
    """A run as it was when `key` was what it looked like."""

    key: tuple[int, ...]
    summary: RunSummary
    kind: str
    planned_dollars: float | None


def recall(root: Path) -> dict[str, Remembered]:
    """Run's name → what is remembered of it."""
    try:
        document = json.loads(read_regular(_path(root)))
        if document["fields"] != FIELDS or document["root"] != str(root):
            return {}
        return {name: _from_json(item) for name, item in document["runs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def remember(root: Path, runs: Mapping[str, Remembered]) -> None:
    """Replaces what was remembered of this folder."""
    path = _path(root)
    document = {"fields": FIELDS, "root": str(root), "runs": {name: _to_json(item) for name, item in runs.items()}}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document), encoding="utf-8")
        os.replace(partial, path)
    except OSError:  # a full disk costs the time to read them again, and no more
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _path(root: Path) -> Path:
    name = hashlib.blake2b(str(root).encode(), digest_size=8).hexdigest()
    return cache_root() / "page" / f"{name}.json"


def _to_json(run: Remembered) -> dict[str, Any]:
    summary = {**asdict(run.summary), "path": str(run.summary.path)}
    return {"key": run.key, "summary": summary, "kind": run.kind, "planned_dollars": run.planned_dollars}


def _from_json(document: Mapping[str, Any]) -> Remembered:
    summary = document["summary"]
    return Remembered(
        key=tuple(document["key"]),
        summary=RunSummary(**{**summary, "path": Path(summary["path"])}),
        kind=document["kind"],
        planned_dollars=document["planned_dollars"],
    )
