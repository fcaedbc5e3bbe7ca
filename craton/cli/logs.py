"""`craton logs RUN`: print the logs of the ranks, or with `--agent` of the node agents.

If a run ended before any rank started, the agents' logs are printed instead: they hold the reason. Logs are read from
the run directory, or from the pods of a run whose directory is not visible here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.orchestration.watching import LogLine
    from craton.telemetry import RunDirectory

FOLLOW_LINES = 20  # earlier lines printed first when following
SHOWN_MEMBERS = 10


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the last lines, then new lines until the run ends.")
    ] = False,
    number: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--number",
            min=0,
            metavar="N",
            help="Print only the last N lines of each log \\[default: all, or 20 with -f].",
            show_default=False,
        ),
    ] = None,
    timestamps: Annotated[
        bool,
        typer.Option(
            "--timestamps", "-t", help="Prefix each line with the time at which the agent saw it (resolution 1 s)."
        ),
    ] = False,
    rank: Annotated[
        str, typer.Option(help="Print only these ranks, e.g. 0,7 \\[default: all].", show_default=False)
    ] = "",
    agent: Annotated[bool, typer.Option("--agent", help="Print the node agents' logs instead of the ranks'.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print the logs of a run. Ctrl-C leaves the view; the run continues."""
    import json
    import sys

    from craton.api import Run
    from craton.formatting import counted
    from craton.orchestration import is_elsewhere
    from craton.orchestration.watching import log_files, standing_of
    from craton.printable import printable, printable_line
    from craton.telemetry import RunError
    from craton.telemetry.members import member_runs

    handle = Run(run)
    directory = handle.directory
    ranks = _ranks(rank)
    last = number if number is not None else FOLLOW_LINES if follow else None
    in_pods = is_elsewhere(directory)
    if in_pods and timestamps:
        raise RunError(
            f"--timestamps is not available: the logs of {directory.name} are in its pods; omit it, or use "
            "`kubectl logs --timestamps`"
        )
    if in_pods or not log_files(directory, ranks, agent):
        standing = standing_of(directory)
        has_ended = standing.condition == "ended" or directory.has("FATAL")
        if standing.condition == "waiting":
            print(f"{directory.name} waits: {standing.sentence}", file=sys.stderr)
        elif not in_pods and has_ended and not agent and log_files(directory, [], agent=True):
            print(
                f"{directory.name} ended before any rank printed a line; these are the agents' logs:", file=sys.stderr
            )
            agent = True
        elif not in_pods and has_ended:
            print(
                f"{directory.name} has ended without logs; see `craton why {directory.name}`",
                file=sys.stderr,
            )
        elif not in_pods and not follow:
            print(
                f"{directory.name} has no logs yet; `craton logs {directory.name} -f` waits for them", file=sys.stderr
            )
    if not as_json and (names := [member.path.name for member in member_runs(directory)]):
        shown = ", ".join(names[:SHOWN_MEMBERS]) + (" ..." if len(names) > SHOWN_MEMBERS else "")
        print(
            f"{directory.name} has {counted(len(names), 'member')}: {shown}; `craton logs {directory.name}/{names[0]}` "
            "prints their logs",
            file=sys.stderr,
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
    """Return when a line was printed: as its agent recorded it, or now for a line that arrived while following."""

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
