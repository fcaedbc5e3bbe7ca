"""A run from Python: `craton.run(job)` starts one and returns a handle; `craton.runs()` lists all of them.

A handle holds nothing but the run's directory. The run outlives this process, and any number of handles may look at it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton.formatting import setting
from craton.job import Job, load_job
from craton.orchestration import RunEndedError, RunStateError
from craton.orchestration.changes import draft_resize, has_resized, resize_run
from craton.orchestration.draft import Progress
from craton.orchestration.start import (
    check_start,
    draft_resumption,
    draft_start,
    kill_run,
    prepare_start,
    release_run,
    resume_start,
    stop_run,
    submit_start,
)
from craton.orchestration.watching import Follower, View, log_lines, settled_summaries, until_stopped, wait_for_agents
from craton.telemetry import RunDirectory, RunSummary, find_run, list_runs, read_table, summarize

if TYPE_CHECKING:
    from craton.observability.diagnosis import Verdict

LOOK_SECONDS = 0.2


class Run:
    """A run, by its directory."""

    def __init__(self, directory: RunDirectory | Path | str) -> None:
        """A run directory, or the name or folder of a run."""
        self.directory = directory if isinstance(directory, RunDirectory) else find_run(directory)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def state(self) -> str:
        """waiting, starting, running, stopping, stopped, done, failed or lost."""
        return self.summary().state

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"

    def summary(self) -> RunSummary:
        """State, step, loss, measured and planned numbers: what `craton ps` shows."""
        return settled_summaries([summarize(self.directory)])[0]

    def wait(self, seconds: float | None = None, look: Callable[[View], None] | None = None) -> RunSummary:
        """Return when the run has ended, whatever its end; TimeoutError when that takes longer than `seconds`. `look`
        is called with every look at it."""
        follower = Follower(self.directory)
        deadline = None if seconds is None else time.monotonic() + seconds
        while (view := follower.look()).is_moving:
            if look is not None:
                look(view)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.name} is {view.summary.state} after {setting(seconds)}, at step {view.summary.step:,}"
                )
            time.sleep(LOOK_SECONDS)
        wait_for_agents(self.directory)
        return self.summary()

    def stop(self, *, now: bool = False) -> RunSummary:
        """Stop it with a checkpoint, or with `now` without one, and wait until it has. A run that has ended stays as it
        is. RunStateError when its state cannot be saved: then it stays up with the state in memory."""
        try:
            kill_run(self.directory) if now else stop_run(self.directory)
        except RunEndedError as ended:
            return ended.summary
        for view in until_stopped(self.directory):
            if view.summary.unsaved:
                raise RunStateError(f"{self.name} is not stopped: {view.summary.unsaved}")
            time.sleep(LOOK_SECONDS)
        wait_for_agents(self.directory)
        return self.summary()

    def resume(
        self,
        *,
        cluster: str | None = None,
        steps: int | None = None,
        on: str | None = None,
        stop_at: str | int | None = None,
        progress: Progress | None = None,
    ) -> Run:
        """Start the next generation from the newest checkpoint, on the same or other nodes; return once it started."""
        if not release_run(self.directory):
            start = draft_resumption(
                self.directory, cluster=cluster, steps=steps, on=on, stop_at=stop_at, progress=progress
            )
            check_start(start)
            resume_start(prepare_start(start, progress)[0])
        return self

    def resize(self, nodes: int, seconds: float | None = None) -> RunSummary:
        """Go on with another number of nodes, and wait until it does; TimeoutError after `seconds`."""
        since, follower = time.time(), Follower(self.directory)
        resize_run(self.directory, draft_resize(self.directory, nodes))
        deadline = None if seconds is None else time.monotonic() + seconds
        while not has_resized(self.directory, nodes, since):
            view = follower.look()
            if not view.is_moving:
                raise RunStateError(
                    f"{self.name} is {view.summary.state}, not on {nodes} nodes: {view.summary.message}"
                )
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} is not on {nodes} nodes after {setting(seconds)}")
            time.sleep(LOOK_SECONDS)
        return self.summary()

    def logs(self, ranks: Sequence[int] = (), *, last: int | None = None, agents: bool = False) -> Iterator[str]:
        """Lines that the ranks printed, or with `agents` the node agents; of each log the `last` ones."""
        return (line.text for line in log_lines(self.directory, ranks, agent=agents, last=last))

    def metrics(self, rank: int = 0) -> Any:
        """What a rank recorded at every step: a pandas data frame with the step as its index where pandas is installed,
        else a dict of arrays, `step` among them."""
        return read_table(self.directory, rank)

    def why(self, prometheus: str | None = None) -> Verdict:
        """Why it waits, is slow, hangs, is dead or wrong; what `craton why` prints is its `sentence`."""
        from craton.observability.diagnosis import diagnose
        from craton.observability.diagnosis.collect import take_snapshot

        return diagnose(take_snapshot(self.directory, prometheus))


def run(
    job: Job | Path | str,
    name: str | None = None,
    *,
    on: str | None = None,
    stop_at: str | int | None = None,
    chaos: Sequence[str] = (),
    root: Path | str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Plan a job, prepare its data and start its ranks, which outlive this process; returns once they are started.

    `job` is a job or the path of a job file. It does not ask before it spends money: `plan(job).cost` predicts that. Of
    a job with `run.copies` all are started, and the handle is that of NAME-1; NAME-2, … lie beside it.
    """
    wanted = job if isinstance(job, Job) else load_job(job)
    folder = None if root is None else Path(root)
    start = draft_start(wanted, name, on=on, chaos=chaos, stop_at=stop_at, root=folder, progress=progress)
    check_start(start)
    return Run(submit_start(prepare_start(start, progress)[0])[0])


def runs(root: Path | str | None = None) -> list[Run]:
    """Every run under CRATON_RUNS, else ./runs, or under another root; the newest first."""
    return [Run(directory) for directory in list_runs(None if root is None else Path(root))]
