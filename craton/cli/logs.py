"""`craton logs RUN`: what the ranks printed, and with `--agent` what the node agents said. Of a run that has ended
before any rank began it is the agents', which say why.

Read from the run directory, or from the pods of a run whose directory is not seen here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.telemetry import RunDirectory

LOOK_SECONDS = 0.2
FOLLOW_LINES = 20  # of what was there before, when following
READ_BYTES = 1 << 20  # of a log at once
MAX_TAIL_BYTES = 64 << 20  # searched for the last lines
MAX_LINE_BYTES = 1 << 20  # a longer line is printed in parts
_RANK_LINE = re.compile(r"\[rank (\d+)\] (.*)")  # as a pod prints what its ranks do


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="The last lines, then new ones until the run ends.")
    ] = False,
    number: Annotated[
        int | None,
        typer.Option(
            "-n", "--number", min=0, metavar="N", help="Only the last N lines of each log.", show_default=False
        ),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="The time before each line, to a second, as the agents saw it.")
    ] = False,
    rank: Annotated[str, typer.Option(help="Only these ranks, e.g. 0,7.", show_default=False)] = "",
    agent: Annotated[bool, typer.Option("--agent", help="The node agents instead of the ranks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print the logs of a run. Ctrl-C leaves the view and not the run."""
    import json
    import sys

    from craton.orchestration import pod_lines
    from craton.orchestration.watching import standing_of
    from craton.printable import printable, printable_line
    from craton.telemetry import RunError, find_run

    directory = find_run(run)
    ranks = _ranks(rank)
    last = number if number is not None else FOLLOW_LINES if follow else None
    pods = pod_lines(directory, follow, last)
    if pods is not None and timestamps:
        raise RunError(
            f"--timestamps: the logs of {directory.name} are in its pods, whose times `kubectl logs --timestamps` "
            "prints; leave out --timestamps"
        )
    if pods is not None or not _files(directory, ranks, agent):
        standing = standing_of(directory)
        has_ended = standing.condition == "ended" or directory.has("FATAL")
        if standing.condition == "waiting":
            print(f"{directory.name} waits: {standing.sentence}", file=sys.stderr)
        elif pods is None and has_ended and not agent and _files(directory, [], agent=True):
            print(f"{directory.name} has ended before a rank printed anything; this is of its agents:", file=sys.stderr)
            agent = True
        elif pods is None and has_ended:
            print(
                f"{directory.name} has ended and left no logs; `craton why {directory.name}` tells more",
                file=sys.stderr,
            )
        elif pods is None and not follow:
            print(
                f"{directory.name} has no logs yet; `craton logs {directory.name} -f` waits for them", file=sys.stderr
            )
    alone = not agent and len(ranks) == 1
    clock = _Clock(directory) if timestamps else None
    lines = _lines(directory, ranks, agent, follow, last) if pods is None else _of_pods(directory, pods, ranks, agent)
    try:
        for line in lines:
            moment = clock.moment(line) if clock else None
            if as_json:
                stamp = {"time": moment} if timestamps else {}
                print(json.dumps({"source": line.source, **stamp, "line": line.text}), flush=follow)
                continue
            words = [_stamp(moment)] if timestamps else []
            words += [] if alone else [printable(line.source)]
            print("  ".join([*words, printable_line(line.text)]), flush=follow)
    except KeyboardInterrupt:
        print(f"\nleft the view; `craton stop {directory.name}` stops the run with a checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


@dataclass(frozen=True)
class _Line:
    source: str  # rank-00000
    text: str
    end: int = 0  # bytes of the log up to the end of this line
    is_new: bool = False  # printed while it was followed


@dataclass
class _Log:
    """A log that is read as it grows, `READ_BYTES` at a time, however long it is."""

    path: Path
    offset: int = 0  # up to which lines were given
    error: str = ""  # why it could not be read, told once
    _rest: bytes = field(default=b"", repr=False)

    def new_lines(self, is_new: bool) -> Iterator[_Line]:
        """The lines that have ended since the last call; a last line without its end waits until it has one."""
        from craton.telemetry.files import open_regular

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
                yield _Line(self.path.stem, f"(this log cannot be read: {error})", self.offset)

    def _split(self, data: bytes, is_new: bool) -> Iterator[_Line]:
        text = self._rest + data
        end = text.rfind(b"\n") + 1
        if not end and len(text) >= MAX_LINE_BYTES:
            end = len(text)
        for part in text[:end].splitlines(keepends=True):
            self.offset += len(part)
            if part.strip(b"\r\n") or part.endswith(b"\n"):
                for line in part.decode(errors="replace").splitlines() or [""]:
                    yield _Line(self.path.stem, line, self.offset, is_new)
        self._rest = text[end:]

    def go_to_last(self, number: int) -> None:
        """Go to where the last `number` lines begin."""
        from craton.telemetry.files import open_regular

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


class _Clock:
    """When a line was printed: as its agent noted it, or now where it came while it was followed."""

    def __init__(self, run: RunDirectory) -> None:
        from craton.telemetry.node import LogClock

        self._clock = LogClock(run)

    def moment(self, line: _Line) -> float | None:
        return time.time() if line.is_new else self._clock.printed_at(line.source, line.end)


def _stamp(moment: float | None) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S") if moment is not None else " " * 19


def _lines(run: RunDirectory, ranks: list[int], agent: bool, follow: bool, last: int | None) -> Iterator[_Line]:
    """The lines of each log in turn, and when following what is added to any of them until the run has ended."""
    from craton.orchestration.watching import Follower

    follower = Follower(run) if follow else None
    opened: dict[Path, _Log] = {}
    for path in _files(run, ranks, agent):
        opened[path] = _Log(path)
        if last is not None:
            opened[path].go_to_last(last)
        yield from opened[path].new_lines(is_new=False)
    goes_on = follow
    while goes_on:
        # Looked at before reading, so that what a rank printed last is read too.
        goes_on = follower is not None and follower.look().is_moving
        for path in _files(run, ranks, agent):
            yield from opened.setdefault(path, _Log(path)).new_lines(is_new=True)
        time.sleep(LOOK_SECONDS if goes_on else 0)


def _of_pods(run: RunDirectory, lines: Iterable[tuple[str, str]], ranks: list[int], agent: bool) -> Iterator[_Line]:
    """Lines as the files would give them; what is no rank's is the agent's, and its source the pod."""
    for pod, line in lines:
        match = _RANK_LINE.fullmatch(line)
        if match is None and agent:
            yield _Line(pod, line)
        elif match is not None and not agent and (not ranks or int(match[1]) in ranks):
            yield _Line(run.log_path(int(match[1])).stem, match[2])


def _files(run: RunDirectory, ranks: list[int], agent: bool) -> list[Path]:
    """The log files there are; a rank that is asked for and has none yet comes later, or is a mistake."""
    from craton.telemetry.files import paths_in

    folder = run.path / "logs"
    if agent:
        return sorted([*paths_in(folder, "agent-*.log"), *paths_in(folder, "slurm-*.out")])
    there = paths_in(folder, "rank-*.log")
    if not ranks:
        return there
    wanted = [run.log_path(number) for number in ranks]
    missing = [number for number, path in zip(ranks, wanted, strict=True) if path not in there]
    if missing and there:
        from craton.telemetry import RunError

        last = there[-1].stem.removeprefix("rank-").lstrip("0") or "0"
        raise RunError(f"--rank {missing[0]}: {run.name} has no such rank; its ranks are 0 to {last}")
    return [path for path in wanted if path in there]


def _ranks(text: str) -> list[int]:
    from craton.telemetry import RunError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RunError(f"--rank {text!r} is not a list of ranks; write e.g. 0,7") from None
