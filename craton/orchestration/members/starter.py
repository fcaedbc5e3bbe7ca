"""Start or resume members, one at a time, in a process of its own: `python -m craton.orchestration.members RUN
--starter`.

Planning takes memory and may fail, and preparing data may take minutes; the manager meanwhile watches the others. A
start sees only the GPUs of the member's share. A start that was killed half-way leaves a directory without a launch,
which is removed; a member with a launch is resumed from its newest checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import sys
from dataclasses import replace

from craton.agent.processes import free_port
from craton.errors import CratonError
from craton.job import load_job, parse_job
from craton.orchestration.draft import draft_run
from craton.orchestration.errors import StartError
from craton.orchestration.kubernetes.members import share_cache
from craton.orchestration.local import starting_members
from craton.orchestration.machine_share import machine_share
from craton.orchestration.member_places import member_place
from craton.orchestration.start import (
    RunStart,
    check_start,
    draft_resumption,
    newest_checkpoint,
    prepare_start,
    resume_start,
    start_run,
)
from craton.orchestration.watching import GOES_ON, standing_of
from craton.telemetry import RunDirectory
from craton.telemetry.files import STORAGE_ERRORS, read_regular_text
from craton.telemetry.members import JOBS_FOLDER, MEMBERS_FOLDER, read_members

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOCK_SECONDS = 600.0  # that another start of a member may take


def start_members(owner: RunDirectory) -> None:
    """Start every member whose name is on standard input, until its end; answer each with a line of JSON."""
    _end_with_manager()
    share_cache(owner)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a start prints goes to the manager's log
    while name := sys.stdin.readline().strip():
        refusal = ""
        try:
            start_member(owner, name)
        except (CratonError, OSError) as error:
            if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
                raise  # a full disk may be free at the next try
            refusal = " ".join(str(error).split())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(json.dumps({"refusal": refusal}), file=answers, flush=True)


def start_member(owner: RunDirectory, name: str) -> None:
    """Start a member, or resume it where it was; StartError and RunError say why that is impossible."""
    run = RunDirectory(owner.path / MEMBERS_FOLDER / name)
    with starting_members(owner, LOCK_SECONDS):
        if run.launch_path.exists() and run.job_path.exists():
            _resume(run, member_place(owner).on)
        else:
            _remove_leftovers(run)
            _start(owner, run)


def _start(owner: RunDirectory, run: RunDirectory) -> None:
    spec = read_members(owner).member(run.path.name)
    if spec is None:
        raise StartError(f"{owner.name} has no member {run.path.name} in its members.json")
    path = owner.path / JOBS_FOLDER / f"{run.path.name}.yaml"
    job = parse_job(read_regular_text(path), str(path), spec.folder or ".")
    with machine_share(run) as share:
        draft = draft_run(job, run.path, on=member_place(owner).on, job_folder=spec.folder or ".", port=free_port())
        start = RunStart(replace(draft, launch=replace(share.divide(draft.launch), owner=str(owner.path))), run)
        check_start(start)
        start, _ = prepare_start(start)
        _must_end()
        start_run(start.draft, run.path.parent)


def _resume(run: RunDirectory, on: str) -> None:
    if standing_of(run).condition in GOES_ON:  # another command was faster
        return
    job = load_job(run.job_path)
    saved = newest_checkpoint(run, job)
    if saved is not None and job.steps is not None and saved.step >= job.steps:
        run.mark("DONE")  # its agents were lost after the last save
        return
    start, _ = prepare_start(draft_resumption(run, on=on))
    _must_end()
    resume_start(start)


def _end_with_manager() -> None:
    """Let the kernel send SIGTERM when the manager ends: its successor starts this member again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _must_end() -> None:
    """From now on, the start runs to its end: an agent whose start is not recorded could not be stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _remove_leftovers(run: RunDirectory) -> None:
    if run.path.exists():
        aside = run.path.with_name(f".{run.path.name}.{secrets.token_hex(4)}")
        os.rename(run.path, aside)
        shutil.rmtree(aside)
