"""Validation of names: jobs and environment variables."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIALS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE"),
    *("API_KEY", "APIKEY", "ACCESS_KEY", "SECRET_KEY", "PRIVATE_KEY"),
)
_VOCABULARY = tuple(f"{name}_TOKEN" for name in ("PAD", "EOS", "BOS", "UNK", "SEP", "CLS", "MASK", "STOP"))
# Switches (HF_HUB_DISABLE_IMPLICIT_TOKEN=1), dummy keys for servers without authentication (EMPTY), paths, variables.
_NO_CREDENTIAL = re.compile(r"|\d{1,4}|true|false|yes|no|on|off|none|null|empty|dummy|[/.~$<{\[].*", re.IGNORECASE)


def is_name(value: str) -> bool:
    """Return whether this is a valid name of a job, and so of a folder."""
    return _NAME.fullmatch(value) is not None


def is_credential(variable: str, value: str) -> bool:
    """Return whether a variable most likely holds a credential, by its name and value."""
    name = variable.upper()
    return name.endswith(_CREDENTIALS) and not name.endswith(_VOCABULARY) and not _NO_CREDENTIAL.fullmatch(value)


def check_name(value: str) -> str:
    """Return a valid job name; ValueError with the allowed characters otherwise."""
    if not is_name(value):
        shown = value if len(value) <= 63 else f"{value[:60]}…"
        raise ValueError(f"{shown!r} is not a name; use up to 63 letters, digits, '.', '_' and '-', e.g. llama-8b")
    return value


def _check_variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a valid name of an environment variable; use letters, digits and '_', e.g. HF_TOKEN"
        )
    return value


Name = Annotated[str, AfterValidator(check_name)]
Variable = Annotated[str, AfterValidator(_check_variable)]
