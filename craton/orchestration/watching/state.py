"""The state of a run, from its files and its scheduler, and a lock so that one command at a time starts processes.

The run's markers are final. Without one the scheduler knows best: a run without agents may be queued for its next
start, and one whose last heartbeat was "running" may be on no machine any more.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from craton.orchestration.backend import Standing, is_elsewhere, read_submission
from craton.orchestration.backends import backend_of
from craton.orchestration.errors import RunEndedError, RunStateError, SchedulerError, SilentSchedulerError
from craton.telemetry import RunDirectory, RunState, RunSummary, read_json, summarize
from craton.telemetry.files import append_regular, noting_unread
from craton.telemetry.members import living_manager, member_runs

MOVING: tuple[RunState, ...] = ("waiting", "starting", "running", "stopping")  # not ended
GOES_ON = ("waiting", "running")
NO_ANSWER = "no_answer"  # reason of an unknown state: the scheduler's controller does not respond
LOOK_SECONDS = {"local": 0.02}  # between two checks while waiting for a run's end
SCHEDULER_LOOK_SECONDS = 2.0  # the same with a scheduler, to limit its load
MEMBERS_SECONDS = 600.0  # for the last checkpoints of members, one after the other


def standing_of(run: RunDirectory) -> Standing:
    """Return the backend's current state of a run."""
    return standings_of([run])[run.name]


def standings_of(runs: Iterable[RunDirectory]) -> dict[str, Standing]:
    """Return run name → state, with one query per backend. Runs of an unreachable backend are unknown."""
    by_backend: dict[str, list[RunDirectory]] = {}
    for run in runs:
        by_backend.setdefault(read_submission(run).on, []).append(run)
    result: dict[str, Standing] = {}
    for name, theirs in by_backend.items():
        try:
            result |= backend_of(name).look(theirs)
        except SchedulerError as error:
            reason = NO_ANSWER if isinstance(error, SilentSchedulerError) else ""
            result |= {run.name: Standing("unknown", reason=reason, sentence=str(error)) for run in theirs}
    return result


def settled(summary: RunSummary, standing: Standing) -> RunSummary:
    """Correct a summary of the run's files by the scheduler's state."""
    is_over = standing.condition not in ("waiting", "running") or (summary.path / "DONE").exists()
    if summary.state == "failed" or (summary.state == "done" and is_over):
        return summary
    if standing.is_leaving:
        return replace(summary, state="stopping", message=standing.sentence, eta_seconds=None)
    if standing.condition == "waiting":
        return replace(summary, state="waiting", message=standing.sentence or standing.reason, eta_seconds=None)
    if standing.is_suspended:
        state: RunState = "running" if summary.state == "lost" else summary.state
        return replace(summary, state=state, message=standing.sentence, eta_seconds=None)
    if standing.condition == "running" and summary.state in ("starting", "lost", "stopped", "done"):
        own = summary.message if summary.state == "starting" else ""  # which member it waits for
        return replace(summary, state="starting", message=standing.sentence or own)  # why not all of it runs yet
    if standing.condition == "ended" and summary.state in (*MOVING, "lost"):
        if (summary.path / "STOP").exists():
            return replace(summary, state="stopped", eta_seconds=None)
        if standing.outcome == "done":  # its marker may appear late on a network file system
            return replace(summary, state="done", message="", eta_seconds=None)
        words = f"its job {standing.job} ended" + (f": {standing.reason}" if standing.reason else "")
        words = words if standing.job else standing.reason
        # Missing agents follow from the job's end; the run's own message does not, so it takes precedence.
        own = "" if summary.state == "lost" else summary.message
        if standing.outcome == "failed":
            message = f"{words}: {standing.sentence}" if standing.sentence else words
            return replace(summary, state="failed", message=own or message, eta_seconds=None)
        return replace(summary, state="lost", message=own or words or summary.message, eta_seconds=None)
    return summary


def settled_summaries(
    summaries: Iterable[RunSummary], ask: Callable[[list[RunDirectory]], dict[str, Standing]] = standings_of
) -> list[RunSummary]:
    """Correct many summaries, with one query per scheduler; for local runs the files suffice."""
    listed = list(summaries)
    asked = [
        run
        for summary in listed
        if summary.state not in ("done", "failed") and read_submission(run := RunDirectory(summary.path)).on != "local"
    ]
    standings = ask(asked) if asked else {}
    return [settled(item, standings[item.name]) if item.name in standings else item for item in listed]


def is_server(run: RunDirectory) -> bool:
    """Whether a run is of kind serve."""
    return read_json(run.plan_path).get("kind") == "serve"


def wait_for_agents(run: RunDirectory, seconds: float = 10.0) -> None:
    """Wait until the agents of an ended run have exited too, so that it can be resumed at once."""
    pause = LOOK_SECONDS.get(read_submission(run).on, SCHEDULER_LOOK_SECONDS)
    deadline = time.monotonic() + seconds
    while standing_of(run).condition in GOES_ON and time.monotonic() < deadline:
        time.sleep(pause)


def living_members(run: RunDirectory) -> list[RunDirectory]:
    """Return the members of a run that run or wait for their nodes, in the order of their start."""
    return [member for member in member_runs(run) if standing_of(member).condition in GOES_ON]


def wait_for_members(run: RunDirectory, seconds: float = MEMBERS_SECONDS) -> None:
    """Wait until the members of an ended run and their manager have ended too."""
    deadline = time.monotonic() + seconds
    while (living_manager(run) or living_members(run)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS["local"])


def check_is_seen(run: RunDirectory, instead: str) -> None:
    """Refuse to write requests into a run directory that the pods do not see."""
    if is_elsewhere(run):
        directory = read_submission(run).details.get("directory", "a folder")
        raise RunStateError(
            f"the pods of {run.name} use {directory}, which this machine does not see, so they would not get the "
            f"request; {instead}"
        )


def check_running(run: RunDirectory, action: str = "stop", may_wait: bool = False) -> Standing:
    """Refuse a verb for a run that does not run, or that is still pending unless it `may_wait`."""
    standing, name = standing_of(run), run.name
    if standing.condition == "running" or (may_wait and standing.condition == "waiting"):
        return standing
    if standing.condition == "waiting":
        raise RunStateError(f"{name} is waiting for its nodes, so there is nothing to {action}: {standing.sentence}")
    if standing.condition == "unknown":
        raise RunStateError(f"the state of {name} is unknown: {standing.sentence}")
    with noting_unread():  # unreadable files do not prevent stopping or resizing
        summary = settled(summarize(run), standing)
    if summary.state in MOVING:
        summary = replace(
            summary, state="lost", message=summary.message or "none of its agents is running", eta_seconds=None
        )
    if summary.state == "done":
        raise RunEndedError(f"{name} is already done: there is nothing to {action}", summary)
    raise RunEndedError(f"{name} is not running ({summary.state}); `craton resume {name}` resumes it", summary)


def check_not_running(run: RunDirectory) -> None:
    standing, name = standing_of(run), run.name
    if standing.is_leaving:
        raise RunStateError(f"{name} is still stopping: {standing.sentence}; `craton stop {name}` waits for it")
    if standing.condition == "running":
        raise RunStateError(
            f"{name} is running ({', '.join(standing.nodes)}); `craton logs {name} -f` follows it, "
            f"`craton stop {name}` stops it with a checkpoint"
        )
    if standing.condition == "waiting":
        raise RunStateError(
            f"{name} is waiting as job {standing.job}: {standing.sentence}; `craton stop {name}` cancels it"
        )
    if standing.condition == "unknown":
        raise RunStateError(f"the state of {name} is unknown: {standing.sentence}")


@contextmanager
def launching(run: RunDirectory) -> Iterator[None]:
    """Lock the run: only one command at a time starts processes for it."""
    with os.fdopen(append_regular(run.path / "launch.lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunStateError(f"{run.name} is being started by another command; `craton ps` shows it") from None
        yield
