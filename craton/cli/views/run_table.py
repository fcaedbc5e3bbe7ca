"""The table of runs that `craton ps` prints, and the notes on single runs below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from craton.orchestration.watching import Recovery
    from craton.telemetry import RunDirectory, RunState, RunSummary

VERSUS = "vs PLAN"
TITLES = ("RUN", "STATE", "GEN", "STEP", "%", "ETA", "LOSS", "TOK/S", VERSUS, "GOODPUT", "$")
NUM_WORDS = 2  # left-aligned columns before the numeric ones
GAPS = ("   ", "  ")  # between two columns; the second on a narrow terminal
MIN_NAME = 12  # characters of a name in one line, however narrow the terminal
MAX_UNREAD = 5  # unreadable files named per run


def run_table(rows: Sequence[Sequence[str]], width: int, notes: Sequence[str] = ()) -> list[Text]:
    """Return a table with columns as wide as their content, each row followed by its note. On a narrow terminal names
    wrap to the next line."""
    from rich.text import Text

    from craton import formatting
    from craton.cli.views.live import STATE_STYLES, change_style

    widths = [max(map(len, column)) for column in zip(TITLES, *rows, strict=True)]
    min_width = min(widths[0], MIN_NAME) + sum(widths[1:]) + 1
    gap = GAPS[0] if min_width + len(GAPS[0]) * (len(widths) - 1) <= width else GAPS[1]
    others = sum(widths[1:]) + len(gap) * (len(widths) - 1)
    widths[0] = min(widths[0], max(MIN_NAME, width - others - 1))
    # with hundreds of rows rich's own table takes three times as long as the rest of this command
    lines = [Text(_line(TITLES, widths, gap), style="bold"), Text("─" * (widths[0] + others))]
    for number, (name, state, *rest) in enumerate(rows):
        first, *more = (name[at : at + widths[0]] for at in range(0, len(name), widths[0]))
        line = Text(_line((first, state, *rest), widths, gap))
        begin = widths[0] + len(gap)
        line.stylize(STATE_STYLES[state], begin, begin + len(state))
        change = rest[TITLES.index(VERSUS) - 2]
        if change != formatting.UNKNOWN:
            end = widths[0] + sum(len(gap) + width for width in widths[1 : TITLES.index(VERSUS) + 1])
            line.stylize(change_style(change), end - len(change), end)
        if notes and notes[number]:
            line.append(f"{gap}{notes[number]}", STATE_STYLES[state])
        lines += [line, *map(Text, more)]
    return lines


def run_cells(summary: RunSummary) -> tuple[str, ...]:
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
        formatting.loss(None if "reward" in summary.results else summary.loss),  # of rewards: about 0
        formatting.amount(summary.tokens_per_second),
        formatting.change(summary.tokens_per_second, summary.plan.get("tokens_per_second")),
        formatting.percent(summary.goodput),
        formatting.dollars(summary.total_cost_dollars),
    )


def _line(cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
    """Align words left and numbers right."""
    padded = [
        cell.ljust(width) if at < NUM_WORDS else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return gap.join(padded)


def notes_on(summary: RunSummary, back: list[Recovery], unread: Sequence[str], has_tree: bool = False) -> list[Text]:
    """Return the notes on one run: ledger, recoveries, warnings, reason of a failure."""
    from rich.text import Text

    from craton.cli.views.outcome import goodput_text, ledger_text, recoveries_text, results_text
    from craton.orchestration import stopped_by_user
    from craton.orchestration.watching import MOVING
    from craton.printable import printable_line
    from craton.telemetry import find_run

    name, lines = summary.name, []
    if summary.members is not None:
        lines.append(Text(f"{name}: {summary.members.text}" + ("" if has_tree else f"; `craton ps {name}` shows them")))
    if summary.results:
        lines.append(Text(f"{name}: {results_text(summary)}"))
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
    lines += [Text(f"{name}: skipped: {text}", style="red") for text in unread[:MAX_UNREAD]]
    if len(unread) > MAX_UNREAD:
        lines.append(Text(f"{name}: and {len(unread) - MAX_UNREAD} more files", style="red"))
    return lines


def _server_lines(run: RunDirectory, state: RunState) -> list[Text]:
    """Return a server's address and load; nothing for other runs."""
    from craton.orchestration.watching import is_server

    if not is_server(run):
        return []
    from rich.text import Text

    from craton.cli.views.server import state_line
    from craton.errors import CratonError
    from craton.orchestration import ServerTargets, ServerWatch, server_of

    try:
        address = server_of(run)
    except CratonError as error:
        return [Text(f"{run.name}: {error}", style="yellow")]
    line = state_line(run.name, ServerWatch(address).look(), state, targets=ServerTargets.of(run))
    return [Text(f"{line} · {address.url}")]
