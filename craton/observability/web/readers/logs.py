"""Logs of ranks and agents, in chunks. Only files with the name of a log are opened, and no links."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from craton.telemetry import RunDirectory
from craton.telemetry.files import names_in, open_regular

PIECE_BYTES = 64 << 10
_SOURCE = re.compile(r"(rank-\d{5,}|(agent|keeper|nursery)-[A-Za-z0-9][A-Za-z0-9._-]*)\.log|slurm-[A-Za-z0-9._-]+\.out")


@dataclass(frozen=True)
class LogChunk:
    """A chunk of a log; `end` is the offset of the next one. `rest` is a last line without its end: it is sent again
    with the next chunk, and may be the last output of a killed process."""

    text: str
    rest: str
    begin: int
    end: int
    size: int


def sources(run: RunDirectory) -> list[str]:
    """Return the logs of a run: those of ranks in order, then those of agents."""
    try:
        names = [name for name in names_in(run.path / "logs") if _SOURCE.fullmatch(name)]
    except OSError:
        return []
    return sorted(names, key=lambda name: (not name.startswith("rank-"), len(name), name))


def read_piece(run: RunDirectory, source: str, begin: int | None) -> LogChunk | None:
    """Read from an offset, or the end of the log; None if there is no such log. Only complete lines, unless one is
    longer than a chunk."""
    if _SOURCE.fullmatch(source) is None:
        return None
    try:
        opened = open_regular(run.path / "logs" / source)
    except OSError:
        return None
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - PIECE_BYTES) if begin is None or begin > size else begin
        file.seek(start)
        data = file.read(PIECE_BYTES)
    if begin is None and start > 0:
        cut = data.find(b"\n") + 1
        data, start = data[cut:], start + cut
    whole = data.rfind(b"\n") + 1
    if whole == 0 and len(data) >= PIECE_BYTES:
        whole = len(data)
    is_last = start + len(data) >= size
    text, rest = data[:whole], data[whole:] if is_last else b""
    return LogChunk(
        text.decode("utf-8", errors="replace"), rest.decode("utf-8", errors="replace"), start, start + whole, size
    )
