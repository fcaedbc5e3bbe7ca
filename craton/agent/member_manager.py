"""The member manager of a run that owns runs, seen from the agent that coordinates the run.

The agent starts it (`Launch.members`), restarts it when it dies, and waits for it before the first generation. On
Slurm the batch program starts and restarts it instead (`Launch.starts_manager`). The manager is in a session of its own
and outlives the agent: an agent that replaces a killed one finds it by its status and starts no second one. It is no
rank: its end never ends a generation.
"""

from __future__ import annotations

import subprocess
import time

from craton.agent.launch import Launch
from craton.agent.processes import ChildProcess, how_ended, open_log
from craton.agent.records import NodeRecords
from craton.telemetry import RunDirectory
from craton.telemetry.members import MembersStatus, living_manager, read_members_status
from craton.telemetry.rank import STEADY

FIRST_PAUSE_SECONDS = 0.5  # before the first restart; doubled for each further one
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a manager that lived this long is restarted without a pause
MANAGER_LOG = "members.log"


class MemberManager:
    def __init__(self, run: RunDirectory, launch: Launch, records: NodeRecords) -> None:
        self._run, self._launch, self._records = run, launch, records
        self.child: ChildProcess | None = None  # if this agent has started it
        self._began = self._next_start = 0.0
        self._pause = 0.0
        self._has_ended = False  # it has done its work: the run ends
        self._status = MembersStatus()
        self._read_at = 0.0  # modification time of the status that was read last

    @property
    def is_wanted(self) -> bool:
        """Whether the run has members."""
        return bool(self._launch.members)

    @property
    def is_open(self) -> bool:
        """Whether the ranks of the run may start, as far as its members are concerned."""
        return not self.is_wanted or (self._is_current and self._status.is_open)

    @property
    def failure(self) -> str:
        """Why the ranks will never start; "" if they may."""
        return self._status.failure if self._is_current else ""

    @property
    def _is_current(self) -> bool:
        return self._status.generation == self._launch.generation

    def tend(self, now: float) -> None:
        """Start the manager where none lives, unless a scheduler's program does, and record what it reports."""
        if not self.is_wanted:
            return
        self._look()
        if not self._launch.starts_manager or self._has_ended or self.child is not None:
            return
        if now < self._next_start or living_manager(self._run):
            return
        self._start(now)

    def ended(self, child: ChildProcess) -> str | None:
        """Return why the manager has ended, "" if it has done its work; None: the child is another process."""
        if child is not self.child:
            return None
        self.child = None
        now = time.monotonic()
        is_over = any(self._run.has(marker) for marker in ("STOP", "DONE", "FATAL"))
        self._has_ended = child.code == 0 and is_over
        if now - self._began > STEADY_SECONDS:
            self._pause = 0.0
        self._pause = min(MAX_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * self._pause))
        self._next_start = now + self._pause
        if child.code == 0:  # also if another manager lives
            return ""
        return "; ".join([f"the member manager {how_ended(child.code)}", *child.last_lines(3)])

    def _start(self, now: float) -> None:
        log_path = self._run.path / "logs" / MANAGER_LOG
        with open_log(log_path) as log:
            offset = log.tell()
            process = subprocess.Popen(
                self._launch.members,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.returncode = 0  # `reap` collects its exit code
        self.child = ChildProcess("member manager", process.pid, log_path, offset, STEADY.now())
        self._began = now
        self._records.event("manager_started", pid=process.pid)

    def _look(self) -> None:
        """Read the status if it has changed, and record every change of a member's state."""
        before, self._status = self._status, self._newest()
        if self._status is before:
            return
        for name, member in self._status.members.items():
            known = before.members.get(name)
            if known is None or (known.state, known.restarts) != (member.state, member.restarts):
                text = member.message or member.waits_for
                self._records.event("member_changed", member=name, state=member.state, message=text or None)
        was_open = before.generation == self._launch.generation and before.is_open
        if self._is_current and self._status.is_open and not was_open:
            self._records.event("gate_opened")

    def _newest(self) -> MembersStatus:
        try:
            modified = (self._run.path / "members" / "status.json").stat().st_mtime
        except OSError:
            return self._status
        if modified == self._read_at:
            return self._status
        self._read_at = modified
        return read_members_status(self._run)
