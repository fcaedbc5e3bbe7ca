"""RUNS/heal.jsonl, the ledger of incidents and actions: what ailed which node, what was done about it, what was undone.

One line an entry, appended by one writer at a time; a torn line is skipped. Whoever acts holds the lock from looking at
the cluster to having acted, so two that heal the same cluster cannot both take the last node that may go.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from craton.errors import CratonError
from craton.infrastructure.probes import HEALTH_ACTIONS
from craton.observability.healing.issues import Issue, rules
from craton.telemetry.files import LineWriter, read_lines

LEDGER_FILE, LOCK_FILE = "heal.jsonl", ".heal.lock"
EntryKind = Literal["incident", "take_out", "hand_over", "move", "undo", "failed"]
NODE_ACTIONS: tuple[EntryKind, ...] = ("take_out", "hand_over", "move")
SAME_EVENT_SECONDS = 120.0  # two who read a log at different times tell an event's moment a little differently


class LedgerError(CratonError):
    """The ledger cannot be written, or is being written by another command."""


@dataclass(frozen=True)
class LedgerEntry:
    """One line: an incident, an action or its undoing."""

    time: float
    kind: EntryKind
    node: str
    id: str = ""  # of the action, by which it is undone
    cluster: str = ""
    run: str = ""
    action: str = ""  # of HEALTH_ACTIONS
    what: str = ""
    device: str = ""
    text: str = ""  # evidence, or what was done
    run_node: str = ""  # of a move: the run's own name of the node
    moment: float = 0.0  # of an incident: when it happened or was measured; 0: it was so when it was written down

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LedgerEntry | None:
        """None for a line that is none of ours."""
        names = {field.name for field in fields(cls)}
        try:
            entry = cls(**{name: value for name, value in document.items() if name in names})
        except TypeError:
            return None
        return entry if is_fine(document) else None


def is_fine(document: dict[str, Any]) -> bool:
    """Whether what is computed with is of its kind."""
    texts = all(isinstance(value, str) for name, value in document.items() if name not in ("time", "moment"))
    return texts and all(isinstance(document.get(name, 0.0), int | float) for name in ("time", "moment"))


class Ledger:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / LEDGER_FILE

    def entries(self) -> list[LedgerEntry]:
        """All that can be read, oldest first."""
        lines, _ = read_lines(self.path)
        entries = [LedgerEntry.from_json(line) for line in lines]
        return [entry for entry in entries if entry is not None]

    @contextmanager
    def held(self) -> Iterator[None]:
        """LedgerError at once where another command has it: it may be waiting for somebody's answer."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LedgerError(
                f"nothing is healed without its ledger, and {self.path} cannot be kept: {error}"
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerError(
                    f"another `craton heal` is at work here ({self.path}); try again when it has ended"
                ) from None
            except OSError as error:  # ENOSYS, ENOLCK: Lustre without `flock`, some NFS
                raise LedgerError(
                    f"{self.root} cannot be locked ({error.strerror}), so that two could act at once; mount it with "
                    "`-o flock`, or name another place as `runs:` of the cluster file"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """LedgerError where they are lost: an action that nobody remembers could not be undone."""
        writer = LineWriter(self.path)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            written = writer.append([json.dumps(asdict(entry)).encode() for entry in entries])
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be written: {error}") from None
        finally:
            writer.close()
        if not written:
            raise LedgerError(f"{self.path} cannot be written: {writer.error}")


def new_id() -> str:
    return secrets.token_hex(4)


def fresh_incidents(entries: Sequence[LedgerEntry], current: Iterable[tuple[LedgerEntry, float]]) -> list[LedgerEntry]:
    """Of what is seen now, what the ledger has not been told, or not for so many seconds. An event is told once."""
    messages = [entry for entry in entries if entry.kind == "incident"]
    last = {_key(entry): entry.time for entry in messages}
    return [
        item
        for item, pause in current
        if (
            not any(_is_one_event(item, earlier) for earlier in messages)
            if item.moment
            else item.time - last.get(_key(item), float("-inf")) >= pause
        )
    ]


def pause_between(issue: Issue) -> float:
    """Seconds after which an issue that lasts is written down again: often enough that it stays one episode, and what
    is to be seen in several looks as often as they count."""
    return rules().look_seconds if issue.is_sample else rules().episode_seconds / 2


def num_looks(entries: Sequence[LedgerEntry], issue: Issue, now: float) -> int:
    """In how many looks of late an issue was seen, this one included; those before an undo do not count."""
    since = max(now - rules().looks_seconds, last_undo(entries, issue.node))
    moments = [
        entry.time for entry in entries if entry.kind == "incident" and _is_of(entry, issue) and entry.time > since
    ]
    return len(moments) + (not moments or now - max(moments) >= rules().look_seconds)


def last_undo(entries: Iterable[LedgerEntry], node: str) -> float:
    return max((entry.time for entry in entries if entry.kind == "undo" and entry.node == node), default=0.0)


def is_answered(entries: Sequence[LedgerEntry], issue: Issue, now: float) -> bool:
    """Whether somebody gave the node back in spite of it: it is older than that, or the state that was known then."""
    if issue.moment is not None:
        return issue.moment <= last_undo(entries, issue.node)
    return any(
        entry.kind == "undo" and _is_of(entry, issue) and now - entry.time <= rules().undone_seconds
        for entry in entries
    )


def earlier_episodes(entries: Sequence[LedgerEntry], issue: Issue, now: float) -> int:
    """How often a node had to be mended apart from what ails it now, in the time that counts."""
    mine = Moment(now if issue.moment is None else issue.moment, issue.run, issue.moment is not None)
    moments, undone = _moments(entries, issue.node, now)
    return _episodes(sorted([*moments, mine]), undone) - 1


def other_runs_with(entries: Iterable[LedgerEntry], issue: Issue, now: float) -> set[str]:
    """Other runs in which the same card had the same kind of error."""
    return {
        entry.run
        for entry in entries
        if entry.kind == "incident"
        and _is_of(entry, issue)
        and entry.run not in ("", issue.run)
        and not _is_near(entry.moment, issue.moment or 0.0)
        and now - entry.time <= rules().repeat_seconds
    }


def repeat_offenders(entries: Sequence[LedgerEntry], now: float) -> dict[str, int]:
    """Node → episodes, of those that had one; the worst first."""
    counts = {node: _episodes(*_moments(entries, node, now)) for node in {entry.node for entry in entries}}
    return {node: count for node, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count}


class Moment(NamedTuple):
    """Of an incident."""

    time: float
    run: str  # that it was seen in
    is_own: bool  # it happened or was measured then, and not only looked at


def _moments(entries: Sequence[LedgerEntry], node: str, now: float) -> tuple[list[Moment], list[float]]:
    """The grave incidents of a node in the time that counts, and when it was given back."""
    mine = [entry for entry in entries if entry.node == node]
    oldest = now - rules().repeat_seconds
    grave = [entry for entry in mine if entry.kind == "incident" and _is_grave(entry.action) and entry.time >= oldest]
    moments = sorted(Moment(entry.moment or entry.time, entry.run, entry.moment > 0) for entry in grave)
    return moments, [entry.time for entry in mine if entry.kind == "undo"]


def _episodes(moments: Sequence[Moment], undone: Sequence[float]) -> int:
    return bool(moments) + sum(not _is_same(earlier, later, undone) for earlier, later in pairwise(moments))


def _is_same(earlier: Moment, later: Moment, undone: Sequence[float]) -> bool:
    """Incidents close to each other in one run are one episode, and one event is one whoever saw it. What happened
    after the node was given back is another; what only lasts is not."""
    if earlier.is_own and later.is_own and later.time - earlier.time <= SAME_EVENT_SECONDS:
        return True
    is_close = later.time - earlier.time <= rules().episode_seconds
    is_of_run = not earlier.run or not later.run or earlier.run == later.run
    is_anew = later.is_own and any(earlier.time <= moment <= later.time for moment in undone)
    return is_close and is_of_run and not is_anew


def _is_grave(action: str) -> bool:
    return action in HEALTH_ACTIONS[HEALTH_ACTIONS.index("reset") :]


def _is_of(entry: LedgerEntry, issue: Issue) -> bool:
    return (entry.node, entry.what, entry.device) == (issue.node, issue.what, issue.device)


def _is_one_event(one: LedgerEntry, other: LedgerEntry) -> bool:
    return _is_near(one.moment, other.moment) and (one.node, one.what, one.device) == (
        other.node,
        other.what,
        other.device,
    )


def _is_near(one: float, other: float) -> bool:
    return one > 0 and other > 0 and abs(one - other) <= SAME_EVENT_SECONDS


def _key(entry: LedgerEntry) -> tuple[str, str, str, str]:
    return entry.node, entry.what, entry.device, entry.run
