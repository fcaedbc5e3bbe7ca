"""`craton logs RUN`: what the ranks printed, and with `--agent` what the node agents said. Of a run that has ended
before any rank began it is the agents', which say why.

Read from the run directory, or from the pods of a run whose directory is not seen here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.orchestration.watching import LogLine
    from craton.telemetry import RunDirectory

FOLLOW_LINES = 20  # of what was there before, when following


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

    from craton.api import Run
    from craton.orchestration import is_elsewhere
    from craton.orchestration.watching import log_files, standing_of
    from craton.printable import printable, printable_line
    from craton.telemetry import RunError

    handle = Run(run)
    directory = handle.directory
    ranks = _ranks(rank)
    last = number if number is not None else FOLLOW_LINES if follow else None
    in_pods = is_elsewhere(directory)
    if in_pods and timestamps:
        raise RunError(
            f"--timestamps: the logs of {directory.name} are in its pods, whose times `kubectl logs --timestamps` "
            "prints; leave out --timestamps"
        )
    if in_pods or not log_files(directory, ranks, agent):
        standing = standing_of(directory)
        has_ended = standing.condition == "ended" or directory.has("FATAL")
        if standing.condition == "waiting":
            print(f"{directory.name} waits: {standing.sentence}", file=sys.stderr)
        elif not in_pods and has_ended and not agent and log_files(directory, [], agent=True):
            print(f"{directory.name} has ended before a rank printed anything; this is of its agents:", file=sys.stderr)
            agent = True
        elif not in_pods and has_ended:
            print(
                f"{directory.name} has ended and left no logs; `craton why {directory.name}` tells more",
                file=sys.stderr,
            )
        elif not in_pods and not follow:
            print(
                f"{directory.name} has no logs yet; `craton logs {directory.name} -f` waits for them", file=sys.stderr
            )
    alone = not agent and len(ranks) == 1
    clock = _Clock(directory) if timestamps else None
    lines = handle.log_lines(ranks, agents=agent, follow=follow, last=last)
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


class _Clock:
    """When a line was printed: as its agent noted it, or now where it came while it was followed."""

    def __init__(self, run: RunDirectory) -> None:
        from craton.telemetry.node import LogClock

        self._clock = LogClock(run)

    def moment(self, line: LogLine) -> float | None:
        return time.time() if line.is_new else self._clock.printed_at(line.source, line.end)


def _stamp(moment: float | None) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S") if moment is not None else " " * 19


def _ranks(text: str) -> list[int]:
    from craton.telemetry import RunError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RunError(f"--rank {text!r} is not a list of ranks; write e.g. 0,7") from None
