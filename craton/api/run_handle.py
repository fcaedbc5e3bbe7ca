"""A run from Python: `craton.Run("name")` finds one, `craton.runs()` lists all of them.

A handle holds only the run's directory. The run outlives this process, and any number of handles may refer to it.
Methods import what they need: `craton ps` creates a handle per run and must not load the planner.
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
    """A handle of a run, identified by its directory."""

    def __init__(self, directory: RunDirectory | Path | str) -> None:
        """Find the run: `directory` is a RunDirectory, a run name or a folder."""
        self.directory = directory if isinstance(directory, RunDirectory) else find_run(directory)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def state(self) -> str:
        """The state: waiting, starting, running, stopping, stopped, done, failed or lost."""
        return self.summary().state

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"

    def summary(self) -> RunSummary:
        """Return state, step, loss, measured and planned numbers and the sum of its members, as in `craton ps`."""
        from craton.orchestration.watching import glance_at_members, settled_summaries, with_members_sum
        from craton.telemetry import summarize

        (own,) = settled_summaries([summarize(self.directory)])
        return with_members_sum(self.directory, own, glance_at_members(self.directory))

    def checkpoint(self) -> SavedStep | None:
        """Return the newest checkpoint that is visible from here."""
        from craton.orchestration.start import newest_checkpoint

        return newest_checkpoint(self.directory)

    def wait(
        self,
        seconds: float | None = None,
        look: Callable[[View], None] | None = None,
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> RunSummary:
        """Wait until the run has ended, in any state, and return its summary; TimeoutError after `seconds`.

        `look` is called with every view of the run, including the last one.
        """
        from craton.formatting import setting
        from craton.orchestration.watching import wait_for_agents, wait_for_members

        try:
            view = self.follow(lambda view: not view.is_moving, seconds, look, look_seconds, self._num_steps())
        except TimeoutError:
            now = self.summary()
            raise TimeoutError(f"{self.name} is {now.state} after {setting(seconds)}, at step {now.step:,}") from None
        wait_for_agents(self.directory)
        wait_for_members(self.directory)
        return view.summary

    def follow(
        self,
        is_enough: Callable[[View], bool],
        seconds: float | None = None,
        look: Callable[[View], None] | None = None,
        look_seconds: float = LOOK_SECONDS,
        num_steps: int | None = None,
    ) -> View:
        """Poll the run until `is_enough(view)`; TimeoutError after `seconds`. `look` is called with every view."""
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
        """Stop the run with a checkpoint, or with `now` without one, and wait until it has stopped.

        `look` is called with every view while the run saves. If the run has already ended, return its summary, or raise
        RunEndedError unless `ended_ok`. UnsavedError if the state cannot be saved: the run then keeps it in memory.
        """
        from craton.orchestration import RunEndedError, UnsavedError
        from craton.orchestration.start import kill_run, stop_run
        from craton.orchestration.watching import until_stopped, wait_for_agents, wait_for_members
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
        wait_for_members(self.directory)
        with noting_unread():  # it has stopped anyway
            return self.summary()

    def resume(
        self,
        *,
        cluster: str | None = None,
        steps: int | None = None,
        on: str | None = None,
        share_gpus: bool = False,
        stop_at: str | int | None = None,
        progress: Progress | None = None,
        watch: StartWatch | None = None,
    ) -> Run:
        """Start the next generation from the newest checkpoint, on the same or other nodes; return once it is started.

        A run that its scheduler holds is released unchanged instead. `watch` sees every step and may refuse.
        """
        from craton.api.start_steps import Unwatched, ready_start
        from craton.orchestration.start import RunStart, draft_resumption, release_run, resume_start

        run = Run(RunDirectory(self.path.resolve()))  # other nodes know a linked folder by its real path

        def draft(report: Progress | None) -> RunStart:
            return draft_resumption(
                run.directory,
                cluster=cluster,
                steps=steps,
                on=on,
                share_gpus=share_gpus,
                stop_at=stop_at,
                progress=report,
            )

        if not release_run(run.directory):
            resume_start(ready_start(draft, watch or Unwatched(progress)))
        return run

    def draft_resize(self, nodes: int) -> Resize:
        """Plan the run on another number of nodes; StartError names the nearest possible numbers."""
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
        """Change the number of nodes, planned before or now, and wait until it is done.

        TimeoutError after `seconds`; RunEndedError if the run ends first. `asked` is called once the request is
        written, with the nodes whose agents were started. Without `wait` return then.
        """
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
        """Return faults, checked against the run's current state: parsed from lines such as `kill rank=1@step=40`, and
        `random` faults of these kinds, drawn from a seed."""
        from craton.orchestration.changes import faults_for, random_faults_for

        faults = faults_for(self.directory, texts)
        if random:
            faults += random_faults_for(self.directory, random, seed, **({"kinds": kinds} if kinds else {}))
        return faults

    def inject(self, faults: Sequence[InjectedFault]) -> Path:
        """Inject faults; return the file of the request, which the run's agents execute."""
        from craton.orchestration.changes import arm_faults

        return arm_faults(self.directory, faults)

    def draft_removal(self) -> Removal:
        """Return what `remove` would delete, and what it would keep."""
        from craton.orchestration.changes import plan_removal

        return plan_removal(self.directory)

    def remove(self) -> None:
        """Remove a run that has ended, with its records, logs and checkpoints."""
        from craton.orchestration.changes import remove_run

        remove_run(self.directory)

    def logs(
        self, ranks: Sequence[int] = (), *, last: int | None = None, agents: bool = False, follow: bool = False
    ) -> Iterator[str]:
        """Yield the log lines of the ranks, or with `agents` of the node agents; of each log only the `last` lines.
        With `follow` also yield new lines until the run has ended."""
        return (line.text for line in self.log_lines(ranks, last=last, agents=agents, follow=follow))

    def log_lines(
        self, ranks: Sequence[int] = (), *, last: int | None = None, agents: bool = False, follow: bool = False
    ) -> Iterator[LogLine]:
        """Yield the same lines, each with the rank or agent that printed it."""
        from craton.orchestration.watching import log_lines

        return log_lines(self.directory, ranks, agent=agents, follow=follow, last=last)

    def metrics(self, rank: int = 0) -> Any:
        """Return what a rank recorded at every step: a pandas DataFrame indexed by step if pandas is installed, else a
        dict of arrays that includes `step`."""
        from craton.telemetry import read_table

        return read_table(self.directory, rank)

    def snapshot(self, prometheus: str | None = None) -> Snapshot:
        """Collect the run's current state: its files, nodes, scheduler, and metrics of a Prometheus (default:
        $CRATON_PROMETHEUS)."""
        from craton.observability.diagnosis.collect import take_snapshot
        from craton.observability.web.sources import prometheus_address

        return take_snapshot(self.directory, prometheus_address(prometheus))

    def why(self, prometheus: str | None = None) -> Verdict:
        """Diagnose why the run waits, is slow, hangs, is dead or wrong; `craton why` prints the `sentence`."""
        from craton.observability.diagnosis import diagnose

        return diagnose(self.snapshot(prometheus))

    def _num_steps(self) -> int | None:
        """Return the number of steps in the job file, known before the first step is recorded."""
        from craton.errors import CratonError
        from craton.job import load_job

        try:
            return load_job(self.directory.job_path).steps
        except CratonError:  # follow a run even if its job file is damaged
            return None


def runs(root: Path | str | None = None) -> list[Run]:
    """List every run under `root` (default: CRATON_RUNS, else ./runs), newest first."""
    return [Run(directory) for directory in list_runs(None if root is None else Path(root))]
