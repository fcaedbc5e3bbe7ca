"""A run from Python: `craton.Run("name")` finds one, `craton.runs()` lists all of them.

A handle holds nothing but the run's directory. The run outlives this process, and any number of handles may look at it.
Methods import what they need, for `craton ps` makes a handle of every run and must not load what plans a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton.telemetry import RunDirectory, find_run, list_runs

if TYPE_CHECKING:
    from craton.api.start_steps import StartWatch
    from craton.job import InjectedFault
    from craton.observability.diagnosis import Verdict
    from craton.observability.diagnosis.snapshot import Snapshot
    from craton.orchestration.changes import Removal, Resize
    from craton.orchestration.draft import Progress
    from craton.orchestration.start import SavedStep
    from craton.orchestration.watching import LogLine, View
    from craton.telemetry import RunSummary

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
        from craton.orchestration.watching import settled_summaries
        from craton.telemetry import summarize

        return settled_summaries([summarize(self.directory)])[0]

    def checkpoint(self) -> SavedStep | None:
        """The newest checkpoint that is seen from here."""
        from craton.orchestration.start import newest_checkpoint

        return newest_checkpoint(self.directory)

    def wait(
        self,
        seconds: float | None = None,
        look: Callable[[View], None] | None = None,
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> RunSummary:
        """Return when the run has ended, whatever its end; TimeoutError when that takes longer than `seconds`. `look`
        is called with every look at it, the last one included."""
        from craton.formatting import setting
        from craton.orchestration.watching import wait_for_agents

        try:
            view = self.follow(lambda view: not view.is_moving, seconds, look, look_seconds, self._num_steps())
        except TimeoutError:
            now = self.summary()
            raise TimeoutError(f"{self.name} is {now.state} after {setting(seconds)}, at step {now.step:,}") from None
        wait_for_agents(self.directory)
        return view.summary

    def follow(
        self,
        is_enough: Callable[[View], bool],
        seconds: float | None = None,
        look: Callable[[View], None] | None = None,
        look_seconds: float = LOOK_SECONDS,
        num_steps: int | None = None,
    ) -> View:
        """Look at it until `is_enough`; TimeoutError after `seconds`. `look` is called with every look."""
        from craton.orchestration.watching import Follower

        follower = Follower(self.directory, num_steps)
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            view = follower.look()
            if look is not None:
                look(view)
            if is_enough(view):
                return view
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(look_seconds)

    def stop(
        self, *, now: bool = False, ended_ok: bool = True, look: Callable[[View], None] | None = None
    ) -> RunSummary:
        """Stop it with a checkpoint, or with `now` without one, and wait until it has. `look` is called with every look
        at it while it saves.

        A run that has ended stays as it is, or is a RunEndedError unless `ended_ok`. UnsavedError when its state cannot
        be saved: then it stays up with the state in memory.
        """
        from craton.orchestration import RunEndedError, UnsavedError
        from craton.orchestration.start import kill_run, stop_run
        from craton.orchestration.watching import until_stopped, wait_for_agents
        from craton.telemetry.files import noting_unread

        try:
            kill_run(self.directory) if now else stop_run(self.directory)
        except RunEndedError as ended:
            if not ended_ok:
                raise
            return ended.summary
        for view in until_stopped(self.directory, LOOK_SECONDS) if not now else ():
            if look is not None:
                look(view)
            if view.summary.unsaved:
                raise UnsavedError(f"{self.name} is not stopped: {view.summary.unsaved}", view.summary)
        wait_for_agents(self.directory)
        with noting_unread():  # it has stopped all the same
            return self.summary()

    def resume(
        self,
        *,
        cluster: str | None = None,
        steps: int | None = None,
        on: str | None = None,
        stop_at: str | int | None = None,
        progress: Progress | None = None,
        watch: StartWatch | None = None,
    ) -> Run:
        """Start the next generation from the newest checkpoint, on the same or other nodes; return once it started. A
        run that its scheduler holds is released instead, as it is. `watch` sees every step and may refuse."""
        from craton.api.start_steps import Unwatched, ready_start
        from craton.orchestration.start import RunStart, draft_resumption, release_run, resume_start

        run = Run(RunDirectory(self.path.resolve()))  # what is linked here is called by its own path on other nodes

        def draft(report: Progress | None) -> RunStart:
            return draft_resumption(
                run.directory, cluster=cluster, steps=steps, on=on, stop_at=stop_at, progress=report
            )

        if not release_run(run.directory):
            resume_start(ready_start(draft, watch or Unwatched(progress)))
        return run

    def draft_resize(self, nodes: int) -> Resize:
        """Plan it on another number of nodes; StartError names the nearest numbers that are possible."""
        from craton.orchestration.changes import draft_resize

        return draft_resize(self.directory, nodes)

    def resize(
        self,
        nodes: int | Resize,
        seconds: float | None = None,
        *,
        wait: bool = True,
        asked: Callable[[list[str]], None] | None = None,
    ) -> RunSummary:
        """Go on with another number of nodes, planned before or now, and wait until it does; TimeoutError after
        `seconds`, RunEndedError where it ends first. `asked` is called once the run has its order, with the nodes whose
        agents were started; without `wait` that is all."""
        from craton.formatting import counted, setting
        from craton.orchestration import RunEndedError
        from craton.orchestration.changes import has_resized, resize_run
        from craton.orchestration.watching import Follower

        wanted = self.draft_resize(nodes) if isinstance(nodes, int) else nodes
        number = wanted.size.num_nodes
        since, deadline = time.time(), None if seconds is None else time.monotonic() + seconds
        started = resize_run(self.directory, wanted)
        if asked is not None:
            asked(started)
        if not wait:
            return self.summary()
        follower = Follower(self.directory)
        while not has_resized(self.directory, number, since):
            view = follower.look()
            if not view.is_moving:
                message = f"{self.name} is {view.summary.state}, not on {counted(number, 'node')}"
                raise RunEndedError(f"{message}: {view.summary.message}", view.summary)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} is not on {counted(number, 'node')} after {setting(seconds)}")
            time.sleep(LOOK_SECONDS)
        return follower.look().summary

    def draft_faults(
        self, texts: Sequence[str] = (), *, random: int = 0, seed: int = 0, kinds: Sequence[str] = ()
    ) -> list[InjectedFault]:
        """Faults that can happen in this run as it is now: those of lines such as `kill rank=1@step=40`, and `random`
        ones of these kinds, drawn from a seed."""
        from craton.orchestration.changes import faults_for, random_faults_for

        faults = faults_for(self.directory, texts)
        if random:
            faults += random_faults_for(self.directory, random, seed, **({"kinds": kinds} if kinds else {}))
        return faults

    def inject(self, faults: Sequence[InjectedFault]) -> Path:
        """Break it on purpose; returns the file of the order, which its agents carry out."""
        from craton.orchestration.changes import arm_faults

        return arm_faults(self.directory, faults)

    def draft_removal(self) -> Removal:
        """What `remove` would take away, and what it would leave."""
        from craton.orchestration.changes import plan_removal

        return plan_removal(self.directory)

    def remove(self) -> None:
        """Remove a run that has ended, with its records, logs and checkpoints."""
        from craton.orchestration.changes import remove_run

        remove_run(self.directory)

    def logs(
        self, ranks: Sequence[int] = (), *, last: int | None = None, agents: bool = False, follow: bool = False
    ) -> Iterator[str]:
        """Lines that the ranks printed, or with `agents` the node agents; of each log the `last` ones. With `follow`
        also what they print until the run has ended."""
        return (line.text for line in self.log_lines(ranks, last=last, agents=agents, follow=follow))

    def log_lines(
        self, ranks: Sequence[int] = (), *, last: int | None = None, agents: bool = False, follow: bool = False
    ) -> Iterator[LogLine]:
        """The same lines, each with the rank or agent that printed it."""
        from craton.orchestration.watching import log_lines

        return log_lines(self.directory, ranks, agent=agents, follow=follow, last=last)

    def metrics(self, rank: int = 0) -> Any:
        """What a rank recorded at every step: a pandas data frame with the step as its index where pandas is installed,
        else a dict of arrays, `step` among them."""
        from craton.telemetry import read_table

        return read_table(self.directory, rank)

    def snapshot(self, prometheus: str | None = None) -> Snapshot:
        """What there is to see of it now: its files, its nodes, its scheduler, and a Prometheus, else that of
        $CRATON_PROMETHEUS."""
        from craton.observability.diagnosis.collect import take_snapshot
        from craton.observability.web.sources import prometheus_address

        return take_snapshot(self.directory, prometheus_address(prometheus))

    def why(self, prometheus: str | None = None) -> Verdict:
        """Why it waits, is slow, hangs, is dead or wrong; what `craton why` prints is its `sentence`."""
        from craton.observability.diagnosis import diagnose

        return diagnose(self.snapshot(prometheus))

    def _num_steps(self) -> int | None:
        """Of its job, which knows them before the first step is recorded."""
        from craton.errors import CratonError
        from craton.job import load_job

        try:
            return load_job(self.directory.job_path).steps
        except CratonError:  # a run is followed whatever its job file has become
            return None


def runs(root: Path | str | None = None) -> list[Run]:
    """Every run under CRATON_RUNS, else ./runs, or under another root; the newest first."""
    return [Run(directory) for directory in list_runs(None if root is None else Path(root))]
