"""Find and read a suite: a YAML file, or one that is built in."""

from __future__ import annotations

from pathlib import Path

from craton.job.document import parse_section, read_document
from craton.job.errors import JobError
from craton.job.sections.suites.suite import Suite
from craton.nearest import did_you_mean

_FOLDER = Path(__file__).with_name("builtin")
BUILT_IN_SUITES = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


class SuiteError(JobError):
    """There is no such suite."""


def load_suite(suite: str) -> Suite:
    """Read and check a suite by its path, or by its name if it is built in."""
    if suite in BUILT_IN_SUITES:
        return parse_section(Suite, read_document(_FOLDER / f"{suite}.yaml"))
    path = Path(suite).expanduser()
    if not path.is_file():
        near = did_you_mean(path.stem, BUILT_IN_SUITES)
        raise SuiteError(
            f"{suite!r} is not a suite: there is no such file, and none of this name is built in; built in: "
            f"{', '.join(BUILT_IN_SUITES)}{near}"
        )
    return parse_section(Suite, read_document(path))


def suite_name(suite: str) -> str:
    """Return what a suite is called in the names of runs."""
    return suite if suite in BUILT_IN_SUITES else Path(suite).stem
