"""Names a user gives: of jobs, of environment variables."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_name(value: str) -> bool:
    """Whether a job, and so a folder, may be called this."""
    return _NAME.fullmatch(value) is not None


def _check_name(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"{value!r} is not a name; use up to 63 letters, digits, '.', '_' and '-', e.g. llama-8b")
    return value


def _check_variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of an environment variable")
    return value


Name = Annotated[str, AfterValidator(_check_name)]
Variable = Annotated[str, AfterValidator(_check_variable)]
