"""One look at every run, as `ps` takes it: what its files say, and what it came back from.

To add up the books of a run takes the longer, the longer it ran. Of a run that has ended they do not change any more,
so the look is kept in RUN/summary.json with the sizes and times of the files that it was made from, and holds as long
as these do. A folder that cannot be written is read in full each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from craton.orchestration.watching.recoveries import Recovery, read_recoveries
from craton.telemetry import MARKERS, RunDirectory, RunState, RunSummary, read_json, summarize
from craton.telemetry.files import noting_unread, replace_text
from craton.version import VERSION

KEPT_FILE = "summary.json"
KEPT_STATES: tuple[RunState, ...] = ("done", "failed", "stopped")  # whatever the time is
_FOLDERS = ("metrics", "ledger", "events", "generations", "heartbeat")
_FILES = ("launch.json", "plan.json", *MARKERS)


@dataclass(frozen=True)
class Glance:
    summary: RunSummary
    recoveries: list[Recovery]
    unread: tuple[str, ...] = ()  # files of the run that were passed over, and why


def glance(run: RunDirectory) -> Glance:
    """A look at the run, from what was kept of the last one where nothing has changed since."""
    sign = _sign(run)
    kept = _kept(run, sign)
    if kept is not None:
        return kept
    with noting_unread() as unread:
        summary, recoveries = summarize(run), read_recoveries(run)
    result = Glance(summary, recoveries, tuple(dict.fromkeys(str(error) for error in unread.values())))
    if summary.state in KEPT_STATES and not unread:
        _keep(run, sign, result)
    return result


def _sign(run: RunDirectory) -> str:
    """What the look is made from, by sizes and times: any line that is added changes it."""
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


def _kept(run: RunDirectory, sign: str) -> Glance | None:
    document = read_json(run.path / KEPT_FILE)
    if document.get("sign") != sign:
        return None
    try:
        fields: dict[str, Any] = {**document["summary"], "name": run.name, "path": run.path}  # it may have been moved
        kept = Glance(RunSummary(**fields), [Recovery(**recovery) for recovery in document["recoveries"]])
    except (KeyError, TypeError):  # of another version
        return None
    # Whoever may write to the run may have written this: a state that ps does not know is none.
    return kept if kept.summary.state in KEPT_STATES and isinstance(kept.summary.message, str) else None


def _keep(run: RunDirectory, sign: str, summarized: Glance) -> None:
    summary = {key: value for key, value in asdict(summarized.summary).items() if not isinstance(value, Path)}
    document = {
        "sign": sign,
        "summary": summary,
        "recoveries": [asdict(recovery) for recovery in summarized.recoveries],
    }
    with contextlib.suppress(OSError):
        replace_text(run.path / KEPT_FILE, json.dumps(document) + "\n", durable=False)
