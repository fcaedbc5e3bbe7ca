"""Copies of one job, runs NAME-1 … NAME-N, submitted to Slurm as one array; CRATON_COPY has each one's number."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from craton.agent.processes import free_port
from craton.orchestration.backend import BACKEND_FILE
from craton.orchestration.draft import (
    COPY,
    Draft,
    code_folder,
    find_code,
    fork_server_command,
    keep_code,
    named_job,
    python_of,
    rank_command,
)
from craton.orchestration.errors import StartError
from craton.orchestration.run_files import write_whole
from craton.orchestration.slurm import SCRIPT_FILE, ScriptOptions, sbatch_script, submit_array
from craton.orchestration.start.checks import check_name_is_free
from craton.telemetry import RunDirectory


def copy_names(draft: Draft) -> list[str]:
    """Return the run names of a job with copies."""
    return [f"{draft.job.name}-{number}" for number in range(1, draft.job.run.copies + 1)]


def check_arrays(draft: Draft) -> None:
    """Refuse copies on backends without job arrays."""
    if draft.on != "slurm":
        raise StartError(
            f"{draft.job.where('run', 'copies')}run.copies needs Slurm's job arrays; on {draft.on} start the job "
            "several times, each with another --name"
        )


def check_copies(draft: Draft, roots: Iterable[Path]) -> None:
    """Refuse copies on backends without job arrays, or if one of their names is taken in one of these folders."""
    check_arrays(draft)
    for root in roots:
        for name in copy_names(draft):
            check_name_is_free(root, name)


def first_copy(draft: Draft, root: Path) -> tuple[RunDirectory, dict[str, str]]:
    """Return the run NAME-1 and its files, including the script of all copies; for `--dry-run`."""
    check_arrays(draft)
    copy = _copy(draft, root, 1, copy_names(draft)[0])
    run = RunDirectory(root / copy.job.name)
    return run, {**copy.files(), SCRIPT_FILE: sbatch_script(copy, run, ScriptOptions(copies=draft.job.run.copies))}


def start_copies(draft: Draft, root: Path) -> list[RunDirectory]:
    """Create all run directories, then submit them as one array."""
    check_copies(draft, [root])
    code = find_code(draft.job, root)
    copies = [_copy(draft, root, number, name) for number, name in enumerate(copy_names(draft), start=1)]
    runs: list[RunDirectory] = []
    try:
        for copy in copies:
            runs.append(run := RunDirectory.create(root, copy.job.name))
            if code is not None:
                keep_code(code, run)
            for name, text in copy.files().items():
                write_whole(run.path / name, text)
        submit_array(copies[0], runs[0], ScriptOptions(copies=len(copies)))
    except BaseException:  # Ctrl-C too
        if not any((run.path / BACKEND_FILE).exists() for run in runs):  # else Slurm may have them
            _remove(runs)
        raise
    return runs


def _copy(draft: Draft, root: Path, number: int, name: str) -> Draft:
    """Return the draft of one copy, which can be resumed as a separate run."""
    job = named_job(draft.job, name)
    job = job.model_copy(update={"run": job.run.model_copy(update={"copies": 1})})
    run, python = root / name, python_of(job, draft.on)
    fork_server = fork_server_command(job, run, python)
    launch = replace(
        draft.launch,
        command=rank_command(job, run, python),
        nursery=fork_server if draft.launch.nursery else [],
        standby=fork_server if draft.launch.standby else [],
        env={**draft.launch.env, COPY: str(number)},
        workdir=str(code_folder(run)) if draft.launch.workdir else "",
        master_port=free_port(),
    )
    return replace(draft, job=job, launch=launch)


def _remove(runs: list[RunDirectory]) -> None:
    """Delete runs that never started, so that their names are free again."""
    for run in runs:
        shutil.rmtree(run.path)
