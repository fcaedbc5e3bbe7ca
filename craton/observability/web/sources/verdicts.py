"""Verdicts of `craton why`, computed in the background and cached: a page never waits for one.

One thread diagnoses the requested runs in turn: those without a verdict first, then the one with the oldest; every
other turn goes to runs whose page is open. An active run is diagnosed again even if nothing changed, because a hung run
does not change. A failed diagnosis becomes a verdict with the error, so that it does not look like a healthy run.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from craton.telemetry import RunDirectory
from craton.telemetry.progress import Progress

if TYPE_CHECKING:
    from craton.observability.diagnosis import Symptom

# How `diagnosis.sentences` opens the sentence of a run that is not well.
OPENINGS = ("has failed", "is lost", "has lost ranks or nodes", "is slow", "hangs", "produces wrong results")
AT_EASE = ("healthy", "starting", "slow")  # conditions that no stuck run has
_EXIT = re.compile(r"(.{1,80}? exited with code -?\d+) \(generation \d+\): (.+)", re.DOTALL)
FRESH_SECONDS = 15.0
LOOKED_AT_SECONDS = 10.0  # after the last urgent request its page counts as open
FORGET_SECONDS = 600.0  # after the last request of any kind
REST_SHARE = 3.0  # pause after a diagnosis, as a multiple of its duration


@dataclass(frozen=True)
class Late:
    """Stragglers: ranks that the others wait for."""

    sentence: str
    ranks: tuple[int, ...]  # slowest first
    nodes: tuple[str, ...]
    share: float  # of every step, lost to them


@dataclass(frozen=True)
class CachedVerdict:
    """A verdict as the page shows it."""

    condition: str
    sentence: str
    layer: str = ""
    node: str = ""
    rank: int | None = None
    confidence: float | None = None
    action: str = ""
    evidence: tuple[str, ...] = ()
    would_tell: tuple[str, ...] = ()
    cost_dollars_per_day: float | None = None
    others: tuple[str, ...] = ()
    late: Late | None = None
    time: float = 0.0
    cause: str = ""  # most likely cause in a few words; empty if there is none or it is unknown
    since: float | None = None  # epoch seconds: since when the condition lasts

    def in_short(self, name: str) -> str:
        """Return the text for a narrow column: the cause first, without the run's name and condition."""
        if self.cause:
            return self.cause
        text = self.sentence.removeprefix(name).lstrip(" :")
        opening, _, rest = text.partition(": ")
        return cause_first(rest if rest and opening in OPENINGS else text)


def cause_first(message: str) -> str:
    """Return a run's message with the error before the rank that exited with it."""
    match = _EXIT.fullmatch(message)
    return f"{match[2].rstrip('.')} ({match[1]})" if match else message


@dataclass(eq=False)
class _Wanted:
    run: RunDirectory
    key: object  # state of the run: a change needs a new diagnosis
    first_asked_at: float
    asked_at: float
    is_moving: bool = False
    looked_at: float = float("-inf")
    answer: CachedVerdict | None = None
    answered_for: object = None
    answered_at: float = float("-inf")
    movement: str = ""
    answered_movement: str = ""
    answered_moving: bool = False

    @property
    def is_of_another_state(self) -> bool:
        """Whether the run has ended or was started again since the verdict."""
        return self.answer is not None and self.answered_moving != self.is_moving


def examine(run: RunDirectory, prometheus: str | None = None) -> CachedVerdict:
    """Return the current verdict of `craton why`."""
    from craton.observability.diagnosis import diagnose, straggler_of
    from craton.observability.diagnosis.collect import take_snapshot

    snapshot = take_snapshot(run, prometheus)
    return answer_of(diagnose(snapshot), straggler_of(snapshot))


def not_examined(error: Exception) -> CachedVerdict:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CachedVerdict("unknown", f"diagnosis failed: {words}", time=time.time())


def agreeing(verdict: CachedVerdict | None, movement: Progress) -> CachedVerdict | None:
    """Return the verdict, unless the run has stopped or continued since it was made: then what is known now. A banner
    never says `healthy` above stuck ranks, nor `hung` above moving ones."""
    if movement.is_stuck and (verdict is None or verdict.condition in AT_EASE):
        return CachedVerdict(
            "hung",
            f"The run is {movement.sentence}.",
            rank=movement.ranks[0] if len(movement.ranks) == 1 else None,
            node=movement.nodes[0] if len(movement.nodes) == 1 else "",
            time=time.time(),
            since=movement.since,
        )
    if verdict is not None and verdict.condition == "hung" and movement.state in ("moving", "recovering"):
        return None  # until the next diagnosis
    return verdict


def late_of(symptom: Symptom | None) -> Late | None:
    """Return the straggler in the words of `craton why`."""
    return Late(symptom.evidence[0], symptom.ranks, symptom.nodes, symptom.lost_share or 0.0) if symptom else None


def answer_of(verdict: Any, straggler: Symptom | None = None) -> CachedVerdict:
    return CachedVerdict(
        condition=verdict.condition,
        sentence=verdict.sentence,
        layer=verdict.layer,
        node=verdict.node,
        rank=verdict.rank,
        confidence=verdict.confidence,
        action=verdict.action,
        evidence=tuple(verdict.evidence),
        would_tell=tuple(verdict.would_tell),
        cost_dollars_per_day=verdict.cost_dollars_per_day,
        others=tuple(str(getattr(other, "sentence", other)) for other in verdict.others),
        late=late_of(straggler),
        time=time.time(),
        cause=verdict.because,
        since=verdict.since,
    )


@dataclass
class Verdicts:
    """Cache of verdicts: `ask` returns the newest and schedules a new one."""

    examine: Callable[[RunDirectory], CachedVerdict] = examine
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _is_closed: bool = False
    _is_turn_of_looked_at: bool = True

    def ask(
        self,
        run: RunDirectory,
        key: object,
        *,
        is_moving: bool = False,
        urgent: bool = False,
        movement: str = "",
    ) -> CachedVerdict | None:
        """Return the newest verdict; None: none yet, or none since the run ended or was started again. `key` is the
        state of the run; an ended run that did not change is not diagnosed again. `urgent`: its page is open. A change
        of `movement` or `is_moving` needs a new diagnosis at once."""
        now = time.monotonic()
        with self._wake:
            wanted = self._wanted.get(run.name)
            if wanted is None or wanted.run != run:
                wanted = self._wanted[run.name] = _Wanted(run, key, now, now)
            wanted.key, wanted.is_moving, wanted.asked_at = key, is_moving, now
            wanted.movement = movement
            if urgent:
                wanted.looked_at = now
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="verdicts", daemon=True)
                self._thread.start()
            self._wake.notify()
            return None if wanted.is_of_another_state else wanted.answer

    def known(self, run: RunDirectory) -> CachedVerdict | None:
        """Return the newest verdict without scheduling another."""
        with self._wake:
            wanted = self._wanted.get(run.name)
            is_known = wanted is not None and wanted.run == run and not wanted.is_of_another_state
            return wanted.answer if wanted is not None and is_known else None

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                due = self._due()
                while due is None and not self._is_closed:
                    self._wake.wait(timeout=1.0)
                    due = self._due()
                if self._is_closed or due is None:
                    return
                key, movement, is_moving = due.key, due.movement, due.is_moving
            began = time.monotonic()
            try:
                answer = self.examine(due.run)
            except Exception as error:  # noqa: BLE001 - shown as the verdict; other runs continue
                answer = not_examined(error)
            ended = time.monotonic()
            with self._wake:
                due.answer, due.answered_for, due.answered_at = answer, key, ended
                due.answered_movement, due.answered_moving = movement, is_moving
                self._wake.wait_for(lambda: self._is_closed, timeout=REST_SHARE * (ended - began))

    def _due(self) -> _Wanted | None:
        """Return the next run whose verdict is old or of another state."""
        now = time.monotonic()
        self._wanted = {
            name: element for name, element in self._wanted.items() if now - element.asked_at < FORGET_SECONDS
        }
        due = [entry for entry in self._wanted.values() if _is_due(entry, now)]
        looked_at = [item for item in due if now - item.looked_at < LOOKED_AT_SECONDS]
        chosen = min(looked_at if looked_at and self._is_turn_of_looked_at else due, key=_turn, default=None)
        if chosen is not None:
            self._is_turn_of_looked_at = chosen not in looked_at
        return chosen


def _is_due(wanted: _Wanted, now: float) -> bool:
    if wanted.answer is None or wanted.is_of_another_state or wanted.movement != wanted.answered_movement:
        return True
    is_old = now - wanted.answered_at > FRESH_SECONDS
    return is_old and (wanted.is_moving or wanted.answered_for != wanted.key)


def _turn(wanted: _Wanted) -> tuple[bool, float]:
    """Return the sort key: runs without a verdict first, then the oldest verdict."""
    is_answered = wanted.answer is not None
    return is_answered, wanted.answered_at if is_answered else wanted.first_asked_at
