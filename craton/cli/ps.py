"""`craton ps`: every run with its state, progress, speed against its plan, goodput and dollars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from craton.telemetry import RunDirectory, RunSummary


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON.")] = False,
) -> None:
    """List the runs, newest first."""
    import json

    from craton.cli.live import make_console
    from craton.cli.outcome import goodput_text, ledger_text, recoveries_json, recoveries_text, summary_json
    from craton.orchestration import MOVING, read_recoveries, settled_summaries
    from craton.telemetry import find_run, list_runs, runs_root, summarize

    summaries, recoveries, unreadable = [], {}, {}
    for run in list_runs():
        try:
            summary = summarize(run)
            recoveries[run.name] = read_recoveries(run)
            summaries.append(summary)
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
    console.print(_table(summaries))
    for summary in summaries:
        back = recoveries[summary.name]
        if summary.ledger and (back or summary.state in MOVING):
            told = f"{summary.name}: {ledger_text(summary)} · {goodput_text(summary)}"
            console.print(told, soft_wrap=True, markup=False)
        if summary.state in ("starting", "running", "stopping"):
            _print_server(find_run(summary.path), console)
        if back:
            console.print(f"{summary.name}: {recoveries_text(back)}", style="yellow", soft_wrap=True, markup=False)
        if summary.state == "waiting":
            console.print(f"{summary.name}: waits: {summary.message}", style="cyan", soft_wrap=True, markup=False)
        if summary.state in ("failed", "lost") and summary.message:
            reason = summary.message.splitlines()[0]
            console.print(f"{summary.name}: {reason}", style="red", soft_wrap=True, markup=False)


def _print_server(run: RunDirectory, console: Console) -> None:
    """Where a server is, and how it does now; nothing for other runs."""
    from craton.cli.server_view import state_line
    from craton.job import load_job
    from craton.orchestration import ServerWatch, address_of, is_server

    if is_server(run):
        server = ServerWatch(address_of(load_job(run.job_path)))
        told = f"{state_line(run.name, server.look())} · {server.address.url}"
        console.print(told, soft_wrap=True, markup=False)


def _table(summaries: list[RunSummary]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from craton.cli import figures
    from craton.cli.live import STATE_STYLES, change_style

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("RUN", "STATE", "GEN", "STEP", "%", "ETA", "TOK/S", "vs PLAN", "GOODPUT", "$"):
        table.add_column(column, justify="left" if column in ("RUN", "STATE") else "right", no_wrap=column != "RUN")
    for each in summaries:
        change = figures.change(each.tokens_per_second, each.plan.get("tokens_per_second"))
        of = f"/{each.steps:,}" if each.steps else ""
        table.add_row(
            each.name,
            Text(each.state, style=STATE_STYLES[each.state]),
            str(each.generation),
            f"{each.step:,}{of}",
            figures.percent(each.progress).removesuffix(" %"),
            figures.remaining(each.eta_seconds),
            figures.amount(each.tokens_per_second),
            Text(change, style="" if change == figures.NONE else change_style(change)),
            figures.percent(each.goodput),
            figures.dollars(each.cost_dollars),
        )
    return table
