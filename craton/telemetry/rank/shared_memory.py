"""A page of memory that a rank shares with its node's agent: what it does now, since when, and where its time went.

The rank writes, the agent reads. A rank that dies for any reason leaves its ledger in the page, and the agent continues
it until the next process takes over. So the seconds of a rank's slot sum to wall time over any number of processes.
Times are of CLOCK_MONOTONIC, which all processes of a machine share.

The page also carries faults for the rank's own code: a trap, which `craton chaos` sets and the rank triggers at the
exact moment, a delay for every write to disk, and a bit to flip in the next weights that it sends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from craton.telemetry.rank.steady_clock import STEADY

LEDGER_KINDS = (
    "waiting",
    "start",
    "compile",
    "productive",
    "data",
    "checkpoint",
    "evaluate",
    "rollout",
    "reward",
    "sync",
    "detect",
    "regroup",
    "restore",
    "redo",
    "idle",
)
ROLLOUT_KINDS = ("rollout", "reward", "sync")  # parts of a step of reinforcement learning
PRODUCTIVE_KINDS = ("productive", *ROLLOUT_KINDS)  # their share is the goodput
LOST_WITH_A_STEP = ("compile", *PRODUCTIVE_KINDS, "data")
# Background activities: a copy into shared memory, writing files of a tier, a last state that is not on disk yet, new
# weights that a rollout server has received and does not use yet
BESIDE = ("staging", "saving", "unsaved", "transfer")
ACTIONS = ("none", "kill", "stop", "spin", "fail")  # of a trap; stop: SIGSTOP, spin: hang while the process runs
VARIABLE = "CRATON_PAGE"  # environment of a rank: the descriptor of its page
PAGE_BYTES = 4096
RECENT_STEPS = 16  # whose seconds the page holds
STEP_KINDS = ("productive", "redo")
FORGET_SHARE = 0.9  # of the longest stay in a kind, kept at each later one: after 22 of them a tenth is left
ANY, STEPPING = -1, -2  # kinds of a trap: all, or those of a step's own work


class _Fields(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("beside", ctypes.c_int64),
        ("since", ctypes.c_double),
        ("progress", ctypes.c_double),
        ("step_seconds", ctypes.c_double),
        ("write_delay", ctypes.c_double),
        ("slow_tier", ctypes.c_char * 64),
        ("trap_action", ctypes.c_int64),
        ("trap_kind", ctypes.c_int64),
        ("trap_beside", ctypes.c_int64),
        ("trap_step", ctypes.c_int64),
        ("traps_sprung", ctypes.c_int64),
        ("seconds", ctypes.c_double * len(LEDGER_KINDS)),
        ("marked", ctypes.c_double * len(LEDGER_KINDS)),
        ("patience", ctypes.c_double),
        ("num_recent", ctypes.c_int64),
        ("recent", ctypes.c_double * RECENT_STEPS),
        ("recorded_step", ctypes.c_int64),
        ("entered", ctypes.c_double),
        ("stays", ctypes.c_double * len(LEDGER_KINDS)),
        ("first_stays", ctypes.c_double * len(LEDGER_KINDS)),
        ("is_eager", ctypes.c_int64),
        ("base", ctypes.c_double),  # the moment at which no seconds were booked
        ("corrupts_weights", ctypes.c_int64),
    )

    generation: int
    step: int
    kind: int
    beside: int
    since: float
    progress: float
    step_seconds: float
    write_delay: float
    slow_tier: bytes
    trap_action: int
    trap_kind: int
    trap_beside: int
    trap_step: int
    traps_sprung: int
    seconds: Any
    marked: Any
    patience: float
    num_recent: int
    recent: Any
    recorded_step: int
    base: float
    entered: float
    stays: Any
    first_stays: Any
    is_eager: int
    corrupts_weights: int


class TrapError(RuntimeError):
    """The failure that `craton chaos --fail` injects into a rank."""


def monotonic_of(moment: float) -> float:
    """Convert a time of this process's steady clock to CLOCK_MONOTONIC."""
    return STEADY.to_monotonic(moment)


def own_page() -> RankPage | None:
    """Return this process's page, if an agent gave it one."""
    return RankPage.from_environment()


@contextmanager
def going_on(activity: str) -> Iterator[None]:
    """Mark a background activity in the page during the block."""
    page = own_page()
    if page is None:
        yield
        return
    page.set_beside(activity, True)
    page.spring()
    try:
        yield
    finally:
        page.set_beside(activity, False)


class RankPage:
    """One rank's page, shared by every process that has the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, PAGE_BYTES)
        self._fields = _Fields.from_buffer(self._memory)
        self.descriptor = descriptor

    @classmethod
    def make(cls) -> RankPage:
        """Create a page; it disappears with the last process that holds it."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("craton-rank")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, PAGE_BYTES)
        page = cls(descriptor)
        page._fields.generation = -1
        page.begin("start", time.monotonic())
        return page

    @classmethod
    def from_environment(cls) -> RankPage | None:
        """Return this process's page, if an agent gave it one."""
        try:
            descriptor = int(os.environ[VARIABLE])
            if os.fstat(descriptor).st_size == PAGE_BYTES:
                return cls(descriptor)
        except (KeyError, ValueError, OSError):
            pass
        return None

    # -- ledger ---------------------------------------------------------------------------------------------------

    def begin(self, kind: str, now: float) -> None:
        """Book time as `kind` from this moment on, and nothing before it."""
        self._fields.kind = LEDGER_KINDS.index(kind)
        self._fields.since = self._fields.progress = self._fields.entered = now
        self._fields.base = now - sum(self._fields.seconds)

    def switch(self, kind: str, now: float | None = None, is_broken: bool = False) -> None:
        """Book time as `kind` from now on; time until now stays with the previous kind. `is_broken`: the stay in the
        previous kind was interrupted, and says nothing about how long it usually takes."""
        fields = self._fields
        moment = time.monotonic() if now is None else now
        fields.seconds[fields.kind] += moment - fields.since
        fields.since = moment
        index = LEDGER_KINDS.index(kind)
        if index != fields.kind:
            if not is_broken:
                self._note_stay(fields.kind, moment - fields.entered)
            fields.entered = moment
        fields.kind = index

    def _note_stay(self, index: int, seconds: float) -> None:
        fields = self._fields
        if not fields.stays[index]:
            fields.first_stays[index] = max(fields.first_stays[index], seconds)
        fields.stays[index] = max(seconds, FORGET_SHARE * fields.stays[index])

    def begin_step(self, step: int, now: float | None = None) -> None:
        """Begin a step: time booked from now on belongs to it."""
        fields = self._fields
        self.switch(self.kind, now)
        if any(fields.marked):  # otherwise no step was under way
            indices = [LEDGER_KINDS.index(kind) for kind in STEP_KINDS]
            stepping = sum(fields.seconds[index] - fields.marked[index] for index in indices)
            if stepping > 0:
                fields.recent[fields.num_recent % RECENT_STEPS] = stepping
                fields.num_recent += 1
        fields.marked[:] = fields.seconds[:]
        fields.step = step

    def break_off(self, kind: str, since: float | None = None, now: float | None = None) -> None:
        """Abandon the step in progress: its work must be redone and is booked as `redo`. From the interruption at
        `since` time is `detect`; from now on it is `kind`."""
        fields = self._fields
        now = time.monotonic() if now is None else now
        # If the rank was killed inside `switch`, its last stay is booked already.
        fields.since = max(fields.since, fields.base + sum(fields.seconds))
        self.switch("detect", now if since is None else min(max(since, fields.since), now), is_broken=True)
        for lost in LOST_WITH_A_STEP:
            index = LEDGER_KINDS.index(lost)
            if any(fields.marked):
                fields.seconds[LEDGER_KINDS.index("redo")] += fields.seconds[index] - fields.marked[index]
                fields.seconds[index] = fields.marked[index]
        fields.marked[:] = [0.0] * len(LEDGER_KINDS)
        self.switch(kind, now)

    def repeat_rollouts(self) -> None:
        """Book the rollouts of the step in progress as `redo`: an earlier generation did this step already. They do not
        count as the step's own work, by whose pace a hang is found."""
        fields = self._fields
        redo = LEDGER_KINDS.index("redo")
        for kind in ROLLOUT_KINDS:
            index = LEDGER_KINDS.index(kind)
            seconds = fields.seconds[index] - fields.marked[index]
            fields.seconds[index] = fields.marked[index]
            fields.seconds[redo] += seconds
            fields.marked[redo] += seconds

    def totals(self, now: float) -> dict[str, float]:
        """Return the seconds by kind since the page was created, including the open interval."""
        fields = self._fields
        totals = dict(zip(LEDGER_KINDS, fields.seconds, strict=True))
        totals[LEDGER_KINDS[fields.kind]] += max(0.0, now - fields.since)
        return totals

    @property
    def kind(self) -> str:
        return LEDGER_KINDS[self._fields.kind]

    @property
    def since(self) -> float:
        return self._fields.since

    # -- progress -------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The generation that the rank has entered; -1: none yet."""
        return self._fields.generation

    @generation.setter
    def generation(self, value: int) -> None:
        if value != self._fields.generation:  # with other members a step may take longer or shorter
            self._fields.num_recent = 0
            self._fields.recent[:] = [0.0] * RECENT_STEPS
            self._fields.stays[:] = [0.0] * len(LEDGER_KINDS)
        self._fields.generation = value

    @property
    def step(self) -> int:
        """The last step begun."""
        return self._fields.step

    @step.setter
    def step(self, value: int) -> None:
        self._fields.step = value

    @property
    def step_seconds(self) -> float:
        """The recent step time; 0: not known yet."""
        return self._fields.step_seconds

    @step_seconds.setter
    def step_seconds(self, value: float) -> None:
        self._fields.step_seconds = value

    @property
    def slowest_seconds(self) -> float:
        """The slowest recent step, including the one that just ended: only the step itself, without data, checkpoint or
        evaluation. 0: not known yet."""
        return float(max(self._fields.recent))

    @property
    def phase_seconds(self) -> dict[str, float]:
        """The longest recent stay in each kind; before the first one in this generation, the longest first stay of the
        generations before. A stay that was interrupted by a failure does not count."""
        stays = zip(LEDGER_KINDS, self._fields.stays, self._fields.first_stays, strict=True)
        return {kind: seconds or first for kind, seconds, first in stays if seconds or first}

    @property
    def is_eager(self) -> bool:
        """Whether its first step compiles nothing, so that it takes about as long as the others."""
        return bool(self._fields.is_eager)

    @is_eager.setter
    def is_eager(self, value: bool) -> None:
        self._fields.is_eager = int(value)

    @property
    def recorded_step(self) -> int:
        """The newest step whose loss the agent has written to disk."""
        return self._fields.recorded_step

    @recorded_step.setter
    def recorded_step(self, value: int) -> None:
        self._fields.recorded_step = value

    @property
    def progress(self) -> float:
        """When the rank last reported progress."""
        return self._fields.progress

    @property
    def patience(self) -> float:
        """Seconds without progress after which the rank hangs; 0: its phase decides."""
        return self._fields.patience

    @patience.setter
    def patience(self, value: float) -> None:
        self._fields.patience = value

    def beat(self) -> None:
        self._fields.progress = time.monotonic()

    @property
    def beside(self) -> tuple[str, ...]:
        """The background activities."""
        return tuple(name for bit, name in enumerate(BESIDE) if self._fields.beside >> bit & 1)

    def set_beside(self, name: str, going_on: bool) -> None:
        bit = 1 << BESIDE.index(name)
        self._fields.beside = self._fields.beside | bit if going_on else self._fields.beside & ~bit

    def slow_down(self, tier: str, seconds: float) -> None:
        """Delay every write to the files of this checkpoint tier from now on."""
        self._fields.slow_tier = tier.encode()[:63]
        self._fields.write_delay = seconds

    def write_delay(self, tier: str) -> float:
        return self._fields.write_delay if self._fields.slow_tier == tier.encode()[:63] else 0.0

    def corrupt_weights(self) -> None:
        """Flip a bit of the next weights that this rank sends."""
        self._fields.corrupts_weights = 1

    def take_weights_corruption(self) -> bool:
        """Return whether to flip a bit of the weights that are sent now; each time once."""
        is_due, self._fields.corrupts_weights = bool(self._fields.corrupts_weights), 0
        return is_due

    # -- traps ----------------------------------------------------------------------------------------------------

    def set_trap(self, action: str, kind: str = "stepping", beside: str | None = None, step: int = 0) -> None:
        """Set a trap for when the rank is next in this kind ("any", or "stepping": a step's own work), during this
        background activity, at this step or later."""
        fields = self._fields
        fields.trap_kind = {"any": ANY, "stepping": STEPPING}.get(kind, 0) or LEDGER_KINDS.index(kind)
        fields.trap_beside = ANY if beside is None else BESIDE.index(beside)
        fields.trap_step = step
        fields.trap_action = ACTIONS.index(action)

    @property
    def has_trap(self) -> bool:
        return self._fields.trap_action != 0

    @property
    def traps_sprung(self) -> int:
        return self._fields.traps_sprung

    def spring(self) -> None:
        """Trigger the trap if it is due; the rank calls it wherever a trap may be set."""
        fields = self._fields
        if fields.trap_action == 0 or fields.step < fields.trap_step:
            return
        if fields.trap_kind == STEPPING and self.kind not in ("compile", "productive", "redo"):
            return
        if fields.trap_kind not in (ANY, STEPPING, fields.kind):
            return
        if fields.trap_beside != ANY and not fields.beside >> fields.trap_beside & 1:
            return
        action = ACTIONS[fields.trap_action]
        fields.trap_action = 0
        fields.traps_sprung += 1
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "spin":
            while True:
                time.sleep(60.0)
        elif action == "fail":
            raise TrapError(f"chaos: injected failure at step {fields.step}")
