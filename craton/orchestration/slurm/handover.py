"""Submit runs to Slurm and match them with jobs. Run, script and job share a nonce, recorded before sbatch runs.

So no interruption loses a run: a missing response, a Ctrl-C, a crashed machine. The job is found again by its comment,
the batch program records its own job ID, and a job of an earlier submission, which a slow controller may still start,
exits at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from craton.orchestration.backend import BACKEND_FILE, Submission, read_submission, write_submission
from craton.orchestration.errors import NoAnswerError, RunStateError, SchedulerError
from craton.orchestration.slurm.records import JobRecord
from craton.orchestration.slurm.script import SCRIPT_FILE, nonce_of
from craton.orchestration.slurm.tools import ANSWER_SECONDS, read_jobs_of, submit
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_regular_text

NONCE = "nonce"
TASK = "task"  # array task of a run
RESTARTS = "restarts"  # maximum number of releases of a job that Slurm holds after a failed launch
RELEASED = "released"  # releases so far
NEVER = "never"  # Slurm never listed the job
LOOK_UP_SECONDS = 15.0  # lookup of a job whose submission got no response
AGAIN_SECONDS = 1.0  # between the first two lookups, then doubled each time
SETTLED_SECONDS = 600.0  # after which an unlisted job is no longer looked up
REFUSED = "submission failed"  # as opposed to a controller that does not respond


def hand_over(runs: Sequence[RunDirectory], restarts: int, is_array: bool = False) -> list[Submission]:
    """Submit the script in the first of these runs, for all of them. SchedulerError: refused, and everything is
    restored. RunStateError: no response, and the runs are kept, because they may still start."""
    script = runs[0].path / SCRIPT_FILE
    details = {NONCE: nonce_of(read_regular_text(script)), RESTARTS: str(restarts)}
    tasks = [{TASK: str(number)} if is_array else {} for number in range(1, len(runs) + 1)]
    before = {run: _record_text(run) for run in runs}
    pending = {run: Submission("slurm", "", details | task) for run, task in zip(runs, tasks, strict=True)}
    for run, record in pending.items():
        write_submission(run, record)
    try:
        number = submit(["sbatch", "--parsable", str(script)])
    except NoAnswerError as error:
        number = looked_up(details[NONCE])
        if not number:
            raise RunStateError(f"{error}. {_kept(runs)}") from None
    except SchedulerError as error:
        for run, text in before.items():
            _restore(run, text)
        hint = "; the requested values are under `run:` in the job and `scheduler:` in the cluster file"
        raise SchedulerError(f"{error}{hint if REFUSED in str(error) else ''}") from None
    submissions = {run: replace(record, job=_number(number, record)) for run, record in pending.items()}
    for run, record in submissions.items():
        write_submission(run, record)
    return list(submissions.values())


def looked_up(nonce: str) -> str:
    """Return the ID of the job with this nonce, which a busy controller may list late; empty if there is none."""
    deadline, pause = time.monotonic() + LOOK_UP_SECONDS, AGAIN_SECONDS
    while True:
        with contextlib.suppress(SchedulerError):
            if number := number_of(read_jobs_of([os.getuid()]), Submission("slurm", "", {NONCE: nonce})):
                return number
        if time.monotonic() + pause > deadline:
            return ""
        time.sleep(pause)
        pause *= 2


def number_of(jobs: Iterable[JobRecord], submission: Submission) -> str:
    """Return the ID of a submission's job, by its nonce; empty if there is none."""
    nonce = submission.details.get(NONCE)
    numbers = [job.id.partition("_")[0] for job in jobs if nonce and job.comment.endswith(f":{nonce}")]
    return _number(numbers[-1], submission) if numbers else ""


def unheard_numbers(submissions: Mapping[RunDirectory, Submission]) -> dict[RunDirectory, Submission]:
    """Return the runs without a job ID, resolved by one query of their users' jobs: the ID, or that Slurm never
    received them. The result is recorded, so that it is not queried again."""
    unheard = {run: item for run, item in submissions.items() if not item.job and NEVER not in item.details}
    if not unheard:
        return {}
    jobs = read_jobs_of([os.getuid(), *(user for run in unheard if (user := _owner(run)) is not None)])
    return {run: _completed(run, submission, jobs) for run, submission in unheard.items()}


def is_fresh(run: RunDirectory, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether the run was submitted so recently that Slurm may still list it."""
    try:
        return (
            abs(time.time() - (run.path / BACKEND_FILE).stat().st_mtime) < seconds
        )  # the clock may have been set back
    except OSError:
        return False


def claim(run: RunDirectory, job: str, nonce: str) -> str:
    """Record this job as the run's own, from its batch program. Return why not if the run was submitted again since, is
    another one of the same name, or is gone; else empty."""
    submission = read_submission(run)
    own_nonce = submission.details.get(NONCE, "") if _record_text(run) is not None else _script_nonce(run)
    if own_nonce != nonce:
        now = f"now job {submission.job}" if submission.on == "slurm" and submission.job else "not by this submission"
        return (
            f"job {job} is not the latest submission of {run.path} ({now}); it exits here and leaves the run unchanged"
        )
    if submission.on != "slurm" or submission.job != job:
        own = replace(submission, on="slurm", job=job, details={**submission.details, NONCE: nonce})
        try:
            write_submission(run, own)
        except OSError as error:  # its comment identifies it too
            print(f"craton: the job ID {job} cannot be recorded: {error}", file=sys.stderr, flush=True)
    return ""


def _completed(run: RunDirectory, submission: Submission, jobs: Iterable[JobRecord]) -> Submission:
    """Complete a submission with its job ID, or record that Slurm never received it."""
    number = number_of(jobs, submission)
    if not number and is_fresh(run, SETTLED_SECONDS):
        return submission
    never = {} if number else {NEVER: "true"}
    result = replace(submission, job=number, details={**submission.details, **never})
    with contextlib.suppress(OSError):  # another user's run, which is read-only
        write_submission(run, result)
    return result


def _kept(runs: Sequence[RunDirectory]) -> str:
    """Say what to do about runs that Slurm may or may not have."""
    if len(runs) == 1:
        return (
            "It is unknown whether Slurm has the job, so the run is kept: `craton ps` shows it once Slurm lists it; if "
            f"it never does, `craton resume {runs[0].name}` submits it again"
        )
    return (
        f"It is unknown whether Slurm has the array, so its {len(runs)} runs are kept: `craton ps` shows them once "
        f"Slurm lists it; if it never does, `craton resume` submits each of them ({runs[0].name} to {runs[-1].name}) "
        "again as a separate job"
    )


def _owner(run: RunDirectory) -> int | None:
    try:
        return (run.path / BACKEND_FILE).stat().st_uid
    except OSError:
        return None


def _number(job: str, submission: Submission) -> str:
    task = submission.details.get(TASK)
    return f"{job}_{task}" if task else job


def _script_nonce(run: RunDirectory) -> str:
    try:
        return nonce_of(read_regular_text(run.path / SCRIPT_FILE))
    except OSError:
        return ""


def _record_text(run: RunDirectory) -> str | None:
    try:
        return read_regular_text(run.path / BACKEND_FILE)
    except OSError:
        return None


def _restore(run: RunDirectory, text: str | None) -> None:
    path = run.path / BACKEND_FILE
    if text is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(text, encoding="utf-8")
