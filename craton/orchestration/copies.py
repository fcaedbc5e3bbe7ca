"""Several runs of one job, NAME-1 … NAME-N, handed to Slurm as one array: each finds its number in CRATON_COPY."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from craton.agent import free_port
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.draft import Draft, named_job, nursery_command, python_of, rank_command
from craton.orchestration.errors import SchedulerError, StartError
from craton.orchestration.runs import check_name_is_free
from craton.orchestration.slurm import ScriptOptions, submit_array
from craton.orchestration.snapshot import code_folder, find_code, keep_code
from craton.orchestration.state import write_whole
from craton.telemetry import RunDirectory

COPY = "CRATON_COPY"


def copy_names(draft: Draft) -> list[str]:
    return [f"{draft.job.name}-{number}" for number in range(1, draft.job.run.copies + 1)]


def check_copies(draft: Draft, root: Path) -> None:
    """Refuse copies where there are no arrays, or where one of their names is taken."""
    if draft.on != "slurm":
        raise StartError(
            f"{draft.job.where('run', 'copies')}run.copies is for Slurm, which has arrays of jobs; on {draft.on} start "
            "the job several times, with another --name each"
        )
    for name in copy_names(draft):
        check_name_is_free(root, name)


def start_copies(draft: Draft, root: Path) -> list[RunDirectory]:
    """Make all run directories, then hand them over as one array."""
    check_copies(draft, root)
    code = find_code(draft.job, root)
    copies = [_copy(draft, root, number, name) for number, name in enumerate(copy_names(draft), start=1)]
    runs = [RunDirectory.create(root, copy.job.name) for copy in copies]
    for run, copy in zip(runs, copies, strict=True):
        if code is not None:
            keep_code(code, run)
        for name, text in copy.files().items():
            write_whole(run.path / name, text)
    try:
        number = submit_array(copies[0], runs[0], ScriptOptions(copies=len(copies)))
    except SchedulerError:
        _remove(runs)
        raise
    for index, run in enumerate(runs, start=1):
        write_submission(run, Submission("slurm", f"{number}_{index}"))
    return runs


def _copy(draft: Draft, root: Path, number: int, name: str) -> Draft:
    job = named_job(draft.job, name)
    run, python = root / name, python_of(job, draft.on)
    launch = replace(
        draft.launch,
        command=rank_command(job, run, python),
        nursery=nursery_command(job, run, python),
        env={**draft.launch.env, COPY: str(number)},
        workdir=str(code_folder(run)) if draft.launch.workdir else "",
        master_port=free_port(),
    )
    return replace(draft, job=job, launch=launch)


def _remove(runs: list[RunDirectory]) -> None:
    """Nothing has run: the names are free again."""
    for run in runs:
        shutil.rmtree(run.path)
