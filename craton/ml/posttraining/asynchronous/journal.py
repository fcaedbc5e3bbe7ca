"""The journal of a run with asynchronous rollouts: RUN/journal/step-N, written before step N is trained.

An entry has the groups that step N trains, complete, and all that is pending after it: finished groups, unfinished
generations with tokens, log-probabilities and weight versions, and indices that have not begun. A run that resumes at
the checkpoint of step N continues from entry N. If later entries exist, it repeats their batches.

A file is replaced as a whole. Its first line has the length and the crc32 of the rest: a line of JSON and the numbers
of all tokens. A file that is cut off or changed is refused. Its contents are data only: nothing is executed.

A run may resume with another job: other prompts, or other rules of generating and rewarding. Each group has the
fingerprint of its prompt, and each entry that of the rules. What no longer fits is generated again.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.errors import CratonError
from craton.formatting import counted
from craton.ml.posttraining.asynchronous.groups import RolloutCopy, RolloutGroup
from craton.ml.posttraining.asynchronous.selection import Frontier
from craton.ml.verifiers import Verdict
from craton.telemetry.files import read_regular, replace_bytes

FORMAT = b"craton-journal-2"
MAX_BYTES = 4 << 30
# What is in the JSON of a generation where it is not empty, and its type.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "completion": str,
    "is_truncated": bool,
    "has_ended": bool,
    "is_complete": bool,
    "seconds": (int, float),
    "transcript": list,
    "content": (str, list),
    "prompt": list,
}
_EMPTY = RolloutCopy()
_NAME = re.compile(r"step-(\d{1,12})")
_COLUMNS: tuple[tuple[str, str], ...] = (("tokens", "<i4"), ("logprobs", "<f4"), ("versions", "<i4"))


class JournalError(CratonError):
    """A file of the journal cannot be used."""


@dataclass(frozen=True)
class JournalEntry:
    """What step `step` trains, and what is pending after it."""

    step: int
    next_index: int
    batch: tuple[RolloutGroup, ...] = ()
    filtered: tuple[int, ...] = ()  # indices that were settled without training, since the entry before
    pending: tuple[RolloutGroup, ...] = ()
    rules: str = ""  # fingerprint of what the job says of completions and rewards

    @property
    def settled(self) -> list[int]:
        return [*(group.index for group in self.batch), *self.filtered]

    @property
    def frontier(self) -> Frontier:
        return Frontier(self.next_index, tuple(sorted(group.index for group in self.pending)))


class RolloutJournal:
    """The entries of one run. One process writes them. `rules`: those of the job as it is."""

    def __init__(self, folder: Path, rules: str = "") -> None:
        self.folder, self.rules = folder, rules

    def write(self, entry: JournalEntry) -> Path:
        """Write an entry; it is complete or not there at all. OSError if the disk does not take it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(entry.step)
        replace_bytes(path, to_bytes(entry))
        return path

    def read(self, step: int) -> JournalEntry | None:
        """Return the entry of a step, None if there is none; JournalError if it is damaged."""
        path = self.path(step)
        try:
            data = read_regular(path, MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JournalError(f"{path}: {error.strerror or error}") from None
        try:
            entry = from_bytes(data)
        except JournalError as error:
            raise JournalError(f"{path}: {error}") from None
        if entry.step != step:
            raise JournalError(f"{path}: it is the entry of step {entry.step}")
        return entry

    def steps(self) -> list[int]:
        """Return the steps that have an entry, in order."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.path(step).unlink(missing_ok=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"


@dataclass(frozen=True)
class Continuation:
    """Where a run goes on: entries whose batches are trained again, then what is pending."""

    repeated: tuple[JournalEntry, ...]
    frontier: Frontier  # at the beginning, before the repeated entries
    pending: tuple[RolloutGroup, ...]  # after the repeated entries; an index without its group is generated again
    problems: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()  # what no longer fits the job, and why

    @property
    def frontier_after(self) -> Frontier:
        return self.repeated[-1].frontier if self.repeated else self.frontier


def continue_from(
    journal: RolloutJournal, step: int, saved: Frontier, fingerprint: Callable[[int], str] | None = None
) -> Continuation:
    """Return where to go on at the checkpoint of `step`, whose counters say which indices were pending then.
    `fingerprint` gives that of the prompt of an index; without it, all groups are taken for groups of these prompts.

    Entries that cannot be used are removed, with all later ones: what they had is generated again from its seeds."""
    problems: list[str] = []
    fit = _Fit(journal.rules, fingerprint)
    base = _usable(journal, step, problems)
    pending: tuple[RolloutGroup, ...] = ()
    latest = base
    if base is not None and base.frontier == saved:
        pending = base.pending
    elif base is not None:
        problems.append(f"{journal.path(step)}: other samples are pending in it than in the checkpoint")
    repeated: list[JournalEntry] = []
    before = saved
    for number in count(step + 1):
        entry = _usable(journal, number, problems)
        if entry is None:
            break
        if not before.can_become(entry.frontier, entry.settled):
            problems.append(f"{journal.path(number)}: it does not continue the entry before it")
            break
        if not fit.check(entry, entry.batch):
            for later in (later for step in journal.steps() if step >= number if (later := _usable(journal, step, []))):
                fit.check(later, (*later.batch, *later.pending))
            break
        repeated.append(entry)
        before, pending, latest = entry.frontier, entry.pending, entry
    last = step + len(repeated)
    journal.remove(number for number in journal.steps() if number > last)
    if latest is not None:
        pending = tuple(group for group in pending if fit.check(latest, [group]))
    return Continuation(tuple(repeated), saved, pending, tuple(problems), fit.reasons())


class _Fit:
    """Finds groups of other prompts or rules than those of the job, and counts them."""

    def __init__(self, rules: str, fingerprint: Callable[[int], str] | None) -> None:
        self._rules, self._fingerprint = rules, fingerprint
        self._of_other_rules: set[int] = set()
        self._of_other_prompts: set[int] = set()

    def check(self, entry: JournalEntry, groups: Iterable[RolloutGroup]) -> bool:
        """Return whether all these groups of an entry can be trained."""
        begun = [group for group in groups if group.copies]
        if entry.rules != self._rules:
            self._of_other_rules |= {group.index for group in begun}
            return not begun
        changed = {group.index for group in begun if not self._has_same_prompt(group)}
        self._of_other_prompts |= changed
        return not changed

    def _has_same_prompt(self, group: RolloutGroup) -> bool:
        return self._fingerprint is None or self._fingerprint(group.index) == group.fingerprint

    def reasons(self) -> tuple[str, ...]:
        found = []
        if self._of_other_prompts:
            found.append(f"{_samples_of(self._of_other_prompts)} had another prompt or row; the data have changed")
        if self._of_other_rules:
            found.append(f"{_samples_of(self._of_other_rules)} had another reward or other settings of rollout")
        return tuple(found)


def _samples_of(indices: Iterable[int]) -> str:
    return f"the samples of {counted(len(list(indices)), 'prompt index', 'prompt indices')} in the journal"


def _usable(journal: RolloutJournal, step: int, problems: list[str]) -> JournalEntry | None:
    try:
        return journal.read(step)
    except JournalError as error:
        problems.append(str(error))
        return None


def to_bytes(entry: JournalEntry) -> bytes:
    groups = (*entry.batch, *entry.pending)
    copies = [copy for group in groups for copy in group.copies]
    document = {
        "step": entry.step,
        "next_index": entry.next_index,
        "rules": entry.rules,
        "filtered": list(entry.filtered),
        "batch": [_group_document(group) for group in entry.batch],
        "pending": [_group_document(group) for group in entry.pending],
    }
    parts = [json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"]
    for name, kind in _COLUMNS:
        parts += [np.asarray(getattr(copy, name), kind).tobytes() for copy in copies]
    body = b"".join(parts)
    return b"%s %d %08x\n" % (FORMAT, len(body), zlib.crc32(body)) + body


def from_bytes(data: bytes) -> JournalEntry:
    """Return the entry in the bytes of a file; JournalError if it is not exactly as it was written."""
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != FORMAT:
        raise JournalError(f"it does not begin with {FORMAT.decode()}")
    if words[1] != b"%d" % len(body):
        raise JournalError(f"it is cut off: {len(body):,} bytes follow its first line")
    if words[2] != b"%08x" % zlib.crc32(body):
        raise JournalError("its checksum is wrong: bytes of it have changed")
    text, _, numbers = body.partition(b"\n")
    try:
        document = json.loads(text)
        batch = [_read_group(item) for item in document["batch"]]
        pending = [_read_group(item) for item in document["pending"]]
        _fill_columns([copy for group, lengths in (*batch, *pending) for copy in _sized(group, lengths)], numbers)
        entry = JournalEntry(
            _whole(document["step"]),
            _whole(document["next_index"]),
            tuple(group for group, _ in batch),
            tuple(_whole(index) for index in document["filtered"]),
            tuple(group for group, _ in pending),
            str(document["rules"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(f"it has another form ({type(error).__name__}: {error})") from None
    return entry


def _group_document(group: RolloutGroup) -> dict[str, Any]:
    document: dict[str, Any] = {"index": group.index, "begun": group.begun}
    if group.fingerprint:
        document["fingerprint"] = group.fingerprint
    return document | {"copies": [_copy_document(copy) for copy in group.copies]}


def _copy_document(copy: RolloutCopy) -> dict[str, Any]:
    assert len(copy.tokens) == len(copy.logprobs) == len(copy.versions)
    document: dict[str, Any] = {"length": len(copy.tokens)}
    document |= {name: value for name in _FIELDS if (value := getattr(copy, name)) != getattr(_EMPTY, name)}
    if (verdict := copy.verdict) is not None:
        parts = {name: _finite(value) for name, value in verdict.parts.items()}
        document["verdict"] = [_finite(verdict.reward), parts, verdict.error, verdict.seconds]
    return document


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _read_group(document: Any) -> tuple[RolloutGroup, list[int]]:
    """Return a group whose copies have no tokens yet, and how many each has."""
    begun = document["begun"]
    copies, lengths = [], []
    for item in document["copies"]:
        fields = {name: item[name] for name in _FIELDS if name in item}
        for name, value in fields.items():
            if not isinstance(value, _FIELDS[name]):
                raise ValueError(f"{name} is {value!r}")
        copies.append(RolloutCopy(**fields, verdict=_read_verdict(item)))
        lengths.append(_whole(item["length"]))
    begun = None if begun is None else _whole(begun)
    return RolloutGroup(_whole(document["index"]), copies, begun, str(document.get("fingerprint", ""))), lengths


def _read_verdict(document: Any) -> Verdict | None:
    if "verdict" not in document:
        return None
    reward, parts, error, seconds = document["verdict"]
    return Verdict(
        _number(reward), {str(name): _number(value) for name, value in parts.items()}, str(error), float(seconds)
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _sized(group: RolloutGroup, lengths: Sequence[int]) -> list[tuple[RolloutCopy, int]]:
    return list(zip(group.copies, lengths, strict=True))


def _fill_columns(copies: Sequence[tuple[RolloutCopy, int]], data: bytes) -> None:
    """Give the copies their tokens: for each column, those of one copy after the other."""
    total = sum(length for _, length in copies)
    if len(data) != sum(np.dtype(kind).itemsize for _, kind in _COLUMNS) * total:
        raise ValueError(f"{len(data):,} bytes of numbers for {total:,} tokens")
    offset = 0
    for name, kind in _COLUMNS:
        values: NDArray = np.frombuffer(data, kind, total, offset)
        offset += values.nbytes
        begin = 0
        for copy, length in copies:
            setattr(copy, name, values[begin : begin + length].tolist())
            begin += length
