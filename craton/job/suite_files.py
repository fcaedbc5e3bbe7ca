"""The files of the suites that a job evaluates, which its ranks read: the suite's own and that of its problems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from craton.job.errors import JobError
from craton.job.jobfile import Job
from craton.job.sections.suites import BUILT_IN_SUITES, load_suite


def files_of_suites(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place of the suite's key and the path of a file. Problems of a suite that this machine cannot read are
    not known."""
    for location, (suite, *_) in job.suites.items():
        if suite in BUILT_IN_SUITES:
            continue
        yield location, str(Path(suite).expanduser())
        try:
            problems = load_suite(suite).data.path
        except JobError:
            continue
        if problems is not None:
            yield location, problems
