"""A resolved job as YAML, stored in every run, so that it can be read without the original files.

Guarantees `parse_job(dump_job(job)) == job` on any machine and from any folder: paths are absolute, a cluster file is
inlined, and every default is written out, so that a later Craton with other defaults reads the same job.
"""

from __future__ import annotations

from typing import Any

from craton.job.document import reads_as_text
from craton.job.jobfile import Job
from craton.schema import SCHEMA
from craton.yaml_text import to_yaml

OTHER_LINE_ENDS = "\x85\u2028\u2029"


def dump_job(job: Job) -> str:
    """Return the whole job as YAML, in the order of the job file's keys, with the schema first."""
    data = {"schema": SCHEMA, **job_data(job)}
    return to_yaml(data, indent_lists=False, allow_unicode=True, text_style=_text_style)


def job_data(job: Job) -> dict[str, Any]:
    """Return the whole job as plain data; the job that trains its weights is inlined, with the run that did so."""
    data = job.model_dump(mode="json", exclude_none=True)
    if job.weights_job is not None:
        run = {} if job.trained_run is None else {"run": str(job.trained_run)}
        data["model"] = {"job": job_data(job.weights_job), **run}
    return data


def _text_style(text: str) -> str | None:
    """Return the quote style: PyYAML follows YAML 1.1, our reader 1.2; quote what either would not read as text."""
    if any(character in text for character in OTHER_LINE_ENDS):  # outside double quotes they are folded into a space
        return '"'
    return None if reads_as_text(text) else "'"
