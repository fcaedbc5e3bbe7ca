"""Whether the member manager of a run lives: by its process on this machine, by its lock file on others."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from craton.telemetry.members.member_files import LOCK_FILE, read_members_status
from craton.telemetry.node import LOST_SECONDS, process_start
from craton.telemetry.rundirectory import MEMBERS_FOLDER, RunDirectory


@dataclass(frozen=True)
class ManagerProcess:
    """The member manager of a run, as its status names it."""

    pid: int
    started: str
    host: str

    @property
    def is_alive_here(self) -> bool:
        return self.host == socket.gethostname() and bool(self.started) and process_start(self.pid) == self.started


def living_manager(run: RunDirectory) -> ManagerProcess | None:
    """Return the member manager of a run if it lives; None if it has ended or never began."""
    status = read_members_status(run)
    manager = ManagerProcess(status.pid, status.started, status.host)
    if not manager.pid:
        return None
    if manager.host == socket.gethostname():
        return manager if manager.is_alive_here else None
    return manager if _lock_age(run) < LOST_SECONDS else None


def touch_manager_lock(run: RunDirectory) -> None:
    os.utime(run.path / MEMBERS_FOLDER / LOCK_FILE)


def _lock_age(run: RunDirectory) -> float:
    try:
        return time.time() - os.stat(run.path / MEMBERS_FOLDER / LOCK_FILE).st_mtime
    except OSError:
        return float("inf")
