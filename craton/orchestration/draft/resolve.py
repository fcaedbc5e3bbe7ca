"""Step 1 of a start: resolve the job's name, the faults to inject and the step to stop at."""

from __future__ import annotations

from collections.abc import Sequence

from craton.job import Job, parse_fault
from craton.job.document import check_name
from craton.orchestration.errors import StartError


def named_job(job: Job, name: str | None) -> Job:
    """Return the job under another name."""
    if name is None:
        return job
    try:
        check_name(name)  # model_copy does not validate
    except ValueError as error:
        raise StartError(f"--name: {error}") from None
    return job.model_copy(update={"name": name})


def with_chaos(job: Job, faults: Sequence[str]) -> Job:
    """Return the job with more faults to inject."""
    if not faults:
        return job
    if not isinstance(job.chaos, tuple):
        raise StartError(f"{job.where('chaos')}the job draws its faults from a seed; pass no others, or list them all")
    for text in faults:
        parse_fault(text)
    return job.model_copy(update={"chaos": (*job.chaos, *faults)})


def stop_step(text: str | int | None, job: Job) -> int | None:
    """Parse a step: `120`, or `60%` of the job's steps."""
    if text is None or isinstance(text, int):
        return text
    number, sign, rest = text.partition("%")
    try:
        if not sign:
            return int(number)
        if rest or job.steps is None:
            raise ValueError
        return round(float(number) / 100 * job.steps)
    except ValueError:
        raise StartError(f"--stop-at {text!r} is not a step; give a step such as 120, or a share such as 60%") from None
