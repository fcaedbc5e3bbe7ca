"""Read log lines of ranks and agents from the run directory, or from pods whose directory is not visible here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from craton.orchestration.backends import pod_lines
from craton.orchestration.watching.watch import Follower
from craton.telemetry import RunDirectory, RunError
from craton.telemetry.files import open_regular, paths_in

LOOK_SECONDS = 0.2
READ_BYTES = 1 << 20  # read from a log at once
MAX_TAIL_BYTES = 64 << 20  # maximum searched for the last lines
MAX_LINE_BYTES = 1 << 20  # a longer line is printed in parts
_RANK_LINE = re.compile(r"\[rank (\d+)\] (.*)")  # a rank's line in a pod's log


@dataclass(frozen=True)
class LogLine:
    source: str  # rank-00000
    text: str
    end: int = 0  # bytes of the log up to the end of this line
    is_new: bool = False  # printed while following


@dataclass
class Log:
    """A log that is read as it grows, `READ_BYTES` at a time."""

    path: Path
    offset: int = 0  # end of the lines returned so far
    error: str = ""  # why it could not be read, reported once
    _rest: bytes = field(default=b"", repr=False)

    def new_lines(self, is_new: bool) -> Iterator[LogLine]:
        """Yield lines completed since the last call; an incomplete last line waits for its end."""
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                while data := file.read(READ_BYTES):
                    yield from self._split(data, is_new)
                self._rest = b""  # read again, with what follows
                self.error = ""
        except OSError as error:
            if str(error) != self.error:
                self.error = str(error)
                yield LogLine(self.path.stem, f"(this log cannot be read: {error})", self.offset)

    def _split(self, data: bytes, is_new: bool) -> Iterator[LogLine]:
        text = self._rest + data
        end = text.rfind(b"\n") + 1
        if not end and len(text) >= MAX_LINE_BYTES:
            end = len(text)
        for part in text[:end].splitlines(keepends=True):
            self.offset += len(part)
            if part.strip(b"\r\n") or part.endswith(b"\n"):
                for line in part.decode(errors="replace").splitlines() or [""]:
                    yield LogLine(self.path.stem, line, self.offset, is_new)
        self._rest = text[end:]

    def go_to_last(self, number: int) -> None:
        """Seek to the start of the last `number` lines."""
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                begin, num_ends, blocks = size, 0, b""
                while begin > 0 and num_ends <= number and len(blocks) < MAX_TAIL_BYTES:
                    step = min(READ_BYTES, begin)
                    begin -= step
                    file.seek(begin)
                    blocks = file.read(step) + blocks
                    num_ends = blocks.count(b"\n")
                whole = blocks[: blocks.rfind(b"\n") + 1]
                kept = b"".join(whole.splitlines(keepends=True)[-number:]) if number else b""
                self.offset = begin + len(whole) - len(kept)
        except OSError:
            return  # `new_lines` reports the error


def log_lines(
    run: RunDirectory, ranks: Sequence[int] = (), *, agent: bool = False, follow: bool = False, last: int | None = None
) -> Iterator[LogLine]:
    """Yield lines of the ranks, or of the node agents, from the run directory or from its pods; of each log the `last`
    ones. With `follow`, continue until the run has ended."""
    pods = pod_lines(run, follow, last)
    return _file_lines(run, ranks, agent, follow, last) if pods is None else _pod_lines(run, pods, ranks, agent)


def _file_lines(
    run: RunDirectory, ranks: Sequence[int], agent: bool, follow: bool, last: int | None
) -> Iterator[LogLine]:
    """Yield the lines of each log in turn; with `follow`, new lines of any log until the run has ended."""
    follower = Follower(run) if follow else None
    opened: dict[Path, Log] = {}
    for path in log_files(run, ranks, agent):
        opened[path] = Log(path)
        if last is not None:
            opened[path].go_to_last(last)
        yield from opened[path].new_lines(is_new=False)
    goes_on = follow
    while goes_on:
        # Check the state before reading, so that a rank's last lines are read too.
        goes_on = follower is not None and follower.look().is_moving
        for path in log_files(run, ranks, agent):
            yield from opened.setdefault(path, Log(path)).new_lines(is_new=True)
        time.sleep(LOOK_SECONDS if goes_on else 0)


def _pod_lines(
    run: RunDirectory, lines: Iterable[tuple[str, str]], ranks: Sequence[int], agent: bool
) -> Iterator[LogLine]:
    """Yield lines as from files; lines without a rank are the agent's, with the pod as their source."""
    for pod, line in lines:
        match = _RANK_LINE.fullmatch(line)
        if match is None and agent:
            yield LogLine(pod, line)
        elif match is not None and not agent and (not ranks or int(match[1]) in ranks):
            yield LogLine(run.log_path(int(match[1])).stem, match[2])


def log_files(run: RunDirectory, ranks: Sequence[int], agent: bool) -> list[Path]:
    """Return the existing log files; a requested rank without one may start later, or raises RunError."""
    folder = run.path / "logs"
    if agent:
        patterns = ("agent-*.log", "members.log", "slurm-*.out")
        return sorted(path for pattern in patterns for path in paths_in(folder, pattern))
    there = paths_in(folder, "rank-*.log")
    if not ranks:
        return there
    wanted = [run.log_path(number) for number in ranks]
    missing = [number for number, path in zip(ranks, wanted, strict=True) if path not in there]
    if missing and there:
        last = there[-1].stem.removeprefix("rank-").lstrip("0") or "0"
        raise RunError(f"--rank {missing[0]}: {run.name} has no such rank; its ranks are 0 to {last}")
    return [path for path in wanted if path in there]
