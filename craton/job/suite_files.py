"""What the ranks of a job read of the suites that it evaluates: the suite's own file, that of its problems, and the
user's functions that verify answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from craton.job.errors import JobError
from craton.job.jobfile import Job
from craton.job.sections.suites import BUILT_IN_SUITES, Suite, load_suite


def files_of_suites(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place of the suite's key and the path of a file. Problems of a suite that this machine cannot read are
    not known."""
    for location, (suite, *_) in job.suites.items():
        if suite in BUILT_IN_SUITES:
            continue
        yield location, str(Path(suite).expanduser())
        read = _read(suite)
        if read is not None and read.data.path is not None:
            yield location, read.data.path


def functions_of_suites(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place of the suite's key and a function that verifies its answers."""
    for location, (suite, *_) in job.suites.items():
        read = _read(suite)
        for term in (*read.reward, *read.verifiers.values()) if read is not None else ():
            if term.python is not None:
                yield location, term.python


def _read(suite: str) -> Suite | None:
    try:
        return load_suite(suite)
    except JobError:
        return None
