"""`craton logs RUN`: what the ranks printed, and with `--agent` what the node agents said. Of a run that has ended
before any rank began it is the agents', which say why.

Read from the run directory, or from the pods of a run whose directory is not seen here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.telemetry import RunDirectory

LOOK_SECONDS = 0.2
FOLLOW_LINES = 20  # of what was there before, when following
_RANK_LINE = re.compile(r"\[rank (\d+)\] (.*)")  # as a pod prints what its ranks do


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="The last lines, then new ones until the run ends.")
    ] = False,
    rank: Annotated[str, typer.Option(help="Only these ranks, e.g. 0,7.", show_default=False)] = "",
    agent: Annotated[bool, typer.Option("--agent", help="The node agents instead of the ranks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print the logs of a run. Ctrl-C leaves the view and not the run."""
    import json
    import sys

    from craton.orchestration import pod_lines, standing_of
    from craton.telemetry import find_run

    found = find_run(run)
    ranks = _ranks(rank)
    pods = pod_lines(found, follow, FOLLOW_LINES if follow else None)
    if pods is not None or not _files(found, ranks, agent):
        standing = standing_of(found)
        has_ended = standing.condition == "ended" or found.has("FATAL")
        if standing.condition == "waiting":
            print(f"{found.name} waits: {standing.sentence}", file=sys.stderr)
        elif pods is None and has_ended and not agent and _files(found, [], agent=True):
            print(f"{found.name} has ended before a rank printed anything; this is of its agents:", file=sys.stderr)
            agent = True
        elif pods is None and has_ended:
            print(f"{found.name} has ended and left no logs; `craton why {found.name}` tells more", file=sys.stderr)
        elif pods is None and not follow:
            print(f"{found.name} has no logs yet; `craton logs {found.name} -f` waits for them", file=sys.stderr)
    alone = not agent and len(ranks) == 1
    lines = _lines(found, ranks, agent, follow) if pods is None else _of_pods(found, pods, ranks, agent)
    try:
        for source, text in lines:
            plain = text if alone else f"{source}  {text}"
            print(json.dumps({"source": source, "line": text}) if as_json else plain, flush=follow)
    except KeyboardInterrupt:
        print(f"\nleft the view; `craton stop {found.name}` stops the run with a checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


def _lines(run: RunDirectory, ranks: list[int], agent: bool, follow: bool) -> Iterator[tuple[str, str]]:
    """(source, line) of each file in turn, and when following what is added to any of them until the run has ended."""
    from craton.orchestration import Follower

    follower = Follower(run)
    offsets: dict[Path, int] = {}
    for path in _files(run, ranks, agent):
        lines, offsets[path] = _new_lines(path, 0)
        yield from ((path.stem, line) for line in (lines[-FOLLOW_LINES:] if follow else lines))
    goes_on = follow
    while goes_on:
        # Looked at before reading, so that what a rank printed last is read too.
        goes_on = follower.look().is_moving
        for path in _files(run, ranks, agent):
            lines, offsets[path] = _new_lines(path, offsets.get(path, 0))
            yield from ((path.stem, line) for line in lines)
        time.sleep(LOOK_SECONDS if goes_on else 0)


def _of_pods(
    run: RunDirectory, lines: Iterable[tuple[str, str]], ranks: list[int], agent: bool
) -> Iterator[tuple[str, str]]:
    """(source, line) as the files would give them; what is no rank's is the agent's, and its source the pod."""
    for pod, line in lines:
        found = _RANK_LINE.fullmatch(line)
        if found is None and agent:
            yield pod, line
        elif found is not None and not agent and (not ranks or int(found[1]) in ranks):
            yield run.log_path(int(found[1])).stem, found[2]


def _files(run: RunDirectory, ranks: list[int], agent: bool) -> list[Path]:
    """The log files there are; a rank that is asked for and has none yet comes later, or is a mistake."""
    folder = run.path / "logs"
    if agent:
        return sorted([*folder.glob("agent-*.log"), *folder.glob("slurm-*.out")])
    there = sorted(folder.glob("rank-*.log"))
    if not ranks:
        return there
    wanted = [run.log_path(number) for number in ranks]
    missing = [number for number, path in zip(ranks, wanted, strict=True) if path not in there]
    if missing and there:
        from craton.telemetry import RunError

        last = int(there[-1].stem.removeprefix("rank-"))
        raise RunError(f"--rank {missing[0]}: {run.name} has no such rank; its ranks are 0 to {last}")
    return [path for path in wanted if path in there]


def _new_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """The lines after an offset and where they end; a last line without its end waits until it has one."""
    with open(path, "rb") as file:
        file.seek(offset)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), offset + len(whole)


def _ranks(text: str) -> list[int]:
    from craton.telemetry import RunError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RunError(f"--rank {text!r} is not a list of ranks; write e.g. 0,7") from None
