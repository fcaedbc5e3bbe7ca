"""What ranks and agents printed, a piece at a time. Only names that logs of a run have are opened, and no links."""

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
    """A stretch of a log; `end` is where the next one begins. `rest` is a last line that has no end yet: it comes again
    with the next piece, and may be all that a process that was killed could say."""

    text: str
    rest: str
    begin: int
    end: int
    size: int


def sources(run: RunDirectory) -> list[str]:
    """The logs of a run: those of ranks in their order, then those of agents."""
    try:
        names = [name for name in names_in(run.path / "logs") if _SOURCE.fullmatch(name)]
    except OSError:
        return []
    return sorted(names, key=lambda name: (not name.startswith("rank-"), len(name), name))


def read_piece(run: RunDirectory, source: str, begin: int | None) -> LogChunk | None:
    """From an offset on, or the end of the log; None where there is no such log. Only whole lines, unless one is longer
    than a piece."""
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
