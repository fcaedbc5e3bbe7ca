"""What the member manager does next: a pure function of the wanted members, what it reported before, and what it sees.

- A member starts when its needs are met and a place is free; one start at a time, in the order of members.json.
- A member whose agents are gone is resumed, with growing pauses, until it was lost too often without a new step.
- A member that failed, or that its user stopped, stays so until its owner is started again.
- When the owner ends, members stop in reverse order: first those that nothing needs; those that the owner's ranks may
  still use, once these have ended.
- The gate opens once, when every member that the owner waits for is done or ready, and stays open for this launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from craton.telemetry.members import (
    ACTIVE_STATES,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberState,
    MemberStatus,
    Need,
)

MAX_TRIES = 5  # restarts in a row without a new step
FIRST_PAUSE_SECONDS = 0.2  # before the first restart; doubled for each further one
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a member that ran this long has made progress, whether or not it reports steps

Condition = Literal["absent", "alive", "lost", "stopped", "failed", "done"]
ENDED: tuple[MemberState, ...] = ("done", "failed", "stopped")


@dataclass(frozen=True)
class MemberView:
    """One member as the manager sees it now."""

    condition: Condition = "absent"  # alive: an agent lives, whatever the markers say
    has_begun: bool = False  # its ranks run
    serves: bool = False
    is_ready: bool = False  # its server answers
    is_stopping: bool = False  # it has a STOP marker
    by_user: bool = False  # `craton stop` set it
    step: int = 0
    steps: int | None = None
    message: str = ""  # why it failed or stopped
    refusal: str = ""  # why it cannot be started, however often it is tried
    is_asked: bool = False  # its user wants it started again, whatever became of it


@dataclass(frozen=True)
class OwnerView:
    """The owner as the manager sees it now."""

    generation: int  # of its launch
    is_ending: bool = False  # it has a STOP, DONE or FATAL marker
    is_over: bool = False  # and no agent of it lives
    reason: str = ""


@dataclass(frozen=True)
class StartMember:
    """Start or resume a member."""

    name: str


@dataclass(frozen=True)
class StopMember:
    name: str
    reason: str


@dataclass(frozen=True)
class NextMoves:
    status: MembersStatus
    actions: list[StartMember | StopMember] = field(default_factory=list)
    is_over: bool = False  # the manager has nothing left to do


def decide(
    spec: MembersSpec,
    before: MembersStatus,
    seen: Mapping[str, MemberView],
    owner: OwnerView,
    busy: str,
    places: int,
    now: float,
) -> NextMoves:
    """Return the new status and what to do. `busy` is the member that is being started, "" if none; at most `places`
    members run at a time; `now` is in epoch seconds."""
    known = {item.name: before.members.get(item.name, MemberStatus()) for item in spec.members}
    states = {
        item.name: _timed(known[item.name], _stated(item, known[item.name], seen[item.name], owner, busy, now), now)
        for item in spec.members
    }
    actions: list[StartMember | StopMember] = []
    if owner.is_ending:
        actions += _stops(spec, seen, owner)
    else:
        actions += _starts(spec, states, seen, owner, busy, places, now)
    members = {name: _timed(known[name], state, now) for name, state in states.items()}
    is_open = (before.is_open and before.generation == owner.generation) or _is_gate_open(spec, members, seen)
    if not spec.members:
        damaged = "its members.json is damaged or names no members; restore it, or start the run again"
        return NextMoves(replace(before, generation=owner.generation, failure=damaged), is_over=owner.is_over)
    failed = next((item.name for item in spec.members if item.gate and members[item.name].state == "failed"), None)
    status = replace(
        before,
        members=members,
        generation=owner.generation,
        is_open=is_open,
        failure=f"member {failed} failed: {members[failed].message}" if failed and not is_open else "",
        waits_for="" if is_open else _gate_text(spec, members, seen),
    )
    lives = any(view.condition == "alive" for view in seen.values())
    return NextMoves(status, actions, is_over=owner.is_over and not lives and not busy)


def _stated(
    item: MemberSpec, known: MemberStatus, view: MemberView, owner: OwnerView, busy: str, now: float
) -> MemberStatus:
    """Return the state of a member; one that is to be started is `waiting`, or `restarting` if it ran before."""
    is_new = known.launch < owner.generation  # not started since its owner was
    plain = replace(known, waits_for="", message="")
    if item.is_kept:
        return replace(plain, state="done", message="kept from an earlier run")
    if view.condition == "alive":
        state: MemberState = "starting"
        if view.has_begun:
            state = "ready" if view.is_ready else "running"
        is_steady = known.state in ("running", "ready") and now - known.since > STEADY_SECONDS
        return replace(
            plain,
            state=state,
            launch=owner.generation,
            tries=0 if is_steady else known.tries,
            waits_for="its end" if view.is_stopping else "",
        )
    if busy == item.name:
        return replace(known, state=known.state if known.state in ("starting", "restarting") else "starting")
    if view.condition == "done":
        return replace(plain, state="done")
    if view.refusal:
        return replace(plain, state="failed", launch=owner.generation, message=view.refusal)
    if view.is_asked and not owner.is_ending:
        return replace(plain, state="waiting", tries=0)
    if owner.is_ending:
        if view.condition == "failed":
            return replace(plain, state="failed", message=view.message)
        return replace(known, state="failed" if known.state == "failed" else "stopped", waits_for="")
    if is_new or view.condition == "absent":
        if known.state == "failed" and not is_new:
            return known
        return replace(plain, state="waiting", tries=0 if is_new else known.tries, step=0 if is_new else known.step)
    if view.condition == "failed":
        return replace(plain, state="failed", message=view.message)
    if view.condition == "stopped" and view.by_user:
        return replace(plain, state="stopped", message=view.message)
    if known.state == "failed":  # lost too often
        return known
    if _next_tries(known, view) > MAX_TRIES:
        text = f"its agents were lost {MAX_TRIES + 1} times in a row without a new step; not restarted again"
        return replace(plain, state="failed", message=text)
    reason = view.message if view.condition == "stopped" else "its agents are gone"
    return replace(plain, state="restarting", message=reason)


def _starts(
    spec: MembersSpec,
    states: dict[str, MemberStatus],
    seen: Mapping[str, MemberView],
    owner: OwnerView,
    busy: str,
    places: int,
    now: float,
) -> list[StartMember | StopMember]:
    """Return the next start, if one is due; note in `states` what the others wait for."""
    in_use = sum(state.state in ACTIVE_STATES for state in states.values())
    actions: list[StartMember | StopMember] = []
    for item in spec.members:
        name, state, view = item.name, states[item.name], seen[item.name]
        if view.condition == "alive" or busy == name or state.state not in ("waiting", "restarting"):
            continue
        if blocker := next((need for need in item.needs if states[need].state == "failed"), None):
            states[name] = replace(state, state="failed", launch=owner.generation, message=f"member {blocker} failed")
        elif missing := next(
            (need for need, what in item.needs.items() if not _is_met(what, states[need], seen[need])), None
        ):
            states[name] = replace(state, waits_for=_progress_text(missing, states[missing], seen[missing]))
        elif state.state == "waiting" and in_use >= places:
            states[name] = replace(state, waits_for=f"a free place ({in_use} of {places} in use)")
        elif state.state == "restarting" and 0 <= now - state.since < _pause(state):
            states[name] = replace(state, waits_for="the pause before its restart")
        elif busy or actions:
            states[name] = replace(state, waits_for="the start of another member")
        else:
            in_use += state.state == "waiting"
            is_again = state.state == "restarting"
            states[name] = replace(
                state,
                state="restarting" if is_again else "starting",
                launch=owner.generation,
                restarts=state.restarts + is_again,
                tries=_next_tries(state, view) if is_again else 0,
                step=view.step,
                slot=_slot(name, states, places),
            )
            actions.append(StartMember(name))
    return actions


def _stops(spec: MembersSpec, seen: Mapping[str, MemberView], owner: OwnerView) -> list[StartMember | StopMember]:
    """Return the members to stop now: alive, not asked yet, and needed by no member that is alive."""
    alive = [item for item in spec.members if seen[item.name].condition == "alive"]
    needed = {name for item in alive for name in item.needs}
    return [
        StopMember(item.name, owner.reason)
        for item in reversed(alive)
        if item.name not in needed and not seen[item.name].is_stopping and (item.gate != "ready" or owner.is_over)
    ]


def _is_met(what: Need, state: MemberStatus, view: MemberView) -> bool:
    if what == "done" or state.state == "done":
        return state.state == "done"
    return state.state == "ready" or (state.state == "running" and not view.serves)


def _is_gate_open(spec: MembersSpec, states: Mapping[str, MemberStatus], seen: Mapping[str, MemberView]) -> bool:
    return all(item.gate is None or _is_met(item.gate, states[item.name], seen[item.name]) for item in spec.members)


def _gate_text(spec: MembersSpec, states: Mapping[str, MemberStatus], seen: Mapping[str, MemberView]) -> str:
    waiting = [
        item.name for item in spec.members if item.gate and not _is_met(item.gate, states[item.name], seen[item.name])
    ]
    more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    return f"waits for {_progress_text(waiting[0], states[waiting[0]], seen[waiting[0]])}{more}" if waiting else ""


def _progress_text(name: str, state: MemberStatus, view: MemberView) -> str:
    """Return where a member is that others wait for: `member base: step 120 of 500`."""
    if state.state == "stopped":
        return f"member {name}, which is stopped"
    if view.condition == "alive" and view.step:
        return f"member {name}: step {view.step:,}" + (f" of {view.steps:,}" if view.steps else "")
    return f"member {name}: {state.state}"


def _next_tries(state: MemberStatus, view: MemberView) -> int:
    return state.tries + 1 if view.step <= state.step else 1


def _pause(state: MemberStatus) -> float:
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(state.tries, 10))


def _timed(known: MemberStatus, state: MemberStatus, now: float) -> MemberStatus:
    return state if state.state == known.state else replace(state, since=now)


def _slot(name: str, states: Mapping[str, MemberStatus], places: int) -> int:
    """Return the share of the machine for a member: its own if it is free, else the first free one."""
    taken = {state.slot for other, state in states.items() if other != name and state.state in ACTIVE_STATES}
    own = states[name].slot
    if 0 <= own < places and own not in taken:
        return own
    return next((slot for slot in range(places) if slot not in taken), 0)
