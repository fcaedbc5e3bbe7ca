"""The live view of a run: a panel in a terminal, a line every few seconds elsewhere.

Leaving the view (Ctrl-C) never affects the run. The view ends when the run does.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from craton import formatting, terminal_marks
from craton.formatting import whole_duration
from craton.printable import printable_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from craton.api import Run
    from craton.orchestration.watching import Recovery, View
    from craton.telemetry import RunSummary

LOOK_SECONDS = 0.5
PLAIN_SECONDS = 5.0
STATE_STYLES = {
    "waiting": "cyan",
    "starting": "cyan",
    "running": "green",
    "ready": "green",  # these two of a member, by its owner
    "restarting": "yellow",
    "unreadable": "red",
    "stuck": "bold red",  # of summary.shown_state
    "stopping": "cyan",
    "stopped": "bold",  # as requested: neither a warning nor an error
    "done": "bold green",
    "failed": "bold red",
    "lost": "bold red",
}
# Events left out of the log: every checkpoint, and those the outcome reports in detail.
_HIDDEN_EVENTS = ("checkpoint_saved", "failed", "rank_ended", "ranks_told_to_end", "recovered")


def make_console(as_json: bool = False) -> Console:
    """Return the console for people: stdout, or stderr when stdout carries JSON. On a pipe lines are not wrapped."""
    from craton.cli.views.console import SafeConsole

    console = SafeConsole(stderr=as_json, highlight=False)
    return console if console.is_terminal else SafeConsole(stderr=as_json, highlight=False, width=1000)


def watch(run: Run, console: Console, quiet: bool = False) -> RunSummary:
    """Show the run until it ends, and return its last summary; KeyboardInterrupt goes to the caller."""
    from rich.live import Live

    if quiet:
        return run.wait(look_seconds=LOOK_SECONDS)
    if not console.is_terminal:
        return run.wait(look=PlainLines(console).look, look_seconds=LOOK_SECONDS)
    with Live(console=console, auto_refresh=False) as live:
        return run.wait(
            look=lambda view: live.update(panel(view, console.width), refresh=True), look_seconds=LOOK_SECONDS
        )


class StopStatus:
    """A status line while a run saves its state or a server drains, from the first look on."""

    def __init__(self, console: Console, serves: bool) -> None:
        from rich.status import Status

        message = "draining: finishing open requests" if serves else "stopping: saving a checkpoint"
        self._status = Status(message, console=console)
        self.is_shown = False

    def look(self, view: View) -> None:
        from rich.markup import escape

        if not self.is_shown:
            self._status.start()
            self.is_shown = True
        reason = view.summary.message or view.summary.storage
        if view.summary.state == "stopping" and reason:
            self._status.update(f"stopping: {escape(reason)}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._status.stop()


def panel(view: View, width: int) -> RenderableType:
    """Return the whole view, at most 100 columns wide."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    summary = view.summary
    width = min(width - 2, 100)  # room for the ^C that the terminal echoes, which would break the last line
    inner = width - 4
    ranks = f"{summary.ranks} rank{'' if summary.ranks == 1 else 's'}"
    parts: list[RenderableType] = [_progress(view, inner)]
    if view.recovering is not None:
        parts.insert(0, _recovering(view.recovering, inner))
    if summary.unsaved:
        parts.insert(0, Text(f"NOT SAVED: {summary.unsaved}", style="bold red"))
    if summary.movement.sentence:
        style = "bold red" if summary.movement.is_stuck else "cyan"
        parts.insert(0, Text(printable_line(summary.movement.sentence), style=style))
    if summary.state == "waiting":
        parts.insert(0, Text(f"waits: {summary.message}", style="cyan"))
    elif summary.state == "starting" and summary.message:
        parts.insert(0, Text(printable_line(summary.message), style="cyan"))
    if summary.storage:
        parts.insert(0, Text(summary.storage, style="yellow"))
    if view.losses:
        parts.append(_loss(view, inner))
    if view.summary.results:
        parts += _results(view, inner)
    if (
        summary.step_seconds and summary.state != "starting"
    ):  # until then the numbers are those of the previous generation
        parts += [Text(), _measured_and_planned(view)]
    if view.phases and summary.state != "starting":
        parts += [Text(), _phases(view, inner)]
    if view.recoveries and view.recovering is None:
        last = Text(f"last recovery: {view.recoveries[-1].text}", style="yellow", no_wrap=True)
        last.truncate(inner, overflow="ellipsis")
        parts += [Text(), last]
    if view.events:
        parts += [Text(), *(_event(event, inner) for event in view.events)]
    title = Text.assemble(
        (summary.name, "bold"), " · ", (summary.shown_state, STATE_STYLES[summary.shown_state]), f" · {ranks}"
    )
    if summary.generation:
        title.append(f" · generation {summary.generation}")
    if view.recoveries:
        count = len(view.recoveries)
        title.append(f" · {count} recover{'y' if count == 1 else 'ies'}")
    hint = "Ctrl-C leaves the view; the run continues" if view.is_moving else ""
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=hint, subtitle_align="right", width=width, style=""
    )


def line(view: View) -> str:
    """Return the view as one line, for a log."""
    summary = view.summary
    if view.recovering is not None:
        return f"{summary.name}: RECOVERING  {view.recovering.text}"
    if summary.unsaved:
        return f"{summary.name}: NOT SAVED  {summary.unsaved}"
    if summary.state == "waiting":
        return f"{summary.name}: waits: {summary.message}"
    if summary.movement.is_stuck:
        return printable_line(f"{summary.name}: {summary.movement.sentence}")
    if not summary.step or summary.state == "starting":
        reason = summary.movement.sentence or (summary.message if summary.state == "starting" else "")
        note = f": {reason}" if reason else ""
        return printable_line(f"{summary.name}: {summary.state}{note}")
    from craton.telemetry import result_details, result_words

    if summary.loss is None and "evaluation_accuracy" in summary.results:
        details = [f"{title} {text}" for title, text in result_details(summary.results)]
        of = f" of {summary.steps:,}" if summary.steps else ""
        left = [] if summary.eta_seconds is None else [f"ETA {formatting.whole_duration(summary.eta_seconds)}"]
        words = [f"{summary.step:,}{of} problems", *result_words(summary.results), *details, *left]
        return f"{summary.name}: {'  '.join(words)}"
    change = formatting.change(summary.step_seconds, summary.plan.get("step_seconds"))
    against = "" if change == formatting.UNKNOWN else f" ({change} against plan)"
    parts = [
        f"step {summary.step:,}/{summary.steps:,}" if summary.steps else f"step {summary.step:,}",
        *([] if "reward" in summary.results else [f"loss {formatting.digits(summary.loss)}"]),  # of rewards: about 0
        *result_words(summary.results),
        f"{formatting.amount(summary.tokens_per_second)} tokens/s",
        f"MFU {formatting.percent(summary.mfu)}",
        f"step {formatting.duration(summary.step_seconds)}{against}",
    ]
    if view.evaluation_loss is not None:
        parts.insert(2, f"evaluation {formatting.digits(view.evaluation_loss)}")
    if summary.eta_seconds is not None:
        parts.append(f"ETA {formatting.whole_duration(summary.eta_seconds)}")
    return f"{summary.name}: {'  '.join(parts)}"


class PlainLines:
    """The view for a log: a line every few seconds, and each event once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed, self._printed_at = "", -PLAIN_SECONDS
        self._seen: list[dict[str, Any]] = []
        self._num_recovered: int | None = None
        self._recovering: Recovery | None = None
        self._storage = ""

    def look(self, view: View) -> None:
        name, print_line = view.summary.name, partial(self._console.print, soft_wrap=True, markup=False)
        if view.summary.storage and not self._storage:
            print_line(f"{name}: {view.summary.storage}")
        self._storage = view.summary.storage
        news = [event for event in view.events if event.get("generation") == view.summary.generation]
        for event in news:
            if event not in self._seen and event.get("event") not in _HIDDEN_EVENTS:
                print_line(f"{name}: {describe(event)}")
        self._seen = news
        back = [item for item in view.recoveries if item.seconds is not None]
        for recovery in back[len(back) if self._num_recovered is None else self._num_recovered :]:
            print_line(f"{name}: RECOVERED  {recovery.text}")
        self._num_recovered = len(back)
        has_changed = not view.is_moving or view.recovering != self._recovering
        is_due = has_changed or time.monotonic() - self._printed_at >= PLAIN_SECONDS
        self._recovering = view.recovering
        text = line(view)
        if text != self._printed and is_due:
            print_line(text)
            self._printed, self._printed_at = text, time.monotonic()


def _recovering(recovery: Recovery, width: int) -> Text:
    from rich.text import Text

    seconds = max(0.0, time.time() - recovery.began)
    text = Text(f"RECOVERING for {whole_duration(seconds)}: {recovery.text}", style="bold white on red", no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    return text


def _progress(view: View, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    summary = view.summary
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    total = summary.steps
    steps = f"step {summary.step or 0:,}" + (f"/{total:,}" if total else "")
    starting = summary.state == "starting"
    bar = ProgressBar(total=total or None, completed=summary.step or 0, pulse=starting or not total)
    right = "starting" if starting else formatting.percent((summary.step or 0) / total) if total else ""
    if summary.eta_seconds is not None and not starting:
        right += f"  ETA {formatting.whole_duration(summary.eta_seconds)}"
    grid.add_row(Text(steps, style="bold"), bar, Text(right, style="bold"))
    return grid


def _loss(view: View, width: int) -> Text:
    from rich.text import Text

    end = f"{formatting.digits(view.losses[-1])}"
    evaluated = f"  evaluation {formatting.digits(view.evaluation_loss)}" if view.evaluation_loss is not None else ""
    curve = terminal_marks.sparkline(view.losses, width - len("loss ") - len(end) - len(evaluated) - 2)
    return Text.assemble(("loss ", "bold"), (curve, "cyan"), "  ", (end, "bold cyan"), (evaluated, "dim"))


def _results(view: View, width: int) -> list[Text]:
    """Return what post-training improves as a curve, and the numbers to judge it by."""
    from rich.text import Text

    from craton.telemetry import result_details, result_scores

    scores = result_scores(view.summary.results)
    lines = []
    if scores:
        title, end = scores[0]
        more = "".join(f"  {name} {text}" for name, text in scores[1:])
        curve = terminal_marks.sparkline(view.scores, width - len(title) - len(end) - len(more) - 3)
        lines.append(Text.assemble((f"{title} ", "bold"), (curve, "green"), "  ", (end, "bold green"), (more, "dim")))
    details = " · ".join(f"{title} {text}" for title, text in result_details(view.summary.results))
    lines += [Text(details, style="dim", no_wrap=True, overflow="ellipsis")] if details else []
    return lines


def _measured_and_planned(view: View) -> RenderableType:
    """Return the measured next to the planned numbers."""
    from rich.table import Table
    from rich.text import Text

    summary, plan = view.summary, view.summary.plan
    change = formatting.change(summary.step_seconds, plan.get("step_seconds"))
    rows = [
        (
            "measured",
            formatting.duration(summary.step_seconds),
            "" if change == formatting.UNKNOWN else change,
            formatting.amount(summary.tokens_per_second),
            formatting.percent(summary.mfu),
            formatting.percent(summary.goodput),
        )
    ]
    if plan:
        rows.append(
            (
                "plan",
                formatting.duration(plan.get("step_seconds")),
                "",
                formatting.amount(plan.get("tokens_per_second")),
                formatting.percent(plan.get("mfu")),
                formatting.percent(plan.get("goodput")),
            )
        )
    grid = Table.grid(padding=(0, 3))
    for index, name in enumerate(("", "step", "", "tokens/s", "MFU", "goodput")):
        grid.add_column(Text(name, style="dim"), justify="left" if index in (0, 2) else "right", no_wrap=True)
    grid.show_header = True
    for row, style in zip(rows, ("bold", ""), strict=False):
        cells = [Text(cell, style=style) for cell in row]
        cells[0].style = "dim"
        cells[2].style = change_style(row[2]) if row[2] else ""
        grid.add_row(*cells)
    return grid


def change_style(change: str) -> str:
    """Green up to 10% off the plan, yellow to 25%, red beyond."""
    if change.startswith("×"):
        return "red"
    number = float(change.strip("+−±%"))
    return "green" if number <= 10 else "yellow" if number <= 25 else "red"


def _phases(view: View, width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from craton.telemetry import step_phases

    sides = [("measured", view.phases)]
    if view.planned_phases:
        sides.append(("plan", view.planned_phases))
    longest = max([1e-9, *(seconds for _, phases in sides for seconds in phases.values())])
    room = max(6, min(26, (width - 42) // len(sides)))
    grid = Table.grid(padding=(0, 1))
    grid.show_header = True
    grid.add_column("", no_wrap=True)
    for title, _ in sides:
        grid.add_column(Text(title, style="dim"), justify="right", no_wrap=True, min_width=8)
        grid.add_column("", no_wrap=True, min_width=room + 1)
    for phase in step_phases({**view.phases, **view.planned_phases}):
        style = terminal_marks.PHASE_STYLES[phase]
        cells = [Text(phase, style="dim")]
        for _, phases in sides:
            seconds = phases.get(phase)
            bar = terminal_marks.bar((seconds or 0.0) / longest, room)
            cells += [Text(formatting.duration(seconds)), Text(bar, style=style)]
        grid.add_row(*cells)
    return grid


def _event(event: dict[str, Any], width: int) -> Text:
    from rich.text import Text

    text = Text.assemble((f"{formatting.clock(float(event.get('time', 0)))}  ", "dim"), describe(event))
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text


def describe(event: dict[str, Any]) -> str:
    """Return an event's name and fields: `step 120 · checkpoint saved · tier shared · took 210 ms`."""
    from craton.telemetry import event_fields

    words = [f"step {event['step']:,}"] if event.get("step") else []
    words.append(str(event.get("event", "event")).replace("_", " "))
    words.append(event_fields(event))
    return " · ".join(word for word in words if word)
