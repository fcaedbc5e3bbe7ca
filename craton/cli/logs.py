"""`craton logs RUN`: what the ranks printed, and with `--agent` what the node agents said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.telemetry import RunDirectory

LOOK_SECONDS = 0.2
FOLLOW_LINES = 20  # of what was there before, when following


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

    from craton.telemetry import find_run

    found = find_run(run)
    ranks = _ranks(rank)
    if not follow and not _files(found, ranks, agent):
        print(f"{found.name} has no logs yet; `craton logs {found.name} -f` waits for them", file=sys.stderr)
    alone = not agent and len(ranks) == 1
    try:
        for source, text in _lines(found, ranks, agent, follow):
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


def _files(run: RunDirectory, ranks: list[int], agent: bool) -> list[Path]:
    """The log files there are; a rank that is asked for and has none yet comes later, or is a mistake."""
    folder = run.path / "logs"
    if agent:
        return sorted(folder.glob("agent-*.log"))
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
