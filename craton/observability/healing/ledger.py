"""RUNS/heal.jsonl: the ledger of incidents, actions and undone actions by node.

One line per entry, appended by one writer at a time; a torn line is skipped. A process that acts holds the lock from
observing the cluster to the end of its actions, so that two cannot both take the last node that may go out.
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
SAME_EVENT_SECONDS = 120.0  # readings of one log at different times give slightly different event times


class LedgerError(CratonError):
    """The ledger cannot be written, or another command is writing it."""


@dataclass(frozen=True)
class LedgerEntry:
    """One line: an incident, an action or its undo."""

    time: float
    kind: EntryKind
    node: str
    id: str = ""  # of the action, for --undo
    cluster: str = ""
    run: str = ""
    action: str = ""  # of HEALTH_ACTIONS
    what: str = ""
    device: str = ""
    text: str = ""  # evidence, or what was done
    run_node: str = ""  # of a move: the run's own name for the node
    moment: float = 0.0  # of an incident: time of the event or measurement; 0: a state at `time`

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LedgerEntry | None:
        """Parse a line; None if it is not a ledger entry."""
        names = {field.name for field in fields(cls)}
        try:
            entry = cls(**{name: value for name, value in document.items() if name in names})
        except TypeError:
            return None
        return entry if is_fine(document) else None


def is_fine(document: dict[str, Any]) -> bool:
    """Return whether all values have the expected types."""
    texts = all(isinstance(value, str) for name, value in document.items() if name not in ("time", "moment"))
    return texts and all(isinstance(document.get(name, 0.0), int | float) for name in ("time", "moment"))


class Ledger:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / LEDGER_FILE

    def entries(self) -> list[LedgerEntry]:
        """Return all readable entries, oldest first."""
        lines, _ = read_lines(self.path)
        entries = [LedgerEntry.from_json(line) for line in lines]
        return [entry for entry in entries if entry is not None]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. LedgerError at once if another command holds it, since that may wait for user input."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LedgerError(
                f"--mode act requires a writable ledger, and {self.path} cannot be written: {error}"
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerError(
                    f"another `craton heal` is running ({self.path}); try again when it has ended"
                ) from None
            except OSError as error:  # ENOSYS, ENOLCK: Lustre without `flock`, some NFS
                raise LedgerError(
                    f"{self.root} cannot be locked ({error.strerror}), so two could act at once; mount it with "
                    "`-o flock`, or set another folder as `runs:` in the cluster file"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Append entries. LedgerError if they cannot be written: an action without an entry could not be undone."""
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
    """Return current incidents that the ledger does not have, or not for the given pause. An event is recorded once."""
    known = [entry for entry in entries if entry.kind == "incident"]
    last = {_key(entry): entry.time for entry in known}
    return [
        item
        for item, pause in current
        if (
            not any(_is_one_event(item, earlier) for earlier in known)
            if item.moment
            else item.time - last.get(_key(item), float("-inf")) >= pause
        )
    ]


def pause_between(issue: Issue) -> float:
    """Return the seconds after which a lasting issue is recorded again: often enough to stay one episode, and for a
    sample, once per look that counts."""
    return rules().look_seconds if issue.is_sample else rules().episode_seconds / 2


def num_looks(entries: Sequence[LedgerEntry], issue: Issue, now: float) -> int:
    """Return the number of recent looks that showed the issue, this one included; those before an undo do not count."""
    since = max(now - rules().looks_seconds, last_undo(entries, issue.node))
    moments = [
        entry.time for entry in entries if entry.kind == "incident" and _is_of(entry, issue) and entry.time > since
    ]
    return len(moments) + (not moments or now - max(moments) >= rules().look_seconds)


def last_undo(entries: Iterable[LedgerEntry], node: str) -> float:
    return max((entry.time for entry in entries if entry.kind == "undo" and entry.node == node), default=0.0)


def is_answered(entries: Sequence[LedgerEntry], issue: Issue, now: float) -> bool:
    """Return whether the node was put back in service despite this issue: an older event, or a state known then."""
    if issue.moment is not None:
        return issue.moment <= last_undo(entries, issue.node)
    return any(
        entry.kind == "undo" and _is_of(entry, issue) and now - entry.time <= rules().undone_seconds
        for entry in entries
    )


def earlier_episodes(entries: Sequence[LedgerEntry], issue: Issue, now: float) -> int:
    """Return how often the node needed repair before this issue, within the time that counts."""
    mine = Moment(now if issue.moment is None else issue.moment, issue.run, issue.moment is not None)
    moments, undone = _moments(entries, issue.node, now)
    return _episodes(sorted([*moments, mine]), undone) - 1


def other_runs_with(entries: Iterable[LedgerEntry], issue: Issue, now: float) -> set[str]:
    """Return other runs in which the same GPU had the same kind of error."""
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
    """Return node → number of episodes, worst first, for nodes that had any."""
    counts = {node: _episodes(*_moments(entries, node, now)) for node in {entry.node for entry in entries}}
    return {node: count for node, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count}


class Moment(NamedTuple):
    """The time of an incident."""

    time: float
    run: str  # in which it was observed
    is_own: bool  # an event or measurement, not a state observed then


def _moments(entries: Sequence[LedgerEntry], node: str, now: float) -> tuple[list[Moment], list[float]]:
    """Return the severe incidents of a node within the time that counts, and when its actions were undone."""
    mine = [entry for entry in entries if entry.node == node]
    oldest = now - rules().repeat_seconds
    grave = [entry for entry in mine if entry.kind == "incident" and _is_grave(entry.action) and entry.time >= oldest]
    moments = sorted(Moment(entry.moment or entry.time, entry.run, entry.moment > 0) for entry in grave)
    return moments, [entry.time for entry in mine if entry.kind == "undo"]


def _episodes(moments: Sequence[Moment], undone: Sequence[float]) -> int:
    return bool(moments) + sum(not _is_same(earlier, later, undone) for earlier, later in pairwise(moments))


def _is_same(earlier: Moment, later: Moment, undone: Sequence[float]) -> bool:
    """Return whether two incidents are one episode: the same event, or close to each other in one run. A new event
    after the node was put back in service is another episode; a lasting state is not."""
    if earlier.is_own and later.is_own and later.time - earlier.time <= SAME_EVENT_SECONDS:
        return True
    is_close = later.time - earlier.time <= rules().episode_seconds
    is_of_run = not earlier.run or not later.run or earlier.run == later.run
    is_new = later.is_own and any(earlier.time <= moment <= later.time for moment in undone)
    return is_close and is_of_run and not is_new


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
