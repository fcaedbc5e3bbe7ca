"""A resolved job as YAML: what a run keeps, so that it can be read again without the files around it.

Guarantees `parse_job(dump_job(job)) == job`, on any machine and from any folder: paths are absolute, a cluster file is
written out, and every default stands there, so that a later Craton with other defaults still means the same.
"""

from __future__ import annotations

from craton.job.document import reads_as_text
from craton.job.jobfile import Job
from craton.schema import SCHEMA
from craton.yaml_text import to_yaml

OTHER_LINE_ENDS = "\x85\u2028\u2029"


def dump_job(job: Job) -> str:
    """The whole job, in the order of the job file's keys, with the schema before them."""
    data = {"schema": SCHEMA, **job.model_dump(mode="json", exclude_none=True)}
    return to_yaml(data, indent_lists=False, allow_unicode=True, text_style=_text_style)


def _text_style(text: str) -> str | None:
    """PyYAML follows YAML 1.1 and our reader 1.2, so a text is quoted where either would take it for something else."""
    if any(character in text for character in OTHER_LINE_ENDS):  # outside double quotes they are folded like a space
        return '"'
    return None if reads_as_text(text) else "'"
