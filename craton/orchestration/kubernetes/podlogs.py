"""Copy the ranks' output to the pod's own output, for `kubectl logs` and for `craton logs` from a laptop.

Lines are complete and name their rank. Output from before this pod's start is not repeated.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TextIO

from craton.agent import newest_generation
from craton.telemetry import RunDirectory
from craton.telemetry.files import open_regular, paths_in
from craton.telemetry.members import owner_of

TURN_SECONDS = 0.5
MAX_BYTES = 1 << 20  # read from a log in one turn


class LogCopier:
    """Copy logs while open, and the rest on close."""

    def __init__(self, run: RunDirectory, node: str, out: TextIO) -> None:
        self._run, self._node, self._out = run, node, out
        self._member = f"{run.path.name} " if owner_of(run) else ""
        self._offsets = {path: path.lstat().st_size for path in paths_in(run.path / "logs", "rank-*.log")}
        self._rests: dict[Path, bytes] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_closed, name="logs", daemon=True)

    def __enter__(self) -> LogCopier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _copy_until_closed(self) -> None:
        while not self._closing.wait(TURN_SECONDS):
            self._turn()
        while self._turn():
            pass
        for path, rest in self._rests.items():
            if rest:
                self._print(path, rest)
        self._out.flush()

    def _turn(self) -> bool:
        """Copy new lines; return whether a log had more than was copied."""
        generation = newest_generation(self._run)
        has_more = False
        for rank in generation.ranks_of(self._node) if generation else ():
            path = self._run.log_path(rank)
            with contextlib.suppress(OSError), open_regular(path) as log:
                log.seek(self._offsets.get(path, 0))
                new = log.read(MAX_BYTES)
                self._offsets[path] = log.tell()
                has_more = has_more or len(new) == MAX_BYTES
                *lines, rest = (self._rests.get(path, b"") + new).split(b"\n")
                self._rests[path] = rest
                for line in lines:
                    self._print(path, line)
        self._out.flush()
        return has_more

    def _print(self, path: Path, line: bytes) -> None:
        rank = int(path.stem.removeprefix("rank-"))
        self._out.write(f"[{self._member}rank {rank}] {line.decode(errors='replace')}\n")
