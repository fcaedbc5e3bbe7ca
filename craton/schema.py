"""The version of a run's own formats: `schema` in job.yaml and launch.json.

A document without one is from before it was written, and reads the same.
"""

from __future__ import annotations

from craton.version import VERSION

SCHEMA = 1


def schema_problem(value: object) -> str:
    """Why a document of this schema cannot be read; empty where it can. None: it has none."""
    if value is None or (type(value) is int and value == SCHEMA):
        return ""
    if type(value) is int and value > SCHEMA:
        return (
            f"schema {value} is newer than schema {SCHEMA}, which this Craton ({VERSION}) reads; "
            "use the version of Craton that wrote it, or a newer one"
        )
    return f"schema: {value!r} is not allowed; allowed: {SCHEMA}"
