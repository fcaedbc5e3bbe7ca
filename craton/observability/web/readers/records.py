"""Events of a run, newest first, and its checkpoints by tier, from the ends of the event files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craton.telemetry import RunDirectory, plan_checkpoint_intervals
from craton.telemetry.files import open_regular, parse_line, paths_in, read_lines

TAIL_BYTES = 64 << 10  # of a node's events, at the first read
WIDE_TAIL_BYTES = 8 << 10  # the same for runs with many nodes
MANY_NODES = 64
SEARCHED_BYTES, SEARCHED_CHUNK = 32 << 20, 256 << 10  # of all files, for a tier's last checkpoint; per read
KEPT_EVENTS = 200
SHOWN_EVENTS = 40
# Routine events of every run, not shown.
ROUTINE = ("agent_started", "metrics_served", "coordinates", "rank_started", "agent_ended", "predicted", "summary")
TROUBLE = (
    "failed",
    "broken",
    "rank_ended",
    "rank_killed",
    "bad_step",
    "rolled_back",
    "checkpoint_failed",
    "state_unsaved",
    "nursery_failed",
)
TIERS = ("peer", "nvme", "shared", "object")  # fastest first
PEER = "peer"  # in-memory copies are too frequent for an event each
PEER_EVENTS = ("peer_interval", "peer_off")


@dataclass(frozen=True)
class TierState:
    """The checkpoints of one tier, from the events."""

    tier: str
    every_seconds: float | None  # as planned
    step: int | None  # of the newest
    moment: float | None
    seconds: float | None  # duration
    size_bytes: float | None
    failures: int
    began: float | None = None  # when the run began
    every_steps: int | None = None  # measured, for in-memory copies
    is_restored: bool = False  # step and moment are of the newest restored one
    off: str = ""  # why the tier is no longer written

    def is_overdue(self, now: float) -> bool:
        """Return whether the newest checkpoint is older than two intervals, or there is none after that time."""
        since = None if self.is_restored else self.moment or self.began
        return bool(since and self.every_seconds and now - since > 2 * self.every_seconds)


class Records:
    """Read events as they are written."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before the first read: files that became shorter were rewritten."""
        self._offsets: dict[Path, int] = {}
        self._events: list[dict[str, Any]] = []
        self._tiers: dict[str, dict[str, Any]] = {}
        self._peer: dict[str, dict[str, Any]] = {}  # name → newest event of in-memory copies
        self._failures: dict[str, int] = {}
        self._begins: dict[Path, int] = {}  # where the first read started
        self._has_searched = False

    def look(self) -> list[dict[str, Any]]:
        """Return the newest events that are not routine, newest first."""
        sizes = _sizes(paths_in(self._run.path / "events", "*.jsonl"))
        if any(sizes.get(path, offset) < offset for path, offset in self._offsets.items()):
            self._forget()
        tail_bytes = TAIL_BYTES if len(sizes) <= MANY_NODES else WIDE_TAIL_BYTES
        new: list[dict[str, Any]] = []
        for path, size in sizes.items():
            new += self._new_lines(path, size, tail_bytes)
        new.sort(key=_moment)
        for event in new:
            self._book(event)
        self._events = (self._events + [event for event in new if is_news(event)])[-KEPT_EVENTS:]
        return self._events[::-1][:SHOWN_EVENTS]

    def tiers(self, plan: Mapping[str, Any], began: float | None = None) -> list[TierState]:
        """Return the tiers in the plan and those that were written, fastest first."""
        intervals = plan_checkpoint_intervals(plan)
        if not self._has_searched and self._begins:
            self._has_searched = True
            unknown = {PEER} if plan.get("storage") and not self._peer.keys() & PEER_EVENTS else set()
            self._search(unknown | (set(intervals) - set(self._tiers)))
        names = {*intervals, *self._tiers, *self._failures}
        order = {name: index for index, name in enumerate(TIERS)}
        result = [self._memory(intervals.get(PEER))] if self._peer or PEER in intervals else []
        for name in sorted(names - {PEER}, key=lambda name: (order.get(name, len(TIERS)), name)):
            saved = self._tiers.get(name, {})
            result.append(
                TierState(
                    tier=name,
                    every_seconds=intervals.get(name),
                    step=saved.get("step") if isinstance(saved.get("step"), int) else None,
                    moment=_number(saved.get("time")),
                    seconds=_number(saved.get("seconds")),
                    size_bytes=_number(saved.get("bytes")),
                    failures=self._failures.get(name, 0),
                    began=began,
                )
            )
        return result

    def _memory(self, every_seconds: float | None) -> TierState:
        """Return the state of in-memory copies: interval, cost, and the step last restored. They are never overdue,
        because there is no event for each copy."""
        restored, measured, off = (self._peer.get(name, {}) for name in ("restored", *PEER_EVENTS))
        is_off = _moment(off) > max(_moment(restored), _moment(measured))
        steps = measured.get("steps")
        return TierState(
            tier=PEER,
            every_seconds=every_seconds,
            step=restored.get("step") if isinstance(restored.get("step"), int) else None,
            moment=_number(restored.get("time")),
            seconds=None if is_off else _number(measured.get("blocked_seconds")),
            size_bytes=None,
            failures=0,
            every_steps=steps if isinstance(steps, int) and not is_off else None,
            is_restored=bool(restored),
            off=str(off.get("reason") or "no reason given") if is_off else "",
        )

    def _new_lines(self, path: Path, size: int, tail_bytes: int) -> list[dict[str, Any]]:
        # A line cut by the first read is not a JSON object, and is skipped.
        offset = self._offsets.get(path, max(0, size - tail_bytes))
        self._begins.setdefault(path, offset)
        lines, self._offsets[path] = read_lines(path, offset) if size > offset else ([], offset)
        return lines

    def _search(self, tiers: set[str]) -> None:
        """Search for events of these tiers before the first read: a slow tier's last checkpoint may be behind many of a
        fast one. Read backwards from the ends of all files, up to SEARCHED_BYTES."""
        ends = {path: end for path, end in self._begins.items() if end > 0}
        budget = SEARCHED_BYTES
        while tiers and ends and budget > 0:
            events: list[dict[str, Any]] = []
            for path, end in list(ends.items()):
                if budget <= 0:
                    break
                begin = max(0, end - SEARCHED_CHUNK)
                budget -= end - begin
                lines, ends[path] = _lines_between(path, begin, end)
                events += [line for line in lines if _tier_of(line) in tiers]
                if ends[path] <= 0:
                    del ends[path]
            events.sort(key=_moment)
            self._tiers |= {event["tier"]: event for event in events if _tier_of(event) != PEER}
            self._peer = {event["event"]: event for event in events if _tier_of(event) == PEER} | self._peer
            tiers -= {_tier_of(event) for event in events}

    def _book(self, event: dict[str, Any]) -> None:
        tier, name = event.get("tier"), event.get("event")
        if (of := _tier_of(event)) == PEER:
            self._peer[event["event"]] = event
        elif of:
            self._tiers[of] = event
        elif isinstance(tier, str) and isinstance(name, str) and name.startswith("checkpoint_fail"):
            self._failures[tier] = self._failures.get(tier, 0) + 1


def _tier_of(event: Mapping[str, Any]) -> str:
    """Return the tier that an event is about; empty if none."""
    tier, name = event.get("tier"), event.get("event")
    if name in PEER_EVENTS or (name == "restored" and tier == PEER):
        return PEER
    return tier if name == "checkpoint_saved" and isinstance(tier, str) else ""


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the sizes of the readable files."""
    result = {}
    for path in paths:
        with suppress(OSError):
            result[path] = os.lstat(path).st_size
    return result


def _lines_between(path: Path, begin: int, end: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a file range, and the start of the first (0: all was read, or it is unreadable)."""
    try:
        with open_regular(path) as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError:
        return [], 0
    cut = data.find(b"\n") + 1 if begin else 0
    lines = [
        line
        for word in data[cut:].split(b"\n")
        if (b"checkpoint_saved" in word or b'"peer' in word) and (line := parse_line(word))
    ]
    return lines, begin + cut if begin + cut < end else begin


def is_news(event: Mapping[str, Any]) -> bool:
    """Return whether an event is neither routine nor a repetition of rank 0's by another rank."""
    name = event.get("event")
    if name == "rank_ended":
        return event.get("code") != 0
    if name == "generation_started":
        return event.get("reason") != "start"
    return name not in ROUTINE and (event.get("rank") in (0, None) or name in TROUBLE)


def _moment(event: Mapping[str, Any]) -> float:
    return _number(event.get("time")) or 0.0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
