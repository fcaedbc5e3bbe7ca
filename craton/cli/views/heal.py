"""Options, confirmation, output and watch loop of `craton heal`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from craton.errors import CratonError
from craton.formatting import percent, setting
from craton.job.document import parse_seconds, parse_share
from craton.nearest import did_you_mean
from craton.observability.healing import MODES, Healing, Ledger, heal, look, read_report, repeat_offenders

if TYPE_CHECKING:
    from craton.observability.healing import Decision, HealingScope

STYLES = {"observe": "dim", "restart": "cyan", "reset": "yellow", "reboot": "yellow", "replace": "red"}
SHOWN_ENTRIES = 50
SHOWN_NODES = 16


@dataclass(frozen=True)
class Options:
    mode: str
    share: float
    every_seconds: float
    asks: bool


def options_of(
    place: HealingScope, mode: str | None, share: str | None, every: str, can_ask: bool, asks: bool
) -> Options:
    """Return the options of the command line, else of the cluster file. Acting without --yes requires a terminal."""
    chosen = mode or place.mode
    if chosen not in MODES:
        raise CratonError(f"--mode {chosen} is not known; allowed: {', '.join(MODES)}")
    try:
        options = Options(
            chosen,
            parse_share(share) if share is not None else place.share,
            parse_seconds(every),
            chosen == "act" and asks,
        )
    except ValueError as error:
        raise CratonError(f"{'--share' if share is not None else '--every'}: {error}") from None
    if options.asks and not (can_ask and Console().is_terminal):
        raise CratonError(
            "`--mode act` asks for confirmation, but there is no terminal to ask on; use --yes, or --mode advise"
        )
    return options


def check_node(place: HealingScope, node: str) -> None:
    """Raise CratonError for a node the scheduler does not have: a typo must not read as a healthy node."""
    names = [item.name for item in place.service.nodes()]
    if node not in names:
        others = f" and {len(names) - SHOWN_NODES} more" if len(names) > SHOWN_NODES else ""
        existing = f"{', '.join(names[:SHOWN_NODES]) or 'none'}{others}"
        raise CratonError(f"--node {node}: {place.name} has no such node; it has {existing}{did_you_mean(node, names)}")


def one_pass(
    place: HealingScope,
    options: Options,
    node: str | None,
    report: Path | None,
    prometheus: str | None,
    console: Console,
    as_json: bool,
) -> Healing:
    notes: list[str] = []
    issues = [] if options.mode == "off" else look(place, prometheus, notes)
    issues += read_report(report, notes) if report is not None and options.mode != "off" else []
    if node is not None:
        issues = [issue for issue in issues if issue.node == node]

    def approve(wanted: Sequence[Decision]) -> bool:
        for item in wanted:
            console.print(f"{item.node}: {_describe_action(item)} ({item.reason})", markup=False, soft_wrap=True)
        return typer.confirm(f"{len(wanted)} node{'s' if len(wanted) > 1 else ''}: do it?")

    healing = heal(place, issues, options.mode, options.share, approve if options.asks else None, node)
    notes += healing.notes
    if as_json:
        print(json.dumps({**healing.to_json(), "notes": notes}), flush=True)
    else:
        show(healing, console, notes)
    return healing


def watch(
    place_now: Callable[[], HealingScope],
    options: Options,
    node: str | None,
    report: Path | None,
    prometheus: str | None,
    console: Console,
    as_json: bool,
) -> None:
    """Repeat until Ctrl-C, through temporary failures of the scheduler or the file system."""
    try:
        while True:
            try:
                one_pass(place_now(), options, node, report, prometheus, console, as_json)
            except BrokenPipeError:  # the reader of the output is gone
                raise
            except (CratonError, OSError) as error:
                console.print(f"{error}; retrying in {setting(options.every_seconds)}", style="yellow", markup=False)
            time.sleep(options.every_seconds)
    except KeyboardInterrupt:
        console.print("ended; actions already taken stay in effect", markup=False)


def show(healing: Healing, console: Console, notes: Sequence[str] = ()) -> None:
    if healing.mode == "off":
        console.print(f"healing of {healing.cluster} is off (`health: {{heal: off}}`)", markup=False)
        return
    out = f"{healing.num_out} of {healing.total} nodes out of service (limit {percent(healing.share)})"
    if not healing.decisions:
        console.print(f"{healing.cluster}: all nodes healthy; {out}", markup=False)
    else:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("NODE", "NEEDS", "WHY", "WHAT HAPPENS"):
            table.add_column(column, no_wrap=column in ("NODE", "NEEDS"), overflow="fold")
        numbers = {entry.node: entry.id for entry in healing.actions}
        for item in healing.decisions:
            happens = _happens(item, healing, numbers.get(item.node))
            needs = f"{item.escalated_from} → {item.action}" if item.escalated_from else item.action
            table.add_row(item.node, Text(needs, style=STYLES[item.action]), Text(item.reason), Text(happens))
        console.print(table, highlight=False)
        for node, moves in healing.moves.items():
            for move in moves if healing.mode == "advise" or node in numbers else ():
                console.print(f"  {node}: {move}", markup=False, soft_wrap=True, highlight=False)
        console.print(f"{healing.cluster}: {out}", markup=False)
    for failure in healing.failures:
        console.print(failure, style="red", markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"  ({note})", markup=False, soft_wrap=True, highlight=False)
    if healing.mode == "advise" and any(decision.node_action != "none" for decision in healing.decisions):
        console.print("nothing was changed; `--mode act` applies the actions", style="dim", markup=False)


def show_history(place: HealingScope, console: Console, as_json: bool) -> None:
    ledger = Ledger(place.root)
    entries = ledger.entries()
    worst = repeat_offenders(entries, time.time())
    if as_json:
        print(
            json.dumps({"ledger": str(ledger.path), "entries": [asdict(entry) for entry in entries], "lemons": worst})
        )
        return
    if not entries:
        console.print(f"no entries in {ledger.path} yet", markup=False, soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("WHEN", "NODE", "ENTRY", "ID", "NEEDS", "RUN", "WHAT"):
        table.add_column(column, no_wrap=column != "WHAT", overflow="fold")
    for item in entries[-SHOWN_ENTRIES:]:
        when = datetime.fromtimestamp(item.time).strftime("%Y-%m-%d %H:%M")
        kind = item.kind.replace("_", " ")
        table.add_row(when, item.node, kind, item.id, item.action, item.run, Text(item.text))
    console.print(table, highlight=False)
    for node, count in worst.items():
        console.print(f"{node}: had issues {count} time{'s' if count > 1 else ''}", markup=False)


def _happens(decision: Decision, healing: Healing, number: str | None) -> str:
    """Return what happens to a node, or why a planned action did not happen."""
    if decision.node_action == "none":
        return decision.why_not or _left(decision)
    if healing.mode == "advise":
        return _describe_action(decision)
    if number is not None:
        return f"{_describe_action(decision)} (done, `--undo {number}`)"
    has_failed = any(failure.startswith(f"{decision.node}: ") for failure in healing.failures)
    return "failed: see below" if has_failed else "not done"


def _describe_action(decision: Decision) -> str:
    if decision.node_action == "hand_over":
        return f"is handed over to be {'replaced' if decision.action == 'replace' else 'rebooted'}"
    if decision.node_action == "move":
        return f"is out of service already, {', '.join(decision.runs)} move off it"
    moving = (
        f", {', '.join(decision.runs)} move{'s' if len(decision.runs) == 1 else ''} off it" if decision.runs else ""
    )
    return f"is taken out of service{moving}"


def _left(decision: Decision) -> str:
    if decision.action == "observe":
        return "no action now"
    if decision.action == "restart":
        return "its run restarts automatically"
    return f"is out of service already{f' (`--undo {decision.mark}`)' if decision.mark else ''}"
