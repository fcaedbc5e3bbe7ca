"""`craton ps`: every run with its state, progress, speed against its plan, goodput and dollars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from craton.telemetry import RunDirectory, RunSummary

VERSUS = "vs PLAN"
TITLES = ("RUN", "STATE", "GEN", "STEP", "%", "ETA", "TOK/S", VERSUS, "GOODPUT", "$")
NUM_WORDS = 2  # columns before those of numbers
GAP = "   "
LEAST_NAME = 12  # characters of a name in one line, however narrow the terminal


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON.")] = False,
) -> None:
    """List the runs, newest first."""
    import json

    from craton.cli.live import make_console
    from craton.cli.outcome import goodput_text, ledger_text, recoveries_json, recoveries_text, summary_json
    from craton.orchestration import MOVING, glance, settled_summaries, stopped_by_user
    from craton.telemetry import find_run, list_runs, runs_root

    summaries, recoveries, unreadable = [], {}, {}
    for run in list_runs():
        try:
            seen = glance(run)
            recoveries[run.name] = seen.recoveries
            summaries.append(seen.summary)
        except (ValueError, TypeError, AttributeError, OSError) as error:  # one broken folder hides no other run
            unreadable[run.name] = f"{run.path} cannot be read: {error}"
    summaries = settled_summaries(summaries)
    if as_json:
        broken = [{"name": name, "state": "unreadable", "message": text} for name, text in unreadable.items()]
        found = [{**summary_json(each), **recoveries_json(recoveries[each.name])} for each in summaries]
        print(json.dumps([*found, *broken]))
        return
    console = make_console()
    for text in unreadable.values():
        console.print(text, style="red", soft_wrap=True, markup=False)
    if not summaries:
        console.print(f"no runs in {runs_root()}; `craton run JOB` starts one", soft_wrap=True)
        return
    _print_table(summaries, console)
    for summary in summaries:
        back = recoveries[summary.name]
        if summary.ledger and (back or summary.state in MOVING):
            told = f"{summary.name}: {ledger_text(summary)} · {goodput_text(summary)}"
            console.print(told, soft_wrap=True, markup=False)
        if summary.state in ("starting", "running", "stopping"):
            _print_server(find_run(summary.path), console)
        if back:
            console.print(f"{summary.name}: {recoveries_text(back)}", style="yellow", soft_wrap=True, markup=False)
        if summary.unsaved:
            console.print(f"{summary.name}: {summary.unsaved}", style="red", soft_wrap=True, markup=False)
        if summary.storage:
            console.print(f"{summary.name}: {summary.storage}", style="yellow", soft_wrap=True, markup=False)
        if summary.state in ("failed", "lost") and summary.message:
            reason = summary.message.splitlines()[0]
            console.print(f"{summary.name}: {reason}", style="red", soft_wrap=True, markup=False)
        if summary.state == "stopped" and summary.message and not stopped_by_user(find_run(summary.path)):
            reason = summary.message.splitlines()[0]
            console.print(f"{summary.name}: {reason}", style="yellow", soft_wrap=True, markup=False)
    for text in _waiting_lines(summaries):
        console.print(text, style="cyan", soft_wrap=True, markup=False)


def _waiting_lines(summaries: Sequence[RunSummary]) -> list[str]:
    """What runs wait for; one line for all that wait for the same."""
    names: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.state == "waiting" or (summary.state == "starting" and summary.message):
            names.setdefault(summary.message, []).append(summary.name)
    lines = []
    for message, waiting in names.items():
        others = f" and {len(waiting) - 1:,} more: wait" if len(waiting) > 1 else ": waits"
        lines.append(f"{waiting[0]}{others}: {message}")
    return lines


def _print_server(run: RunDirectory, console: Console) -> None:
    """Where a server is, and how it does now; nothing for other runs."""
    from craton.orchestration import is_server

    if not is_server(run):
        return
    from craton.cli.server_view import state_line
    from craton.errors import CratonError
    from craton.orchestration import ServerWatch, server_of

    try:
        address = server_of(run)
    except CratonError as error:
        console.print(f"{run.name}: {error}", style="yellow", soft_wrap=True, markup=False)
        return
    told = f"{state_line(run.name, ServerWatch(address).look())} · {address.url}"
    console.print(told, soft_wrap=True, markup=False)


def _print_table(summaries: list[RunSummary], console: Console) -> None:
    """Columns as wide as what is in them; where a terminal is too narrow for that, names go on in the next line."""
    from rich.text import Text

    from craton import figures
    from craton.cli.live import STATE_STYLES, change_style

    rows = [_cells(each) for each in summaries]
    widths = [max(map(len, column)) for column in zip(TITLES, *rows, strict=True)]
    others = sum(widths[1:]) + len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(LEAST_NAME, console.width - others - 1))
    lines = [Text(_line(TITLES, widths), style="bold"), Text("─" * (widths[0] + others))]
    for summary, (name, state, *rest) in zip(summaries, rows, strict=True):
        first, *more = (name[at : at + widths[0]] for at in range(0, len(name), widths[0]))
        line = Text(_line((first, state, *rest), widths))
        begin = widths[0] + len(GAP)
        line.stylize(STATE_STYLES[summary.state], begin, begin + len(state))
        change = rest[TITLES.index(VERSUS) - 2]
        if change != figures.NONE:
            end = widths[0] + sum(len(GAP) + width for width in widths[1 : TITLES.index(VERSUS) + 1])
            line.stylize(change_style(change), end - len(change), end)
        lines += [line, *map(Text, more)]
    # rich's own table takes three times as long as all the rest of this verb when there are hundreds of rows
    console.print(Text("\n").join(lines), soft_wrap=True)


def _cells(summary: RunSummary) -> tuple[str, ...]:
    from craton import figures

    of = f"/{summary.steps:,}" if summary.steps else ""
    return (
        summary.name,
        summary.state,
        str(summary.generation),
        f"{summary.step:,}{of}",
        figures.percent(summary.progress).removesuffix(" %"),
        figures.remaining(summary.eta_seconds),
        figures.amount(summary.tokens_per_second),
        figures.change(summary.tokens_per_second, summary.plan.get("tokens_per_second")),
        figures.percent(summary.goodput),
        figures.dollars(summary.cost_dollars),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, numbers to the right."""
    padded = [
        cell.ljust(width) if at < NUM_WORDS else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(padded)
