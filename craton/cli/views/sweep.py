"""A sweep in the terminal: the tree of its members while it runs, the table and the best member at its end."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from craton.cli.views.members import look_at_tree, shown_tree
from craton.formatting import counted
from craton.printable import printable_line

if TYPE_CHECKING:
    from rich.console import Console

    from craton.api import Run
    from craton.orchestration.draft.members import Members
    from craton.orchestration.watching import View
    from craton.telemetry import RunDirectory, RunSummary

LOOK_SECONDS = 1.0
PLAIN_SECONDS = 10.0  # between two lines without a change of state
MAX_NAMES = 6  # of members in one line


def is_sweep(run: RunDirectory) -> bool:
    from craton.telemetry.members import read_members

    return read_members(run).purpose == "sweep"


def members_text(members: Members) -> str:
    """`6, one at a time: seed-1, seed-2, …`, or `base: kept, its result is in runs/base`."""
    spec = members.spec
    kept = {item.name: item.result for item in spec.members if item.is_kept}
    names = [f"{item.name} (kept: {kept[item.name]})" if item.is_kept else item.name for item in spec.members]
    shown = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
    at_once = f", {'one' if spec.parallel == 1 else spec.parallel} at a time" if 0 < spec.parallel < len(names) else ""
    return f"{len(names):,}{at_once}: {shown}"


def watch_sweep(run: Run, console: Console) -> RunSummary:
    """Show the members of a sweep until it ends, and return its last summary."""
    from rich.live import Live

    if not console.is_terminal:
        return run.wait(look=MemberLines(run.directory, console).look, look_seconds=LOOK_SECONDS)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:

        def look(view: View) -> None:
            live.update(shown_tree(look_at_tree(run.directory), console.width), refresh=True)

        return run.wait(look=look, look_seconds=LOOK_SECONDS)


class MemberLines:
    """The view of a sweep for a log: a line for each change of a member, and the progress of all."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._run, self._console = run, console
        self._states: dict[str, str] = {}
        self._printed, self._printed_at = "", -PLAIN_SECONDS

    def look(self, view: View) -> None:
        from craton.telemetry.members import MembersSum, read_members_status

        name, members = view.summary.name, read_members_status(self._run).members
        for member, status in members.items():
            if status.state != self._states.get(member, "waiting"):
                self._print(f"{name}/{member}: {status.state}{f' ({status.message})' if status.message else ''}")
            self._states[member] = status.state
        if view.summary.movement.is_stuck or not members:
            text = f"{name}: {view.summary.movement.sentence or view.summary.message or view.summary.state}"
        else:
            text = f"{name}: {MembersSum(dict(Counter(self._states.values()))).text}"
        if text != self._printed and (not view.is_moving or time.monotonic() - self._printed_at >= PLAIN_SECONDS):
            self._print(text)
            self._printed, self._printed_at = text, time.monotonic()

    def _print(self, text: str) -> None:
        self._console.print(printable_line(text), soft_wrap=True, markup=False)


def sweep_outcome(run: RunDirectory) -> dict[str, Any]:
    """Return the result of a sweep for `--json`: the best member, and every member with its values."""
    from craton.orchestration.members import SWEEP_FILE, SWEEP_PAGE, read_sweep, sweep_json

    files = {name: str(run.path / name) for name in (SWEEP_FILE, SWEEP_PAGE) if (run.path / name).exists()}
    return {"sweep": sweep_json(read_sweep(run)), "files": files}


def print_sweep(run: RunDirectory, summary: RunSummary, console: Console) -> None:
    """Print the table of a sweep, its best member, and where its plots are."""
    from rich.text import Text

    from craton.cli.views.outcome import shown
    from craton.formatting import duration
    from craton.orchestration.members import SWEEP_PAGE, read_sweep, sweep_table, sweep_verdict

    sweep = read_sweep(run)
    console.print(sweep_table(sweep))
    hidden = len(sweep.rows) - sweep_table(sweep).row_count
    if hidden > 0:
        console.print(f"and {counted(hidden, 'more member')}, in sweep.json and {SWEEP_PAGE}", style="dim")
    console.print(Text(sweep_verdict(sweep), style="bold"))
    state = {"done": "is done", "failed": "failed", "lost": "is lost"}.get(summary.state, summary.state)
    style = "bold green" if summary.state == "done" else "bold" if summary.state == "stopped" else "bold red"
    took = f" in {duration(summary.wall_seconds)}" if summary.wall_seconds else ""
    plots = f"; plots: {shown(run.path / SWEEP_PAGE)}" if (run.path / SWEEP_PAGE).exists() else ""
    console.print(Text.assemble((f"{summary.name} {state}", style), f"{took}{plots}"))
    if summary.state in ("failed", "lost"):
        console.print(Text(summary.message or "no error message"))
    if summary.state == "stopped":
        console.print(f"next: craton resume {summary.name}", style="dim")
