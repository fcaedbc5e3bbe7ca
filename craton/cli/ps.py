"""`craton ps`: list runs with state, progress, loss, throughput against the plan, goodput and cost.

Without options it lists live runs and the newest others; `--json` lists all of them. `craton ps RUN` shows one run and,
below it, the runs that it owns: state, progress, what each waits for, and where time and dollars went.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from craton.formatting import setting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from craton.orchestration.watching import Recovery
    from craton.telemetry import RunSummary

RECENT_RUNS = 20  # ended runs listed without --all
WATCH_SECONDS = 2.0


@dataclass(frozen=True)
class Listing:
    """The state of the runs at one moment."""

    summaries: list[RunSummary]
    recoveries: dict[str, list[Recovery]]  # by the run's name
    unread: dict[str, tuple[str, ...]]  # by the run's name: files that were skipped, and why
    unreadable: dict[str, str]  # runs that cannot be read, and why
    num_left_out: int = 0  # older runs
    is_filtered: bool = False


def ps(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Show only this run, with the members that it owns \\[default: list all runs].",
            show_default=False,
        ),
    ] = None,
    show_all: Annotated[
        bool,
        typer.Option("--all", "-a", help=f"List all runs \\[default: live runs and the {RECENT_RUNS} newest others]."),
    ] = False,
    number: Annotated[
        int | None,
        typer.Option("-n", "--number", min=1, metavar="N", help="List the newest N runs.", show_default=False),
    ] = None,
    state: Annotated[
        str,
        typer.Option(
            metavar="STATE", help="List only runs in these states, e.g. running or failed,lost.", show_default=False
        ),
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help=f"Refresh every {setting(WATCH_SECONDS)} until Ctrl-C.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the runs as JSON: all of them, unless -n or --state is given.")
    ] = False,
) -> None:
    """List live runs and the newest others, newest first; or one run with its members."""
    import json

    from craton.cli.views.live import make_console
    from craton.cli.views.outcome import recoveries_json, summary_json
    from craton.telemetry import RunError, find_run

    states = _states(state)
    if run is not None:
        from craton.cli.views.members import look_at_tree, shown_tree, tree_json

        directory = find_run(run)
        if show_all or number is not None or states:
            raise RunError(f"--all, -n and --state list many runs, and {directory.name} is one; omit them")
        if as_json:
            print(json.dumps(tree_json(look_at_tree(directory))))
            return
        console = make_console()
        _show(console, watch, lambda: shown_tree(look_at_tree(directory), console.width))
        return
    if as_json:
        found = _look(True, number, states)
        broken = [{"name": name, "state": "unreadable", "message": text} for name, text in found.unreadable.items()]
        listed = [
            {
                **summary_json(summary),
                **recoveries_json(found.recoveries[summary.name]),
                "unread": found.unread[summary.name],
            }
            for summary in found.summaries
        ]
        print(json.dumps([*listed, *broken]))
        return
    console = make_console()
    _show(console, watch, lambda: _shown(_look(show_all, number, states), console.width))


def _show(console: Console, watch: bool, look: Callable[[], Text]) -> None:
    """Print what is found once, or again and again until Ctrl-C."""
    from craton.telemetry import RunError

    if not watch:
        console.print(look(), soft_wrap=True)
        return
    from rich.live import Live

    if not console.is_terminal:
        raise RunError("--watch requires a terminal; without one, call `craton ps` repeatedly")
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                shown = look()
                shown.no_wrap, shown.overflow = True, "ellipsis"
                live.update(shown, refresh=True)
                time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _look(show_all: bool, number: int | None, states: Sequence[str]) -> Listing:
    """Return the requested runs, newest first."""
    from itertools import islice

    from craton.api import runs
    from craton.cli.views.run_table import run_cells
    from craton.orchestration.watching import MOVING, glance, settled_summaries

    summaries, recoveries, unread, unreadable = [], {}, {}, {}
    for run in runs()[: None if states else number]:
        try:
            seen = glance(run.directory)
            run_cells(seen.summary)
            recoveries[run.name], unread[run.name] = seen.recoveries, seen.unread
            summaries.append(seen.summary)
        except Exception as error:  # noqa: BLE001 - a broken run directory must not hide the other runs
            unreadable[run.name] = f"{run.path} cannot be read: {str(error) or type(error).__name__}"
    summaries = settled_summaries(summaries)
    num_found = len(summaries)
    if states:
        summaries = [element for element in summaries if element.state in states][:number]
        unreadable = {}
    elif not show_all and number is None:
        recent = {entry.name for entry in islice((item for item in summaries if item.state not in MOVING), RECENT_RUNS)}
        summaries = [summary for summary in summaries if summary.state in MOVING or summary.name in recent]
        return Listing(summaries, recoveries, unread, unreadable, num_found - len(summaries))
    return Listing(summaries, recoveries, unread, unreadable, is_filtered=bool(states))


def _states(text: str) -> list[str]:
    """Parse `failed,lost`; RunError for a word that is not a run state."""
    from craton.telemetry import RUN_STATES, RunError

    states = [word.strip().lower() for word in text.split(",") if word.strip()]
    for state in states:
        if state not in RUN_STATES:
            from craton.nearest import did_you_mean

            raise RunError(
                f"--state {state!r} is not a run state; allowed: {', '.join(RUN_STATES)}"
                f"{did_you_mean(state, RUN_STATES)}"
            )
    return states


def _shown(found: Listing, width: int) -> Text:
    """Return the table, and below it the notes on single runs."""
    from rich.text import Text

    from craton.cli.views.run_table import notes_on, run_cells, run_table
    from craton.telemetry import runs_root

    lines = [Text(text, style="red") for text in found.unreadable.values()]
    if found.summaries:
        lines += run_table([run_cells(summary) for summary in found.summaries], width)
        lines += [
            line
            for summary in found.summaries
            for line in notes_on(summary, found.recoveries[summary.name], found.unread[summary.name])
        ]
        lines += [Text(text, style="cyan") for text in _waiting_lines(found.summaries)]
    elif not found.unreadable:
        which = "matching runs" if found.is_filtered else "runs"
        lines.append(Text(f"there are no {which} in {runs_root()}; `craton run JOB` starts one"))
    if found.num_left_out:
        older = f"{found.num_left_out:,} older run{'s' if found.num_left_out != 1 else ''}"
        lines.append(Text(f"{older} not listed; `craton ps -a` lists all", style="dim"))
    return Text("\n").join(lines)


def _waiting_lines(summaries: Sequence[RunSummary]) -> list[str]:
    """Return what runs wait for: one line per reason."""
    names: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.state == "waiting" or (summary.state == "starting" and summary.message):
            names.setdefault(summary.message, []).append(summary.name)
    lines = []
    for message, waiting in names.items():
        others = f" and {len(waiting) - 1:,} more: wait" if len(waiting) > 1 else ": waits"
        lines.append(f"{waiting[0]}{others}: {message}")
    return lines
