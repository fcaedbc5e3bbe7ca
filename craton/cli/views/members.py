"""`craton ps RUN`: one run, the tree of the runs that it owns, and where their time and dollars went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from craton import formatting

if TYPE_CHECKING:
    from rich.text import Text

    from craton.orchestration.watching import MemberRow, SeenRun
    from craton.telemetry import RunDirectory

BRANCH, LAST, PIPE, SPACE = "├ ", "└ ", "│ ", "  "


@dataclass(frozen=True)
class RunTree:
    """A run and its members at one moment."""

    owner: SeenRun
    members: list[MemberRow]


def look_at_tree(run: RunDirectory) -> RunTree:
    """Read a run and its members."""
    from dataclasses import replace

    from craton.orchestration.watching import glance, glance_at_members, settled_summaries, with_members_sum

    seen, rows = glance(run), glance_at_members(run)
    (summary,) = settled_summaries([seen.summary])
    return RunTree(replace(seen, summary=with_members_sum(run, summary, rows)), rows)


def shown_tree(tree: RunTree, width: int) -> Text:
    """Return the table of the run and its members, and below it the notes on the run."""
    from rich.text import Text

    from craton.cli.views.run_table import notes_on, run_cells, run_table
    from craton.orchestration.watching import account_lines
    from craton.printable import printable_line

    summary = tree.owner.summary
    branches = list(_branches(tree.members))
    cells = [run_cells(summary), *(_cells(prefix, row) for prefix, row in branches)]
    lines = run_table(cells, width, ["", *(printable_line(_note(row)) for _, row in branches)])
    lines += notes_on(summary, tree.owner.recoveries, tree.owner.unread, has_tree=True)
    lines += [Text(f"{summary.name}: {text}") for text in account_lines(summary)]
    for _, row in branches:
        lines += [Text(f"{row.name}: skipped: {text}", style="red") for text in row.unread]
    return Text("\n").join(lines)


def tree_json(tree: RunTree) -> dict[str, Any]:
    """Return a run with its members as JSON."""
    from craton.cli.views.outcome import recoveries_json, summary_json

    return {
        **summary_json(tree.owner.summary),
        **recoveries_json(tree.owner.recoveries),
        "unread": tree.owner.unread,
        "member_runs": [_row_json(row) for row in tree.members],
    }


def _row_json(row: MemberRow) -> dict[str, Any]:
    from craton.cli.views.outcome import recoveries_json, summary_json

    return {
        **(summary_json(row.summary) if row.summary is not None else {}),
        **recoveries_json(row.recoveries),
        "name": row.name,
        "state": row.state,
        "message": row.message,
        "waits_for": row.waits_for,
        "restarts": row.restarts,
        "values": dict(row.values),
        "unread": row.unread,
        "member_runs": [_row_json(member) for member in row.members],
    }


def _branches(rows: Sequence[MemberRow], before: str = "") -> Iterator[tuple[str, MemberRow]]:
    """Yield the lines of the tree: what stands before the name, and the member."""
    for number, row in enumerate(rows, 1):
        is_last = number == len(rows)
        yield before + (LAST if is_last else BRANCH), row
        yield from _branches(row.members, before + (SPACE if is_last else PIPE))


def _cells(prefix: str, row: MemberRow) -> tuple[str, ...]:
    from craton.cli.views.run_table import TITLES, run_cells
    from craton.printable import printable

    name = f"{prefix}{printable(row.name.rpartition('/')[2])}"
    if row.summary is None:
        return (name, row.state, *([formatting.UNKNOWN] * (len(TITLES) - 2)))
    return (name, row.state, *run_cells(row.summary)[2:])


def _note(row: MemberRow) -> str:
    """Return what a member waits for, how often it was restarted, and why it failed."""
    words = [f"waits for {row.waits_for}"] if row.waits_for else []
    if row.restarts:
        words.append("restarted once" if row.restarts == 1 else f"restarted {row.restarts:,} times")
    if row.message not in ("", row.waits_for) and row.state not in ("running", "ready", "starting", "waiting"):
        words.append(row.message)
    return "; ".join(words)
