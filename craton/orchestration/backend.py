"""What every place to run on can do: this machine, Slurm, Kubernetes.

A backend is thin: texts come from pure emitters, and what it is told of a run it finds in the run directory. Which one
a run belongs to stands in its `backend.json`, with what the scheduler called it.
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


@dataclass(frozen=True)
class Submission:
    """Where a run was handed to, and by which name it is known there."""

    on: str  # local, slurm or kubernetes
    job: str = ""  # Slurm's number, or KIND/NAME on Kubernetes
    details: dict[str, str] = field(default_factory=dict)  # namespace, cluster, …: what it takes to find it again


@dataclass(frozen=True)
class Standing:
    """What a scheduler says of a run now."""

    condition: Condition
    job: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""  # the scheduler's own word
    sentence: str = ""  # why it waits, for people: what it needs, what there is, when it may start
    restarts: int = 0
    expected_start: float | None = None  # seconds since 1970
    outcome: Outcome = ""  # of one that has ended, where the scheduler knows it
    is_leaving: bool = False  # taken back from the scheduler, while processes of it still save


class Backend(Protocol):
    """One way to run. Errors are StartError before anything was submitted, RunStateError after."""

    name: str

    def check(self, draft: Draft, run: RunDirectory) -> None:
        """Refuse what cannot be started here, before anybody is asked for money."""
        ...

    def files(self, draft: Draft, run: RunDirectory) -> Mapping[str, str]:
        """Name → text of what is written into the run directory for the scheduler; `--dry-run` prints it."""
        ...

    def command(self, draft: Draft, run: RunDirectory) -> list[list[str]]:
        """What is executed, or sent, to submit it: for `--dry-run`."""
        ...

    def submit(self, draft: Draft, run: RunDirectory) -> Submission:
        """Hands the run over; its files are written already."""
        ...

    def look(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        """Run's name → what the scheduler says of it, all in one question."""
        ...

    def stop(self, run: RunDirectory) -> None:
        """What a stop needs beyond the STOP marker, which is set already: for nodes that do not see this directory."""
        ...

    def kill(self, run: RunDirectory) -> None:
        """Ends the run at once, wherever it is: waiting or running."""
        ...


def write_submission(run: RunDirectory, submission: Submission) -> None:
    """Commands on several machines and the job itself may write at the same time: the last one counts."""
    text = json.dumps(asdict(submission), indent=1) + "\n"
    writer = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    partial = run.path / f".{BACKEND_FILE}.{writer}"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(run.path / BACKEND_FILE)
    finally:
        partial.unlink(missing_ok=True)


def read_submission(run: RunDirectory) -> Submission:
    """A run without the file is one of this machine."""
    try:
        return Submission(**json.loads(read_regular(run.path / BACKEND_FILE)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Submission("local")


def is_elsewhere(run: RunDirectory) -> bool:
    """Whether the pods of a run write another directory than the one that is seen here."""
    submission = read_submission(run)
    return submission.on == "kubernetes" and submission.details.get("directory") != str(run.path)
