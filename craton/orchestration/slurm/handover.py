"""Which job is a run's. A nonce that the run, its script and its job know is written down before sbatch is asked.

So nothing that happens in between loses a run: an answer that never comes, a Ctrl-C, a machine that dies. The job is
found again by its comment, the batch program writes down its own number, and a job of an earlier submission, which a
slow controller may still start, ends at once.
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
TASK = "task"  # of a run that is one of an array
RESTARTS = "restarts"  # how often a job that Slurm holds after a failed launch may be let go
RELEASED = "released"  # and how often it was
NEVER = "never"  # Slurm was asked for the job long enough, and has none
LOOK_UP_SECONDS = 15.0  # that a job is looked for whose submission was not answered
AGAIN_SECONDS = 1.0  # between the first two looks, then twice as long each time
SETTLED_SECONDS = 600.0  # after which a job that Slurm does not show is not looked for any more
REFUSED = "submission failed"  # as opposed to a controller that does not answer


def hand_over(runs: Sequence[RunDirectory], restarts: int, is_array: bool = False) -> list[Submission]:
    """Submits the script in the first of these runs, for all of them. SchedulerError: refused, and all is as it was.
    RunStateError: nobody answered, and the runs stay as they may be started yet."""
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
        hint = "; what was asked for stands under `run:` in the job and `scheduler:` in the cluster file"
        raise SchedulerError(f"{error}{hint if REFUSED in str(error) else ''}") from None
    submissions = {run: replace(record, job=_number(number, record)) for run, record in pending.items()}
    for run, record in submissions.items():
        write_submission(run, record)
    return list(submissions.values())


def looked_up(nonce: str) -> str:
    """The number of the job with this nonce, which a busy controller may show late; empty where there is none."""
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
    """What Slurm calls the job of a submission whose number was not heard; empty where it has none of it."""
    nonce = submission.details.get(NONCE)
    numbers = [job.id.partition("_")[0] for job in jobs if nonce and job.comment.endswith(f":{nonce}")]
    return _number(numbers[-1], submission) if numbers else ""


def unheard_numbers(submissions: Mapping[RunDirectory, Submission]) -> dict[RunDirectory, Submission]:
    """Those of these runs whose number was not heard, with what one question about their users' jobs tells of them: the
    number, or that Slurm never had them. What is found is written down, so that nobody asks again."""
    unheard = {run: item for run, item in submissions.items() if not item.job and NEVER not in item.details}
    if not unheard:
        return {}
    jobs = read_jobs_of([os.getuid(), *(user for run in unheard if (user := _owner(run)) is not None)])
    return {run: _completed(run, submission, jobs) for run, submission in unheard.items()}


def is_fresh(run: RunDirectory, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether the run was handed over so short a time ago that Slurm may still come to know it."""
    try:
        return (
            abs(time.time() - (run.path / BACKEND_FILE).stat().st_mtime) < seconds
        )  # a clock may have gone back since
    except OSError:
        return False


def claim(run: RunDirectory, job: str, nonce: str) -> str:
    """Makes this job the run's own, as the batch program that has begun; or why it is not: the run was submitted again
    since, is another one of the same name, or is gone."""
    submission = read_submission(run)
    own_nonce = submission.details.get(NONCE, "") if _record_text(run) is not None else _script_nonce(run)
    if own_nonce != nonce:
        now = f"it is now job {submission.job}" if submission.on == "slurm" and submission.job else "it was not by this"
        return (
            f"job {job} is not the one that {run.path} was submitted as last ({now}); it ends here and leaves the run "
            "alone"
        )
    if submission.on != "slurm" or submission.job != job:
        own = replace(submission, on="slurm", job=job, details={**submission.details, NONCE: nonce})
        try:
            write_submission(run, own)
        except OSError as error:  # it is known by its comment, too
            print(f"craton: the number {job} cannot be written down: {error}", file=sys.stderr, flush=True)
    return ""


def _completed(run: RunDirectory, submission: Submission, jobs: Iterable[JobRecord]) -> Submission:
    """With the number that sbatch's answer would have told, or that there is none."""
    number = number_of(jobs, submission)
    if not number and is_fresh(run, SETTLED_SECONDS):
        return submission
    never = {} if number else {NEVER: "true"}
    result = replace(submission, job=number, details={**submission.details, **never})
    with contextlib.suppress(OSError):  # somebody else's run, which may only be read
        write_submission(run, result)
    return result


def _kept(runs: Sequence[RunDirectory]) -> str:
    """What is to be done about runs that Slurm may have or not."""
    if len(runs) == 1:
        return (
            "Whether Slurm has the job is not known yet, so the run is kept: `craton ps` shows it when Slurm does; if "
            f"it never does, `craton resume {runs[0].name}` submits it again"
        )
    return (
        f"Whether Slurm has the array is not known yet, so its {len(runs)} runs are kept: `craton ps` shows them when "
        f"Slurm does; if it never does, `craton resume` submits each of them again, {runs[0].name} to {runs[-1].name}, "
        "as a job of its own"
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
