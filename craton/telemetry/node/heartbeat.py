"""A node's heartbeat: `heartbeat/NODE`, touched every second by the node's agent.

Its age shows whether the agent is alive, its text the state of the node. The text is replaced as a whole, so a reader
sees the old or the new one. A heartbeat older than LOST_SECONDS in state `running` or `spare` means a lost node.

The modification time is of the agent's wall clock, which may jump. So the text also has the offset of that clock to
CLOCK_MONOTONIC: a reader of the same boot computes the age without a wall clock. After a jump the agent rewrites it.
The change time is of the kernel or the file server: readers elsewhere use it if the agent's clock is minutes off.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from craton.telemetry.files import UnsafeFileError, note_unread, open_regular, replace_text
from craton.telemetry.rank import STEADY, monotonic_clock_id, wall_offset
from craton.telemetry.rundirectory import RunDirectory

LOST_SECONDS = 10.0
WRONG_CLOCK_SECONDS = 300.0  # between the agent's clock and the file server's
MAX_HEARTBEAT_BYTES = 1 << 16
NodeState = Literal["running", "done", "stopped", "failed", "spare", "released"]


@dataclass(frozen=True)
class Heartbeat:
    """The heartbeat of a node's agent."""

    generation: int
    state: NodeState
    pid: int
    metrics_port: int  # 0: no endpoint
    address: str = ""  # host:port where the agent listens for other agents; "" before it does
    host: str = ""
    started: str = ""  # start time of its process, by the kernel's clock: distinguishes processes with the same PID
    moment: float = 0.0  # epoch seconds of the last touch
    changed: float = 0.0  # the same by the kernel or the file server; 0: unknown
    clock: str = ""  # id of the agent's monotonic clock; "": unknown
    clock_offset: float = 0.0  # of the clock of `moment` to that one
    steady_offset: float = 0.0  # of the agent's steady clock, which a later agent of this boot takes over
    trouble: str = ""  # why the agent cannot write to the run directory, or could not earlier
    missing_lines: int = 0  # of its records: dropped, or only in its memory

    def age_seconds(self, now: float | None = None) -> float:
        """Return the seconds since the last touch, now or at the epoch second `now`. Without `now`, a jump of the wall
        clock does not mislead a reader of the agent's boot."""
        if now is None and self.is_of_this_boot:
            return max(0.0, time.monotonic() - (self.moment - self.clock_offset))
        if now is not None:
            return now - self.moment
        # A clock that is off by minutes shows nothing; two machines that differ by seconds are usual.
        is_wrong = bool(self.changed) and abs(self.moment - self.changed) > WRONG_CLOCK_SECONDS
        return time.time() - (self.changed if is_wrong else self.moment)

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the agent has the monotonic clock of this process."""
        return bool(self.clock) and self.clock == monotonic_clock_id()

    @property
    def clock_error(self) -> float:
        """How many seconds the agent's wall clock is ahead of this machine's or the file server's, as far as known."""
        if self.is_of_this_boot:
            return self.clock_offset - wall_offset()
        return self.moment - self.changed if self.changed else 0.0

    def is_lost(self, now: float | None = None) -> bool:
        return self.state in ("running", "spare") and self.age_seconds(now) > LOST_SECONDS

    @property
    def is_alive_here(self) -> bool:
        """Whether the agent is a live process of this machine, however old its heartbeat is."""
        return bool(self.started) and self.host == socket.gethostname() and process_start(self.pid) == self.started

    @property
    def is_gone_here(self) -> bool:
        """Whether the agent was a process of this machine and has ended, whatever its last state was."""
        return bool(self.started) and self.host == socket.gethostname() and not self.is_alive_here

    @property
    def is_stopped_here(self) -> bool:
        """Whether the agent is a process of this machine that a signal such as SIGSTOP has stopped."""
        is_here = bool(self.started) and self.host == socket.gethostname()
        return is_here and _state_and_start(self.pid) == ("T", self.started)


def process_start(pid: int) -> str:
    """Return the start time of a process, by the kernel's clock; "" if there is none. A reused PID has another start
    time."""
    state, started = _state_and_start(pid)
    return "" if state in ("Z", "X") else started


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state letter (proc(5)) and start time of a process; ("", "") if there is none."""
    try:
        # The name in parentheses may contain spaces and parentheses: count fields from the last one (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return "", ""
    except ProcessLookupError:
        return "", ""
    listed = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = listed.stdout.strip().partition(" ")
    return state[:1], started.strip()


def write_heartbeat(run: RunDirectory, node: str, heartbeat: Heartbeat) -> float:
    """Replace the node's heartbeat, on a full disk in place; OSError if that fails too. Return the clock offset in it,
    for `touch_heartbeat`."""
    offset = wall_offset()
    is_ours = heartbeat.clock == monotonic_clock_id()  # then it may keep an agent's offset
    steady = heartbeat.steady_offset if is_ours and heartbeat.steady_offset else STEADY.offset
    clocks = {"clock": monotonic_clock_id(), "clock_offset": offset, "steady_offset": steady}
    document = {**asdict(heartbeat), **clocks}
    del document["moment"], document["changed"]
    text = json.dumps(document) + "\n"
    # A file server has its own clock.
    moment = time.monotonic() + offset
    replace_text(run.heartbeat_path(node), text, durable=False, in_place=True, modified_at=moment)
    return offset


def touch_heartbeat(run: RunDirectory, node: str, offset: float | None = None) -> None:
    """Refresh the heartbeat; `offset` is that of the clock in the text."""
    _touch(run.heartbeat_path(node), wall_offset() if offset is None else offset)


def _touch(path: Path, offset: float) -> None:
    moment = time.monotonic() + offset
    os.utime(path, (moment, moment))


def read_heartbeat(run: RunDirectory, node: str) -> Heartbeat | None:
    """Return the node's heartbeat; None if it cannot be read."""
    path = run.heartbeat_path(node)
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            document: dict[str, Any] = json.loads(file.read(MAX_HEARTBEAT_BYTES))
        return Heartbeat(
            generation=int(document["generation"]),
            state=document["state"],
            pid=int(document["pid"]),
            metrics_port=int(document["metrics_port"]),
            address=str(document.get("address", "")),
            host=str(document.get("host", "")),
            started=str(document.get("started", "")),
            moment=status.st_mtime,
            changed=status.st_ctime,
            clock=str(document.get("clock", "")),
            clock_offset=float(document.get("clock_offset", 0.0)),
            steady_offset=float(document.get("steady_offset", 0.0)),
            trouble=str(document.get("trouble", "")),
            missing_lines=int(document.get("missing_lines", 0)),
        )
    except UnsafeFileError as error:
        note_unread(path, error)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
