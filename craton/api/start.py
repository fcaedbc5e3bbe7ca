"""`craton.run(job)` starts a run and returns its handle; `preview(job)` shows what that would do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from craton.api.run_handle import Run
from craton.api.start_steps import StartWatch, Unwatched, ready_start
from craton.job import Job, load_job
from craton.orchestration.draft import Progress
from craton.orchestration.draft.members import Members
from craton.orchestration.start import RunStart, draft_start, submit_start


def run(
    job: Job | Path | str,
    name: str | None = None,
    *,
    on: str | None = None,
    share_gpus: bool = False,
    stop_at: str | int | None = None,
    chaos: Sequence[str] = (),
    root: Path | str | None = None,
    progress: Progress | None = None,
    watch: StartWatch | None = None,
    members: Members | None = None,
) -> Run:
    """Plan a job, prepare its data and start its ranks; return once they are started. The ranks outlive this process.

    `job` is a job or the path of a job file; `share_gpus` sets its `run.share_gpus`. `run` does not ask about the cost:
    `plan(job).cost` predicts it, and a `watch` sees every step and may refuse. For a job with `run.copies` all copies
    are started; the handle is that of NAME-1, and NAME-2, … are next to it. The run owns `members`: it starts, watches,
    restarts and stops them.
    """
    folder = None if root is None else Path(root)

    def draft(report: Progress | None) -> RunStart:
        return draft_start(
            _loaded(job),
            name,
            on=on,
            share_gpus=share_gpus,
            chaos=chaos,
            stop_at=stop_at,
            root=folder,
            progress=report,
            members=members,
        )

    return Run(submit_start(ready_start(draft, watch or Unwatched(progress)))[0])


def preview(
    job: Job | Path | str,
    name: str | None = None,
    *,
    on: str | None = None,
    share_gpus: bool = False,
    stop_at: str | int | None = None,
    chaos: Sequence[str] = (),
    progress: Progress | None = None,
    members: Members | None = None,
) -> RunStart:
    """Return what `run` would write and start; change nothing. The name may already be in use."""
    return draft_start(
        _loaded(job),
        name,
        on=on,
        share_gpus=share_gpus,
        chaos=chaos,
        stop_at=stop_at,
        progress=progress,
        is_dry=True,
        members=members,
    )


def _loaded(job: Job | Path | str) -> Job:
    return job if isinstance(job, Job) else load_job(job)
