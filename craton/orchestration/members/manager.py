"""The member manager: a loop that looks at the members of a run, decides, and acts.

One manager at a time acts for a run: it holds a lock that the kernel releases when its process ends. A manager that
replaces a killed one finds living members by their files and goes on with them. It also restarts the agents of its
owner if all of them were killed on this machine, as the owner's agent restarts the manager.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from craton.agent import LaunchError, read_launch
from craton.errors import CratonError
from craton.orchestration.local import start_agents
from craton.orchestration.member_nodes import num_shares
from craton.orchestration.member_places import member_place
from craton.orchestration.members.decision import MemberView, NextMoves, OwnerView, StartMember, decide
from craton.orchestration.members.look import MemberLook, look_at_owner
from craton.orchestration.members.starter_process import StarterProcess
from craton.orchestration.watching import launching
from craton.telemetry import RunDirectory
from craton.telemetry.files import STORAGE_ERRORS
from craton.telemetry.members import (
    LOCK_FILE,
    MEMBERS_FOLDER,
    MemberAddress,
    MembersStatus,
    read_members,
    read_members_status,
    touch_manager_lock,
    write_member_addresses,
    write_members_status,
)
from craton.telemetry.node import process_start, read_heartbeat

LOOK_SECONDS = 0.2
LOOK_SHARE = 30.0  # with many members: looks may take at most one part in this many of the manager's time
TOUCH_SECONDS = 1.0
OWNER_SECONDS = 1.0  # without an agent of the owner, before the manager starts them again; doubled each time
MAX_OWNER_SECONDS = 30.0
STEADY_SECONDS = 60.0  # agents that lived this long are started again without a longer pause
MAX_CRASHES = 3  # of the process that starts a member, in a row
STOP_PREFIX = "member manager:"  # of the STOP marker of a member whose owner ends


class Manager:
    """The member manager of one run. `manage()` returns when the run has ended and no member is left."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._spec = read_members(run)
        self._place = member_place(run)
        self._looks = {item.name: MemberLook.of(run, item.name, self._place) for item in self._spec.members}
        me = {"pid": os.getpid(), "started": process_start(os.getpid()), "host": socket.gethostname()}
        self._status = replace(read_members_status(run), **me)  # type: ignore[arg-type]
        self._written = MembersStatus()
        self._addresses: dict[str, MemberAddress] | None = None
        self._starter = StarterProcess(run)
        self._generation = -1
        self._refused: dict[str, str] = {}
        self._crashes: dict[str, int] = {}
        self._owner_gone_since: float | None = None
        self._owner_pause, self._owner_started = OWNER_SECONDS, 0.0
        self._touched = 0.0

    def manage(self) -> None:
        while True:
            began = time.monotonic()
            try:
                if self._turn():
                    return
            except OSError as error:
                if error.errno not in STORAGE_ERRORS:
                    raise
                print(f"craton members: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(max(LOOK_SECONDS, LOOK_SHARE * (time.monotonic() - began)))

    def _turn(self) -> bool:
        """Look, decide and act once; True if nothing is left to do."""
        self._end_start()
        owner = look_at_owner(self._run, self._place)
        if owner.generation != self._generation:  # a resume starts everything again that is not done
            self._generation = owner.generation
            self._refused.clear()
            self._crashes.clear()
        self._look_after_owner(owner)
        seen = {name: self._view(name, look) for name, look in self._looks.items()}
        decision = decide(
            self._spec, self._status, seen, owner, self._starter.busy, num_shares(self._spec), time.time()
        )
        self._report(decision)
        for action in decision.actions:
            if isinstance(action, StartMember):
                self._refused.pop(action.name, None)
                self._starter.start(action.name)
            else:
                self._stop(action.name, action.reason)
        if owner.is_ending:
            self._starter.interrupt()
        if decision.is_over:
            self._starter.close()
        return decision.is_over

    def _view(self, name: str, look: MemberLook) -> MemberView:
        view = look.view()
        if view.condition == "alive":  # a user started it
            self._refused.pop(name, None)
        return replace(view, refusal=self._refused[name]) if name in self._refused else view

    def _report(self, decision: NextMoves) -> None:
        """Write the status if it has changed, and the addresses of servers before others read that they are ready."""
        addresses = {name: address for name, look in self._looks.items() if (address := look.address) is not None}
        if addresses != self._addresses:
            write_member_addresses(self._run, addresses)
            self._addresses = addresses
        for name, member in decision.status.members.items():
            before = self._status.members.get(name)
            if before is None or before.state != member.state:
                text = member.message or member.waits_for
                print(f"{time.strftime('%H:%M:%S')} {name}: {member.state}{f' ({text})' if text else ''}", flush=True)
        self._status = decision.status
        if self._status != self._written:
            write_members_status(self._run, self._status)
            self._written = self._status
        if time.monotonic() - self._touched > TOUCH_SECONDS:
            self._touched = time.monotonic()
            touch_manager_lock(self._run)

    def _end_start(self) -> None:
        """Note how the start of a member ended."""
        outcome = self._starter.poll()
        if outcome is None:
            return
        name = outcome.name
        self._refused.pop(name, None)
        if outcome.crash:
            print(f"{time.strftime('%H:%M:%S')} {name}: the process that started it {outcome.crash}", flush=True)
            self._crashes[name] = self._crashes.get(name, 0) + 1
        else:
            self._crashes.pop(name, None)
        if outcome.refusal:
            self._refused[name] = outcome.refusal
        elif self._crashes.get(name, 0) >= MAX_CRASHES:
            self._refused[name] = f"its start failed {MAX_CRASHES} times; see logs/members.log of {self._run.name}"

    def _stop(self, name: str, reason: str) -> None:
        with contextlib.suppress(OSError):  # the next turn tries again
            self._looks[name].run.mark("STOP", f"{STOP_PREFIX} {reason}")

    def _look_after_owner(self, owner: OwnerView) -> None:
        """Start the owner's agents again if all of them were killed. Agents elsewhere are their scheduler's."""
        if owner.is_ending or self._place.owner_lives(self._run):
            self._owner_gone_since = None
            return
        now = time.monotonic()
        if self._owner_gone_since is None:
            self._owner_gone_since = now
            if now - self._owner_started > STEADY_SECONDS:
                self._owner_pause = OWNER_SECONDS
        if now - self._owner_gone_since < self._owner_pause:
            return
        self._owner_gone_since, self._owner_started = None, now
        self._owner_pause = min(MAX_OWNER_SECONDS, 2 * self._owner_pause)
        with contextlib.suppress(CratonError), launching(self._run):  # a command may be starting it
            try:
                launch = read_launch(self._run)
            except LaunchError:
                return
            beats = {node: read_heartbeat(self._run, node) for node in launch.nodes}
            killed = [
                number
                for number, node in enumerate(launch.nodes)
                if (beat := beats[node]) is not None
                and beat.generation == launch.generation
                and beat.state in ("running", "spare")
                and beat.is_gone_here
                and not (self._run.path / "heartbeat" / f".{node}.lost").exists()
            ]
            if launch.agent_command and killed and not look_at_owner(self._run, self._place).is_ending:
                nodes = ", ".join(launch.nodes[number] for number in killed)
                print(f"{time.strftime('%H:%M:%S')} the agents of {nodes} are gone: starting them again", flush=True)
                start_agents(self._run, launch, killed)


@contextlib.contextmanager
def managing(run: RunDirectory) -> Iterator[bool]:
    """Hold the lock of the run's manager; yield whether this process got it."""
    folder = run.path / MEMBERS_FOLDER
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except BlockingIOError:
        is_alone = False
    try:
        yield is_alone
    finally:
        os.close(descriptor)
