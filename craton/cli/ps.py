"""`craton ps`: list runs with state, progress, loss, throughput against the plan, goodput and cost.

Without options it lists live runs and the newest others; `--json` lists all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from craton.formatting import setting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from craton.orchestration.watching import Recovery
    from craton.telemetry import RunDirectory, RunState, RunSummary

VERSUS = "vs PLAN"
TITLES = ("RUN", "STATE", "GEN", "STEP", "%", "ETA", "LOSS", "TOK/S", VERSUS, "GOODPUT", "$")
NUM_WORDS = 2  # left-aligned columns before the numeric ones
GAPS = ("   ", "  ")  # between two columns; the second on a narrow terminal
MIN_NAME = 12  # characters of a name in one line, however narrow the terminal
RECENT_RUNS = 20  # ended runs listed without --all
WATCH_SECONDS = 2.0
MAX_UNREAD = 5  # unreadable files named per run


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
    """List live runs and the newest others, newest first."""
    import json

    from craton.cli.views.live import make_console
    from craton.cli.views.outcome import recoveries_json, summary_json

    states = _states(state)
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
    if watch:
        _watch(console, show_all, number, states)
        return
    console.print(_shown(_look(show_all, number, states), console.width), soft_wrap=True)


def _watch(console: Console, show_all: bool, number: int | None, states: Sequence[str]) -> None:
    from rich.live import Live

    from craton.telemetry import RunError

    if not console.is_terminal:
        raise RunError("--watch requires a terminal; without one, call `craton ps` repeatedly")
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                shown = _shown(_look(show_all, number, states), console.width)
                shown.no_wrap, shown.overflow = True, "ellipsis"
                live.update(shown, refresh=True)
                time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _look(show_all: bool, number: int | None, states: Sequence[str]) -> Listing:
    """Return the requested runs, newest first."""
    from itertools import islice

    from craton.api import runs
    from craton.orchestration.watching import MOVING, glance, settled_summaries

    summaries, recoveries, unread, unreadable = [], {}, {}, {}
    for run in runs()[: None if states else number]:
        try:
            seen = glance(run.directory)
            _cells(seen.summary)
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

    from craton.telemetry import runs_root

    lines = [Text(text, style="red") for text in found.unreadable.values()]
    if found.summaries:
        lines += _table(found.summaries, width)
        lines += [line for summary in found.summaries for line in _notes(summary, found)]
        lines += [Text(text, style="cyan") for text in _waiting_lines(found.summaries)]
    elif not found.unreadable:
        which = "matching runs" if found.is_filtered else "runs"
        lines.append(Text(f"there are no {which} in {runs_root()}; `craton run JOB` starts one"))
    if found.num_left_out:
        older = f"{found.num_left_out:,} older run{'s' if found.num_left_out != 1 else ''}"
        lines.append(Text(f"{older} not listed; `craton ps -a` lists all", style="dim"))
    return Text("\n").join(lines)


def _notes(summary: RunSummary, found: Listing) -> list[Text]:
    """Return the notes on one run: ledger, recoveries, warnings, reason of a failure."""
    from rich.text import Text

    from craton.cli.views.outcome import goodput_text, ledger_text, recoveries_text
    from craton.orchestration import stopped_by_user
    from craton.orchestration.watching import MOVING
    from craton.printable import printable_line
    from craton.telemetry import find_run

    name, back, lines = summary.name, found.recoveries[summary.name], []
    if summary.ledger and (back or summary.state in MOVING):
        lines.append(Text(f"{name}: {ledger_text(summary)} · {goodput_text(summary)}"))
    if summary.state in ("starting", "running", "stopping"):
        lines += _server_lines(find_run(summary.path), summary.state)
    if summary.movement.is_stuck:
        text = f"{name}: {summary.movement.sentence}; `craton why {name}` looks closer"
        lines.append(Text(printable_line(text), style="bold red"))
    elif summary.movement.sentence:
        lines.append(Text(printable_line(f"{name}: {summary.movement.sentence}"), style="cyan"))
    if back:
        lines.append(Text(f"{name}: {recoveries_text(back)}", style="yellow"))
    if summary.unsaved:
        lines.append(Text(f"{name}: {summary.unsaved}", style="red"))
    if summary.storage:
        lines.append(Text(f"{name}: {summary.storage}", style="yellow"))
    reason = summary.message.splitlines()[0] if summary.message else ""
    if summary.state in ("failed", "lost") and reason:
        lines.append(Text(f"{name}: {reason}", style="red"))
    if summary.state == "stopped" and reason and not stopped_by_user(find_run(summary.path)):
        lines.append(Text(f"{name}: {reason}", style="yellow"))
    unread = found.unread[name]
    lines += [Text(f"{name}: skipped: {text}", style="red") for text in unread[:MAX_UNREAD]]
    if len(unread) > MAX_UNREAD:
        lines.append(Text(f"{name}: and {len(unread) - MAX_UNREAD} more files", style="red"))
    return lines


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


def _server_lines(run: RunDirectory, state: RunState) -> list[Text]:
    """Return a server's address and load; nothing for other runs."""
    from craton.orchestration.watching import is_server

    if not is_server(run):
        return []
    from rich.text import Text

    from craton.cli.views.server import state_line
    from craton.errors import CratonError
    from craton.orchestration import ServerWatch, server_of

    try:
        address = server_of(run)
    except CratonError as error:
        return [Text(f"{run.name}: {error}", style="yellow")]
    return [Text(f"{state_line(run.name, ServerWatch(address).look(), state)} · {address.url}")]


def _table(summaries: list[RunSummary], width: int) -> list[Text]:
    """Return a table with columns as wide as their content; on a narrow terminal names wrap to the next line."""
    from rich.text import Text

    from craton import formatting
    from craton.cli.views.live import STATE_STYLES, change_style

    rows = [_cells(item) for item in summaries]
    widths = [max(map(len, column)) for column in zip(TITLES, *rows, strict=True)]
    min_width = min(widths[0], MIN_NAME) + sum(widths[1:]) + 1
    gap = GAPS[0] if min_width + len(GAPS[0]) * (len(widths) - 1) <= width else GAPS[1]
    others = sum(widths[1:]) + len(gap) * (len(widths) - 1)
    widths[0] = min(widths[0], max(MIN_NAME, width - others - 1))
    # with hundreds of rows rich's own table takes three times as long as the rest of this command
    lines = [Text(_line(TITLES, widths, gap), style="bold"), Text("─" * (widths[0] + others))]
    for name, state, *rest in rows:
        first, *more = (name[at : at + widths[0]] for at in range(0, len(name), widths[0]))
        line = Text(_line((first, state, *rest), widths, gap))
        begin = widths[0] + len(gap)
        line.stylize(STATE_STYLES[state], begin, begin + len(state))
        change = rest[TITLES.index(VERSUS) - 2]
        if change != formatting.UNKNOWN:
            end = widths[0] + sum(len(gap) + width for width in widths[1 : TITLES.index(VERSUS) + 1])
            line.stylize(change_style(change), end - len(change), end)
        lines += [line, *map(Text, more)]
    return lines


def _cells(summary: RunSummary) -> tuple[str, ...]:
    from craton import formatting
    from craton.printable import printable

    of = f"/{summary.steps:,}" if summary.steps else ""
    return (
        printable(summary.name),
        summary.shown_state,
        str(summary.generation),
        f"{summary.step:,}{of}",
        formatting.percent(summary.progress).removesuffix("%"),
        formatting.whole_duration(summary.eta_seconds),
        formatting.loss(summary.loss),
        formatting.amount(summary.tokens_per_second),
        formatting.change(summary.tokens_per_second, summary.plan.get("tokens_per_second")),
        formatting.percent(summary.goodput),
        formatting.dollars(summary.cost_dollars),
    )


def _line(cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
    """Align words left and numbers right."""
    padded = [
        cell.ljust(width) if at < NUM_WORDS else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return gap.join(padded)
