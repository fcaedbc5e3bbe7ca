"""The interface of a backend: this machine, Slurm, Kubernetes.

A backend is thin: pure emitters produce its texts, and it reads everything about a run from the run directory. The
run's `backend.json` names the backend and the scheduler's ID of the job.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from craton.telemetry import RunDirectory
from craton.telemetry.files import read_regular

if TYPE_CHECKING:
    from craton.orchestration.draft import Draft

Condition = Literal["waiting", "running", "ended", "unknown"]
Outcome = Literal["", "done", "failed"]
BACKEND_FILE = "backend.json"
SLOTS_FILE = "slots.json"


@dataclass(frozen=True)
class Submission:
    """The backend that a run was submitted to, and its ID there."""

    on: str  # local, slurm or kubernetes
    job: str = ""  # Slurm's number, or KIND/NAME on Kubernetes
    details: dict[str, str] = field(default_factory=dict)  # namespace, cluster, …: needed to find it again


@dataclass(frozen=True)
class Standing:
    """The scheduler's current state of a run."""

    condition: Condition
    job: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""  # the scheduler's own code
    sentence: str = ""  # why it waits, for people: needed, available, expected start
    restarts: int = 0
    expected_start: float | None = None  # seconds since 1970
    outcome: Outcome = ""  # of an ended run, where the scheduler knows it
    is_suspended: bool = False  # its processes are stopped by the scheduler, and keep their nodes
    has_begun: bool = True  # False: the scheduler has started it, and nothing of it runs yet, for longer than usual
    is_leaving: bool = False  # removed from the scheduler, while its processes still save


class Backend(Protocol):
    """A place to run. Raises StartError before anything is submitted, RunStateError after."""

    name: str

    def check(self, draft: Draft, run: RunDirectory) -> None:
        """Refuse a run that cannot start here, before the cost is confirmed."""
        ...

    def files(self, draft: Draft, run: RunDirectory) -> Mapping[str, str]:
        """Return name → text of the scheduler's files in the run directory; `--dry-run` prints them."""
        ...

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        """Return the commands that submit the run, for `--dry-run`."""
        ...

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        """Submit the run; its files are already written."""
        ...

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        """Return run name → state, with one query for all runs."""
        ...

    def stop(self, run: RunDirectory) -> None:
        """Do what a stop needs beyond the STOP marker, for nodes that do not see this directory."""
        ...

    def kill(self, run: RunDirectory) -> None:
        """End the run at once, whether it waits or runs."""
        ...


def write_submission(run: RunDirectory, submission: Submission) -> None:
    """Write backend.json atomically. Several commands and the job itself may write at once: the last one wins."""
    text = json.dumps(asdict(submission), indent=1) + "\n"
    writer = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    partial = run.path / f".{BACKEND_FILE}.{writer}"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(run.path / BACKEND_FILE)
    finally:
        partial.unlink(missing_ok=True)


def read_submission(run: RunDirectory) -> Submission:
    """Read backend.json; a run without it belongs to this machine."""
    try:
        return Submission(**json.loads(read_regular(run.path / BACKEND_FILE)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Submission("local")


def is_elsewhere(run: RunDirectory) -> bool:
    """Whether the pods of a run use a run directory that this machine does not see."""
    submission = read_submission(run)
    return submission.on == "kubernetes" and submission.details.get("directory") != str(run.path)
