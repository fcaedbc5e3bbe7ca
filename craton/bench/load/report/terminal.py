"""The report for a terminal of 80 columns or more."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from craton.bench.load.benchmark import Report
from craton.bench.load.report import findings


def print_report(report: Report, console: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False)

    summary = report.shown.summary
    target = report.settings.target
    say(f"{report.model} at {target.base}{target.path}", "bold")
    say(findings.load_text(report), "dim")
    say("")
    if report.saturation is not None:
        console.print(_levels(report))
        say(findings.saturation_text(report), "bold")
        say("")
        say(f"At {report.shown.load}:")
    console.print(_latencies(report))
    say("")
    for name, value in findings.counts(summary):
        say(f"{name:<18}{value}")
    for failure in summary.failures:
        say(f"{'failed':<18}{failure.count:,} × {failure.kind}" + f": {failure.example}" * bool(failure.example), "red")
    if report.settings.objectives is not None:
        say(f"{'objectives':<18}{report.settings.objectives}")
    say(findings.MEASURED_FROM, "dim")
    for note in report.notes:
        say(f"note: {note}", "yellow")


def _latencies(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99"):
        table.add_column(name, justify="right", min_width=9)
    for name, item in findings.latencies(report.shown.summary):
        table.add_row(name, *findings.latency_cells(item))
    return table


def _levels(report: Report) -> Table:
    with_goodput = report.settings.objectives is not None
    columns = findings.LEVEL_COLUMNS if with_goodput else findings.LEVEL_COLUMNS[:-1]
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("")
    for level in report.levels:
        cells = findings.level_cells(level)[: len(columns)]
        table.add_row(*cells, level.trouble, style="dim" if level.trouble else None)
    return table
