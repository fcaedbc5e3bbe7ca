"""What the ranks of a job read of the suites that it evaluates: the suite's own file, that of its problems, reward
models, and the user's functions that verify answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from craton.job.errors import JobError
from craton.job.jobfile import Job
from craton.job.sections.suites import BUILT_IN_SUITES, Suite, load_suite


def files_of_suites(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place of the suite's key and the path of a file or a reward model. Those that a suite names are not
    known if this machine cannot read it."""
    for location, (suite, *_) in job.suites.items():
        if suite in BUILT_IN_SUITES:
            continue
        yield location, str(Path(suite).expanduser())
        if (read := _read(suite)) is None:
            continue
        models = (term.model for term in read.verifiers.values())
        for path in filter(None, (read.data.path, *models)):
            yield location, path


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
