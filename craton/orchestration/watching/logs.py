"""Lines that ranks and agents printed: read from the run directory, or from pods whose directory is not seen here."""

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
READ_BYTES = 1 << 20  # of a log at once
MAX_TAIL_BYTES = 64 << 20  # searched for the last lines
MAX_LINE_BYTES = 1 << 20  # a longer line is printed in parts
_RANK_LINE = re.compile(r"\[rank (\d+)\] (.*)")  # as a pod prints what its ranks do


@dataclass(frozen=True)
class LogLine:
    source: str  # rank-00000
    text: str
    end: int = 0  # bytes of the log up to the end of this line
    is_new: bool = False  # printed while it was followed


@dataclass
class Log:
    """A log that is read as it grows, `READ_BYTES` at a time, however long it is."""

    path: Path
    offset: int = 0  # up to which lines were given
    error: str = ""  # why it could not be read, told once
    _rest: bytes = field(default=b"", repr=False)

    def new_lines(self, is_new: bool) -> Iterator[LogLine]:
        """The lines that have ended since the last call; a last line without its end waits until it has one."""
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
        """Go to where the last `number` lines begin."""
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
            return  # `new_lines` says why


def log_lines(
    run: RunDirectory, ranks: Sequence[int] = (), *, agent: bool = False, follow: bool = False, last: int | None = None
) -> Iterator[LogLine]:
    """Lines of the ranks, or of the node agents, from the run directory or from the pods that have it; of each log the
    `last` ones. With `follow` also what is printed until the run has ended."""
    pods = pod_lines(run, follow, last)
    return _file_lines(run, ranks, agent, follow, last) if pods is None else _pod_lines(run, pods, ranks, agent)


def _file_lines(
    run: RunDirectory, ranks: Sequence[int], agent: bool, follow: bool, last: int | None
) -> Iterator[LogLine]:
    """The lines of each log in turn, and when following what is added to any of them until the run has ended."""
    follower = Follower(run) if follow else None
    opened: dict[Path, Log] = {}
    for path in log_files(run, ranks, agent):
        opened[path] = Log(path)
        if last is not None:
            opened[path].go_to_last(last)
        yield from opened[path].new_lines(is_new=False)
    goes_on = follow
    while goes_on:
        # Looked at before reading, so that what a rank printed last is read too.
        goes_on = follower is not None and follower.look().is_moving
        for path in log_files(run, ranks, agent):
            yield from opened.setdefault(path, Log(path)).new_lines(is_new=True)
        time.sleep(LOOK_SECONDS if goes_on else 0)


def _pod_lines(
    run: RunDirectory, lines: Iterable[tuple[str, str]], ranks: Sequence[int], agent: bool
) -> Iterator[LogLine]:
    """Lines as the files would give them; what is no rank's is the agent's, and its source the pod."""
    for pod, line in lines:
        match = _RANK_LINE.fullmatch(line)
        if match is None and agent:
            yield LogLine(pod, line)
        elif match is not None and not agent and (not ranks or int(match[1]) in ranks):
            yield LogLine(run.log_path(int(match[1])).stem, match[2])


def log_files(run: RunDirectory, ranks: Sequence[int], agent: bool) -> list[Path]:
    """The log files there are; a rank that is asked for and has none yet comes later, or is a mistake."""
    folder = run.path / "logs"
    if agent:
        return sorted([*paths_in(folder, "agent-*.log"), *paths_in(folder, "slurm-*.out")])
    there = paths_in(folder, "rank-*.log")
    if not ranks:
        return there
    wanted = [run.log_path(number) for number in ranks]
    missing = [number for number, path in zip(ranks, wanted, strict=True) if path not in there]
    if missing and there:
        last = there[-1].stem.removeprefix("rank-").lstrip("0") or "0"
        raise RunError(f"--rank {missing[0]}: {run.name} has no such rank; its ranks are 0 to {last}")
    return [path for path in wanted if path in there]
