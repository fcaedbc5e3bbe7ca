"""The version of a run's file formats: `schema` in job.yaml and launch.json.

A document without `schema` is older than the field and is read the same way.
"""

from __future__ import annotations

from craton.version import VERSION

SCHEMA = 1


def schema_problem(value: object) -> str:
    """Return why a document of this schema cannot be read; "" if it can. None: the document has no schema."""
    if value is None or (type(value) is int and value == SCHEMA):
        return ""
    if type(value) is int and value > SCHEMA:
        return (
            f"schema {value} is newer than schema {SCHEMA}, which this Craton ({VERSION}) reads; "
            "use the version of Craton that wrote it, or a newer one"
        )
    return f"schema: {value!r} is not allowed; allowed: {SCHEMA}"
