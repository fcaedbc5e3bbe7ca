"""Whether a run runs, by its files and by whoever it was handed to, and one command at a time that starts something.

What a run's own markers say is final. Beyond them its scheduler knows best: a run whose agents are gone may wait in a
queue to go on, and one whose last word was "running" may be on no machine any more.
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
from craton.orchestration.errors import RunEndedError, RunStateError, SchedulerError
from craton.telemetry import RunDirectory, RunState, RunSummary, read_json, summarize
from craton.telemetry.files import append_regular, noting_unread

MOVING: tuple[RunState, ...] = ("waiting", "starting", "running", "stopping")  # not at its end, whichever that is
GOES_ON = ("waiting", "running")
LOOK_SECONDS = {"local": 0.02}  # between two looks at a run while one waits for its end
SCHEDULER_LOOK_SECONDS = 2.0  # the same where a scheduler is asked, which has others to answer


def standing_of(run: RunDirectory) -> Standing:
    """What whoever runs it says of a run now."""
    return standings_of([run])[run.name]


def standings_of(runs: Iterable[RunDirectory]) -> dict[str, Standing]:
    """Run's name → its standing; every backend is asked once. One that cannot be asked makes its runs unknown."""
    by_backend: dict[str, list[RunDirectory]] = {}
    for run in runs:
        by_backend.setdefault(read_submission(run).on, []).append(run)
    result: dict[str, Standing] = {}
    for name, theirs in by_backend.items():
        try:
            result |= backend_of(name).look(theirs)
        except SchedulerError as error:
            result |= {run.name: Standing("unknown", sentence=str(error)) for run in theirs}
    return result


def settled(summary: RunSummary, standing: Standing) -> RunSummary:
    """A summary of the run's files, put right by what its scheduler says."""
    is_over = standing.condition not in ("waiting", "running") or (summary.path / "DONE").exists()
    if summary.state == "failed" or (summary.state == "done" and is_over):
        return summary
    if standing.is_leaving:
        return replace(summary, state="stopping", message=standing.sentence, eta_seconds=None)
    if standing.condition == "waiting":
        return replace(summary, state="waiting", message=standing.sentence or standing.reason, eta_seconds=None)
    if standing.condition == "running" and summary.state in ("starting", "lost", "stopped", "done"):
        return replace(summary, state="starting", message=standing.sentence)  # why it is not whole yet
    if standing.condition == "ended" and summary.state in (*MOVING, "lost"):
        if (summary.path / "STOP").exists():
            return replace(summary, state="stopped", eta_seconds=None)
        if standing.outcome == "done":  # its marker may take a while to be seen over a network
            return replace(summary, state="done", message="", eta_seconds=None)
        words = f"its job {standing.job} ended" + (f": {standing.reason}" if standing.reason else "")
        words = words if standing.job else standing.reason
        # That no agent is seen follows from the job's end; what the run says of itself in its files does not.
        own = "" if summary.state == "lost" else summary.message
        if standing.outcome == "failed":
            message = f"{words}: {standing.sentence}" if standing.sentence else words
            return replace(summary, state="failed", message=own or message, eta_seconds=None)
        return replace(summary, state="lost", message=own or words or summary.message, eta_seconds=None)
    return summary


def settled_summaries(
    summaries: Iterable[RunSummary], ask: Callable[[list[RunDirectory]], dict[str, Standing]] = standings_of
) -> list[RunSummary]:
    """The same for many runs, with one question to each scheduler; those of this machine tell all by their files."""
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
    """Until the agents of a run that has ended are gone too, so that it may be resumed at once."""
    pause = LOOK_SECONDS.get(read_submission(run).on, SCHEDULER_LOOK_SECONDS)
    deadline = time.monotonic() + seconds
    while standing_of(run).condition in GOES_ON and time.monotonic() < deadline:
        time.sleep(pause)


def check_is_seen(run: RunDirectory, instead: str) -> None:
    """Refuse to leave word in a run directory that its pods do not see."""
    if is_elsewhere(run):
        directory = read_submission(run).details.get("directory", "a folder")
        raise RunStateError(
            f"{run.name} is {directory} in its pods, which this machine does not see, so they would not hear of it; "
            f"{instead}"
        )


def check_running(run: RunDirectory, action: str = "stop", may_wait: bool = False) -> Standing:
    """Refuse a verb for a run that does not run, or, unless it `may_wait`, has not begun to."""
    standing = standing_of(run)
    if standing.condition == "running" or (may_wait and standing.condition == "waiting"):
        return standing
    if standing.condition == "waiting":
        raise RunStateError(
            f"{run.name} waits for its nodes, so that there is nothing to {action}: {standing.sentence}"
        )
    if standing.condition == "unknown":
        raise RunStateError(f"whether {run.name} runs cannot be told: {standing.sentence}")
    with noting_unread():  # files that cannot be read keep no one from stopping or resizing it
        summary = settled(summarize(run), standing)
    if summary.state in MOVING:
        summary = replace(summary, state="lost", message=summary.message or "none of its agents runs", eta_seconds=None)
    if summary.state == "done":
        raise RunEndedError(f"{run.name} is done already: there is nothing to {action}", summary)
    raise RunEndedError(f"{run.name} does not run here ({summary.state}); `craton resume {run.name}` goes on", summary)


def check_not_running(run: RunDirectory) -> None:
    standing = standing_of(run)
    if standing.is_leaving:
        raise RunStateError(f"{run.name} still stops: {standing.sentence}; `craton stop {run.name}` waits until it has")
    if standing.condition == "running":
        raise RunStateError(
            f"{run.name} is running ({', '.join(standing.nodes)}); `craton logs {run.name} -f` follows it, "
            f"`craton stop {run.name}` stops it with a checkpoint"
        )
    if standing.condition == "waiting":
        raise RunStateError(
            f"{run.name} waits as job {standing.job}: {standing.sentence}; `craton stop {run.name}` takes it back"
        )
    if standing.condition == "unknown":
        raise RunStateError(f"whether {run.name} runs cannot be told: {standing.sentence}")


@contextmanager
def launching(run: RunDirectory) -> Iterator[None]:
    """One command at a time starts processes for a run."""
    with os.fdopen(append_regular(run.path / "launch.lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunStateError(f"{run.name} is being started by another command; `craton ps` shows it") from None
        yield
