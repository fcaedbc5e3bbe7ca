"""A run from Python: `from craton import load_job, run`, with the checks and the order of `craton run`."""

from __future__ import annotations

from pathlib import Path

from craton.agent.processes import free_port
from craton.job import Job
from craton.orchestration.backends import backend_of
from craton.orchestration.draft import Progress, draft_run, named_job
from craton.orchestration.start.copies import check_copies, copy_names, start_copies
from craton.orchestration.start.roots import linking, root_of
from craton.orchestration.start.runs import check_name_is_free, check_places, prepare_data, start_run
from craton.telemetry import RunDirectory


def run(
    job: Job,
    name: str | None = None,
    *,
    on: str | None = None,
    stop_at: int | None = None,
    root: Path | str | None = None,
    progress: Progress | None = None,
) -> RunDirectory:
    """Plan a job, prepare its data and start its ranks, which outlive this process; returns once they are started.

    Nobody is asked about money: `plan(job).cost` tells it before. `craton.telemetry.summarize(run)` says how it goes,
    `craton.orchestration.wait_for_agents(run, seconds)` waits for its end. Of a job with `run.copies` all are started,
    and NAME-1 comes back; NAME-2, … lie beside it.
    """
    wanted = named_job(job, name)
    folder = Path(root) if root is not None else root_of(wanted, on)
    check_name_is_free(folder, wanted.name)
    draft = draft_run(
        wanted,
        folder / wanted.name,
        on=on,
        stop_at=stop_at,
        job_folder=job.folder,
        port=free_port(),
        progress=progress,
    )
    backend_of(draft.on).check(draft, RunDirectory(folder / wanted.name))
    check_places(draft.job, folder / wanted.name, draft.on)
    has_copies = draft.job.run.copies > 1
    if has_copies:
        check_copies(draft, [folder])
    prepared, _ = prepare_data(draft, progress)
    names = copy_names(prepared) if has_copies else [prepared.job.name]
    with linking(folder / item for item in names):
        return start_copies(prepared, folder)[0] if has_copies else start_run(prepared, folder)
