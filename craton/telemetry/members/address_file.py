"""Where the servers among a run's members answer, for the ranks of their owner: `member_addresses(run)`.

The file holds API keys, so only the user of the run can read it; a file that others can read is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from craton.telemetry.errors import RunError
from craton.telemetry.members.member_files import ADDRESSES_FILE
from craton.telemetry.rundirectory import MEMBERS_FOLDER, RunDirectory, read_json


@dataclass(frozen=True)
class MemberAddress:
    """A server that is loaded."""

    url: str  # http://127.0.0.1:8000
    api_key: str = ""  # "": it needs none

    def __repr__(self) -> str:
        return f"MemberAddress({self.url!r})"  # no key in a log


def member_addresses(run: RunDirectory) -> dict[str, MemberAddress]:
    """Return member → address of servers that are ready or lack only weights; RunError if others could read keys."""
    path = _path(run)
    with contextlib.suppress(FileNotFoundError):
        if path.stat(follow_symlinks=False).st_mode & 0o077:
            raise RunError(f"{path} holds API keys and is open to other users; run `chmod 600 {path}`")
    return {
        name: MemberAddress(str(entry.get("url", "")), str(entry.get("api_key", "")))
        for name, entry in read_json(path).items()
        if isinstance(entry, dict)
    }


def write_member_addresses(run: RunDirectory, addresses: Mapping[str, MemberAddress]) -> None:
    """Replace the file; no other user can read it at any moment."""
    path = _path(run)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    document = {name: asdict(address) for name, address in addresses.items()}
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _path(run: RunDirectory) -> Path:
    return run.path / MEMBERS_FOLDER / ADDRESSES_FILE
