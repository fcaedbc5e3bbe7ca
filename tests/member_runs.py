"""Owners with members of stand-in ranks: start them, wait for what they do, and see that nothing of them is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from waiting import wait_until

from craton import run as start_run_of
from craton.api import Run
from craton.job import Job, parse_job
from craton.orchestration.draft.members import Members
from craton.telemetry.members import MemberSpec, MembersSpec, MembersStatus, read_members_status

RANK = Path(__file__).parent / "orchestration" / "rank.py"
LONG = {"STEPS": 100_000}


def counting(name: str, nodes: int = 1, **environment: object) -> Job:
    """A job of ranks that count steps."""
    env = ", ".join(f"{key}: '{value}'" for key, value in environment.items())
    return parse_job(
        f"name: {name}\nkind: command\ncommand: [{sys.executable}, {RANK}]\ncluster: local x {nodes}\n"
        f"run: {{env: {{{env}}}}}\nworkdir: {RANK.parent / 'golden'}\n"
    )


def owned(*members: MemberSpec, owner: Job | None = None, parallel: int = 0, **jobs: Job) -> Run:
    """Start a run that owns these members; one without a job counts for long."""
    given = {item.name: jobs.get(item.name) or counting(item.name, **LONG) for item in members}
    spec = MembersSpec(list(members), parallel)
    return start_run_of(owner or counting("owner", **LONG), members=Members(spec, given))


def owned_report(owner: Job, spec: MembersSpec, jobs: dict[str, Job]) -> Run:
    """Start a run that only reports on its members."""
    return start_run_of(owner, members=Members(spec, jobs))


def states(run: Run) -> dict[str, str]:
    return {name: member.state for name, member in status(run).members.items()}


def status(run: Run) -> MembersStatus:
    return read_members_status(run.directory)


def wait_for_members_in(run: Run, **wanted: str) -> None:
    """Wait until each of these members is in its state."""
    wait_until(
        lambda: wanted.items() <= states(run).items(),
        lambda: f"{wanted}; they are {status(run).members}; {manager_log(run)}",
    )


def manager_log(run: Run) -> str:
    path = run.path / "logs" / "members.log"
    return path.read_text() if path.exists() else "its manager has not begun"


def member(run: Run, name: str) -> Run:
    return Run(f"{run.name}/{name}")


def kill_member(run: Run, name: str) -> None:
    """Kill every process of a member's step at once, as a crash of its nodes would."""
    folder = str(run.path / "members" / name)
    for _ in range(2):  # the second time those that the first ones were just starting
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                environment = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if folder in words or f"CRATON_RUN={folder}" in environment:
                os.kill(int(path.name), signal.SIGKILL)


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that name this folder or have it in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            words = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in words or f"CRATON_RUN={folder}".encode() in path.joinpath("environ").read_bytes():
                found.append(f"{path.name} {words}")
        except OSError:  # gone, or another user's
            continue
    return found


def check_nothing_is_left(folder: Path) -> None:
    wait_until(lambda: not processes_of(folder), lambda: f"left: {processes_of(folder)}")
