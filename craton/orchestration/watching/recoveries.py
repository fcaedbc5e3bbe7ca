"""The recoveries of a run, from its files: every generation that started because of a failure.

A recovery ends when training makes progress again (for a command without step progress: when its ranks are restarted);
until then `seconds` is None. The ledger of the generation shows how the time was spent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craton.agent import Generation
from craton.formatting import duration
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import paths_in, read_lines
from craton.telemetry.rank import LedgerReader

_STEP = re.compile(r"\bstep \d")
# ledger kinds of a recovery, in order
PARTS = ("detect", "waiting", "regroup", "start", "restore", "compile", "redo")


@dataclass(frozen=True)
class Recovery:
    """One failure, and the recovery from it."""

    generation: int  # the one that the failure led to
    reason: str
    step: int  # in progress at the failure; 0: its steps are not known
    began: float  # epoch seconds of the failure
    seconds: float | None  # until training made progress again; None: not yet
    lost_steps: int | None  # steps that were repeated
    restored_from: str | None  # the tier
    parts: dict[str, float]  # ledger kind → seconds
    broke_again: bool = False  # before it recovered
    note: str = ""  # where a command continued, if it repeats steps

    @property
    def text(self) -> str:
        """One line: `rank 3 was killed at step 40, back after 1.4 s: detect 100 ms · regroup 400 ms · redo 900 ms`."""
        cause = self.reason.splitlines()[0] if self.reason else "something broke"
        at = f" at step {self.step:,}" if self.step and not _STEP.search(cause) else ""
        if self.seconds is None:
            return f"{cause}{at}, {'broke again on its way back' if self.broke_again else 'not back yet'}"
        parts = " · ".join(f"{name} {duration(seconds)}" for name, seconds in self.parts.items() if seconds >= 0.05)
        note = f"; {self.note}" if self.note else ""
        return f"{cause}{at}, back after {duration(self.seconds)}{': ' if parts else ''}{parts}{note}"


class Recoveries:
    """Read a run's generations, events and ledger incrementally."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._ledger = LedgerReader(run)
        self._generations: dict[int, Generation] = {}  # immutable once written
        self._recovered: dict[int, dict[str, Any]] = {}
        self._offsets: dict[Path, int] = {}

    def all(self) -> list[Recovery]:
        """Return every recovery, oldest first."""
        self._read_generations()
        self._read_events()
        broken = [entry for _, entry in sorted(self._generations.items()) if entry.broke_at]
        if not broken:
            return []
        books, newest = self._ledger.by_generation(), max(self._generations)
        launch = read_json(self._run.launch_path)
        trains = bool(launch.get("nursery") or (launch.get("progress") or {}).get("has_steps"))
        return [
            _recovery(
                item,
                self._recovered_event(item, trains),
                books.get(item.number, {}),
                has_steps=trains or item.reached > 0,
                is_past=item.number < newest,
            )
            for item in broken
        ]

    def _recovered_event(self, generation: Generation, trains: bool) -> Mapping[str, Any]:
        """Return the `recovered` event of the training loop, or of a command's progress reader."""
        if trains:
            return self._recovered.get(generation.number, {})
        return {"seconds": generation.time - generation.broke_at}

    def _read_generations(self) -> None:
        for path in paths_in(self._run.path / "generations", "[0-9]*.json"):
            if not path.stem.isdecimal() or int(path.stem) in self._generations:
                continue
            try:
                generation = Generation.from_message(read_json(path))
            except TypeError:
                continue
            self._generations[generation.number] = generation

    def _read_events(self) -> None:
        for path in paths_in(self._run.path / "events", "*.jsonl"):
            lines, self._offsets[path] = read_lines(path, self._offsets.get(path, 0))
            for line in lines:
                if line.get("event") == "recovered" and isinstance(line.get("generation"), int):
                    self._recovered.setdefault(line["generation"], line)


def under_way(recoveries: Sequence[Recovery]) -> Recovery | None:
    """Return the recovery in progress, if any."""
    last = recoveries[-1] if recoveries else None
    return last if last is not None and last.seconds is None and not last.broke_again else None


def read_recoveries(run: RunDirectory) -> list[Recovery]:
    return Recoveries(run).all()


def _recovery(
    generation: Generation, event: Mapping[str, Any], books: Mapping[str, float], *, has_steps: bool, is_past: bool
) -> Recovery:
    seconds = float(event["seconds"]) if isinstance(event.get("seconds"), int | float) else None
    return Recovery(
        generation=generation.number,
        reason=generation.reason,
        step=generation.reached + 1 if has_steps else 0,
        began=generation.broke_at,
        seconds=seconds,
        lost_steps=event.get("lost_steps") if isinstance(event.get("lost_steps"), int) else None,
        restored_from=event.get("restored_from") if isinstance(event.get("restored_from"), str) else None,
        parts={kind: books[kind] for kind in PARTS if books.get(kind)},
        broke_again=seconds is None and is_past,
        note=event["message"] if isinstance(event.get("message"), str) else "",
    )
