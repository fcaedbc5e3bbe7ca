"""The plan of a load in the terminal: the verdict, what limits it, what it costs, and the other deployments."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from craton import formatting
from craton.planning.report import load_findings as findings
from craton.planning.report.load_table import deployment_columns, deployment_heading, order_text, seconds_text
from craton.planning.report.serving_terminal import print_field
from craton.planning.serving.search import Deployment, LoadPlan, best_of_each

SHOWN_ROWS = 8
FULL_NAMES_WIDTH, DETAILED_WIDTH = 100, 120  # columns of a terminal


def render_load(plan: LoadPlan, console: Console) -> None:
    """Print the whole plan."""
    status = ("HOLDS", "bold green") if plan.holds else ("DOES NOT HOLD", "bold red")
    console.print(Text.assemble((plan.model, "bold"), f" on {plan.engine}  ", status), highlight=False)
    console.print(Text(findings.load_verdict(plan)), highlight=False)
    for title, text in fields(plan):
        print_field(console, title, text)
    for warning in findings.warnings(plan):
        print_field(console, "!", warning, style="yellow")
    console.print(Text("\nLatency at this load", style="bold"), highlight=False)
    console.print(_latency_table(plan.chosen), highlight=False)
    rows = best_of_each(plan.deployments, SHOWN_ROWS)
    console.print(Text(f"\nDeployments, {deployment_heading(plan, len(rows))}", style="bold"), highlight=False)
    console.print(_deployment_table(plan, rows, console.width), highlight=False)


def fields(plan: LoadPlan) -> list[tuple[str, str]]:
    """Return the titled lines below the verdict."""
    row = plan.chosen
    lines = [
        ("saturation", findings.saturation_text(plan)),
        ("time", findings.bottleneck_text(row)),
        ("throughput", findings.throughput_text(row)),
        ("precision", findings.precision_text(plan)),
        ("KV cache", findings.kv_text(row)),
        ("cost", findings.cost_text(plan)),
    ]
    if drafts := findings.drafts_text(plan):
        lines.append(("drafts", drafts))
    if burst := findings.burst_text(plan):
        lines.append(("start burst", burst))
    if row.kv_transfer_seconds is not None:
        transfer = f"{formatting.duration(row.kv_transfer_seconds)} per prompt over {row.kv_transfer_link}, within TTFT"
        lines.append(("KV transfer", transfer))
    lines += [("KV tier", text) for text in findings.tier_texts(plan)]
    lines += [("experts", text) for text in plan.notes]
    lines.append(("order", order_text(plan)))
    return [*lines, ("basis", findings.basis_text(plan))]


def _latency_table(row: Deployment) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("")
    names = list(row.ttft)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("80% interval of p95")
    for name, title in findings.LATENCY_NAMES.items():
        latency = getattr(row, name)
        table.add_row(title, *(seconds_text(latency[key].value) for key in names), findings.range_text(latency["p95"]))
    return table


def _deployment_table(plan: LoadPlan, rows: Sequence[Deployment], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    columns = deployment_columns(plan, detailed=width >= DETAILED_WIDTH, short=width < FULL_NAMES_WIDTH)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            overflow="fold",
            no_wrap=column.title != "deployment",
        )
    for row in rows:
        table.add_row(*(column.text(row) for column in columns), style="bold" if row is plan.chosen else "")
    return table
