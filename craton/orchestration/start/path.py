"""The path from a job to its started runs, for the command line and for Python alike.

resolve → choose backend → check → plan → draft (`craton.orchestration.draft`) → submit. `draft_start` drafts without
side effects; `check_start` checks the backend and storage; `submit_start` writes and starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from craton.agent.processes import free_port
from craton.job import Job
from craton.orchestration.backend import read_submission
from craton.orchestration.backends import backend_of
from craton.orchestration.draft import Draft, Progress, draft_run, named_job, stop_step, with_chaos
from craton.orchestration.draft.members import Members
from craton.orchestration.errors import RunStateError
from craton.orchestration.machine_share import machine_share
from craton.orchestration.start.checks import (
    check_name_is_free,
    check_owner,
    check_places,
)
from craton.orchestration.start.copies import check_copies, copy_names, start_copies
from craton.orchestration.start.prepare import prepare_data
from craton.orchestration.start.roots import linking, root_of
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.start.submit import start_run
from craton.telemetry import RunDirectory, runs_root
from craton.telemetry.members import read_members


@dataclass(frozen=True)
class RunStart:
    """A job that is about to start."""

    draft: Draft
    run: RunDirectory  # to be created or resumed; a renamed directory differs from its job's name
    resumes: bool = False

    @property
    def root(self) -> Path:
        return self.run.path.parent

    @property
    def runs(self) -> list[RunDirectory]:
        """The run, or all copies of it."""
        names = copy_names(self.draft) if self.draft.job.run.copies > 1 and not self.resumes else [self.run.path.name]
        return [RunDirectory(self.root / name) for name in names]

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders in which its name must be free: a run elsewhere is linked into the folder that `ps` reads."""
        return tuple(dict.fromkeys((self.root, runs_root())))


def draft_start(
    job: Job,
    name: str | None = None,
    *,
    on: str | None = None,
    share_gpus: bool = False,
    chaos: Sequence[str] = (),
    stop_at: str | int | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
    is_dry: bool = False,
    members: Members | None = None,
) -> RunStart:
    """Resolve a job, choose its backend, check it, plan it and draft its processes. `is_dry`: its name may be taken.
    The run will own `members`."""
    wanted = with_chaos(named_job(job.with_shared_gpus(on) if share_gpus else job, name), chaos)
    folder = root if root is not None else root_of(wanted, on)
    if not is_dry:
        for place in (folder,) if root is not None else dict.fromkeys((folder, runs_root())):
            check_name_is_free(place, wanted.name)
    draft = draft_run(
        wanted,
        folder / wanted.name,
        on=on,
        stop_at=stop_step(stop_at, wanted),
        job_folder=job.folder,
        port=free_port(),
        progress=progress,
        is_dry=is_dry,
        members=members,
    )
    return RunStart(draft, RunDirectory(folder / wanted.name))


def check_start(start: RunStart) -> None:
    """Refuse a start that its backend, its copies or its storage do not allow."""
    draft = start.draft
    backend_of(draft.on).check(draft, start.run)
    if draft.job.run.copies > 1 and not start.resumes:
        check_copies(draft, start.roots)
    check_places(draft.job, start.run.path, draft.on)


def prepare_start(start: RunStart, progress: Progress | None = None) -> tuple[RunStart, dict[str, int]]:
    """Prepare the data; return the start with it, and the number of tokens of each path."""
    draft, tokens = prepare_data(start.draft, progress)
    return replace(start, draft=draft), tokens


def submit_start(start: RunStart) -> list[RunDirectory]:
    """Start the run, or all copies of it; they outlive this process."""
    draft, root = start.draft, start.root
    with linking(run.path for run in start.runs):
        return start_copies(draft, root) if draft.job.run.copies > 1 else [start_run(draft, root)]


def draft_resumption(
    run: RunDirectory,
    *,
    cluster: str | None = None,
    steps: int | None = None,
    on: str | None = None,
    share_gpus: bool = False,
    stop_at: str | int | None = None,
    progress: Progress | None = None,
) -> RunStart:
    """Draft the next generation of a run, like a start."""
    check_owner(run)
    if read_members(run).purpose == "sweep" and not (cluster is None and steps is None):
        option = "--steps" if cluster is None else "--cluster"
        raise RunStateError(
            f"{run.name} is a sweep, and {option} is for one run; use it with a member: `craton resume {run.name}/NAME`"
        )
    job = resumed_job(run, cluster, steps)
    if share_gpus:
        job = job.with_shared_gpus(on or read_submission(run).on)
    with machine_share(run) as share:
        draft = draft_resume(run, job, on=on, stop_at=stop_step(stop_at, job), progress=progress)
    return RunStart(replace(draft, launch=share.divide(draft.launch)), run, resumes=True)


def resume_start(start: RunStart) -> RunDirectory:
    """Start the next generation of an existing run."""
    with machine_share(start.run):
        resume_run(start.run, start.draft)
    return start.run
