"""Cached summaries of runs, for `ps`: the state from a run's files, and its recoveries.

The longer a run, the longer it takes to sum up its ledger. An ended run does not change, so its summary is cached in
RUN/summary.json with the sizes and times of the source files, and is valid as long as they match. The cache of an owner
holds the sum of its members too, so that listing 500 owners does not open 2,000 members. A read-only run is summed up
each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from craton.orchestration.watching.member_list import (
    MemberRow,
    SeenRun,
    member_rows,
    members_sign,
    with_members_sum,
)
from craton.orchestration.watching.recoveries import Recovery, read_recoveries
from craton.telemetry import MARKERS, RunDirectory, RunState, RunSummary, read_json, summarize
from craton.telemetry.files import noting_unread, replace_text
from craton.telemetry.members import MAX_DEPTH, members_sum_of
from craton.version import VERSION

KEPT_FILE = "summary.json"
KEPT_STATES: tuple[RunState, ...] = ("done", "failed", "stopped")  # states that do not change with time
_FOLDERS = ("metrics", "ledger", "events", "generations", "heartbeat")
_FILES = ("launch.json", "plan.json", *MARKERS)


def glance(run: RunDirectory) -> SeenRun:
    """Summarize a run with the sum of its members, from the cache if nothing has changed since."""
    with noting_unread() as unread:
        sign = "\n".join([_sign(run), *members_sign(run)])
    kept = _kept(run, sign)
    if kept is not None:
        return kept
    own = _looked(run, noted=unread)
    is_owner = len(list(run.owners())) < MAX_DEPTH
    rows = member_rows(run, glance, asks_scheduler=False, is_deep=False) if is_owner else []
    result = replace(own, summary=with_members_sum(run, own.summary, rows))
    if result.summary.state in KEPT_STATES and all(map(_has_ended, rows)) and not result.unread:
        _keep(run, sign, result)
    return result


def _has_ended(row: MemberRow) -> bool:
    """Whether a member and its members change no more without a change of their files."""
    if row.summary is None:
        return row.state != "unreadable"
    below = row.summary.members.states if row.summary.members else ()
    return row.summary.state in KEPT_STATES and set(below) <= {*KEPT_STATES, "waiting"}


def glance_at_members(run: RunDirectory, asks_scheduler: bool = True) -> list[MemberRow]:
    """Return the members of a run, those that have ended from their caches."""
    return member_rows(run, glance, asks_scheduler)


def _looked(run: RunDirectory, noted: Mapping[Path, OSError] | None = None) -> SeenRun:
    with noting_unread() as unread:
        summary, recoveries = summarize(run), read_recoveries(run)
    texts = [str(error) for error in (*(noted or {}).values(), *unread.values())]
    return SeenRun(summary, recoveries, tuple(dict.fromkeys(texts)))


def _sign(run: RunDirectory) -> str:
    """Return the cache key: sizes and times of the source files, which any added line changes."""
    words = [VERSION]
    for folder in _FOLDERS:
        with contextlib.suppress(FileNotFoundError), os.scandir(run.path / folder) as entries:
            words += sorted(f"{folder}/{entry.name} {_age(entry.stat(follow_symlinks=False))}" for entry in entries)
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            words.append(f"{name} {_age(os.lstat(run.path / name))}")
    return "\n".join(words)


def _age(status: os.stat_result) -> str:
    kind = "" if stat.S_ISREG(status.st_mode) else f" {stat.S_IFMT(status.st_mode):o}"
    return f"{status.st_size} {status.st_mtime_ns}{kind}"


def _kept(run: RunDirectory, sign: str) -> SeenRun | None:
    document = read_json(run.path / KEPT_FILE)
    if document.get("sign") != sign:
        return None
    try:
        fields: dict[str, Any] = {**document["summary"], "name": run.name, "path": run.path}  # it may have been moved
        if fields.get("members") is not None:
            fields["members"] = members_sum_of(fields["members"])
        kept = SeenRun(RunSummary(**fields), [Recovery(**recovery) for recovery in document["recoveries"]])
    except (KeyError, TypeError):  # written by another version
        return None
    # Anyone with write access to the run may have written this: an unknown state is rejected.
    return kept if kept.summary.state in KEPT_STATES and isinstance(kept.summary.message, str) else None


def _keep(run: RunDirectory, sign: str, summarized: SeenRun) -> None:
    fields = asdict(summarized.summary).items()
    summary = {key: value for key, value in fields if key != "movement" and not isinstance(value, Path)}
    document = {
        "sign": sign,
        "summary": summary,
        "recoveries": [asdict(recovery) for recovery in summarized.recoveries],
    }
    with contextlib.suppress(OSError):
        replace_text(run.path / KEPT_FILE, json.dumps(document) + "\n", durable=False)
