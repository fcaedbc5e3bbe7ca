"""A resolved job as YAML: what a run keeps, so that it can be read again without the files around it.

Guarantees `parse_job(dump_job(job)) == job`, on any machine and from any folder: paths are absolute, a cluster file is
written out, and every default stands there, so that a later Craton with other defaults still means the same.
"""

from __future__ import annotations

import yaml

from craton.job.document import reads_as_text
from craton.job.jobfile import Job
from craton.schema import SCHEMA

OTHER_LINE_ENDS = "\x85\u2028\u2029"


def dump_job(job: Job) -> str:
    """The whole job, in the order of the job file's keys, with the schema before them."""
    data = {"schema": SCHEMA, **job.model_dump(mode="json", exclude_none=True)}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """PyYAML follows YAML 1.1 and our reader 1.2, so a text is quoted where either would take it for something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True  # the reader refuses aliases


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if any(character in text for character in OTHER_LINE_ENDS):  # outside double quotes they are folded like a space
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if reads_as_text(text) else "'")


_Dumper.add_representer(str, _text)
