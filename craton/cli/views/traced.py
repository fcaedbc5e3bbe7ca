"""`craton plan --trace`: compare the traced step with the planned one.

The trace runs in a separate process (`python -m craton.ml.trace`), because it needs torch and a fake process group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from craton import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from craton.planning import Plan

MAX_FINDINGS = 12  # shown; --json has all


def run_trace(job: Path, plan: Plan, ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Return the trace of a planned job and its comparison with the plan, as `python -m craton.ml.trace` prints them.
    `ranks`: the ranks to trace; else one per distinct pipeline stage."""
    from craton.cli.views.progress import progress
    from craton.extras import require_extra
    from craton.planning import PlanError

    require_extra("train", "`craton plan --trace`, which runs the real training step,")
    for rank in ranks:  # before a process is started that would say the same, seconds later
        if not 0 <= rank < plan.layout.world:
            raise PlanError(
                f"--trace: rank {rank} does not exist; {plan.layout} has ranks 0 to {plan.layout.world - 1}"
            )
    with progress("tracing") as report:
        return _read_trace(job, plan, ranks, report)


def render_trace(traced: dict[str, Any], console: Console) -> None:
    """Print the trace next to the plan, then the differences."""
    from rich.table import Table
    from rich.text import Text

    trace, comparison = traced["trace"], traced["comparison"]
    verdict = ("agrees with the plan", "green") if comparison["agrees"] else ("differs from the plan", "bold yellow")
    numbers = ", ".join(f"{rank['rank']:,}" for rank in trace["ranks"])
    which = "rank" if len(trace["ranks"]) == 1 else "ranks"
    title = Text.assemble(("Trace  ", "bold"), "the real step on fake ranks ", verdict)
    title.append(f": {which} {numbers} of {trace['world']:,}, {formatting.whole_duration(trace['seconds'])}")
    console.print()
    console.print(title, highlight=False)
    for rank in comparison["ranks"]:
        stage = f"stage {rank['stage']}: " if len(comparison["ranks"]) > 1 else ""
        _print_rows(
            console,
            f"  {stage}collectives per step: bytes in calls",
            rank["collectives"],
            formatting.stored,
            True,
        )
        _print_rows(
            console, f"  {stage}FLOPs per step", rank["flops"], lambda flops: formatting.with_prefix(flops, "FLOP")
        )
    _print_rows(console, "  peak memory", comparison["memory"], formatting.memory)
    worst = max(trace["ranks"], key=lambda rank: rank["memory_bytes"])
    console.print(f"  peak in the {worst['memory_instant']}, rank {worst['rank']:,}", highlight=False)
    findings = [*trace["findings"], *comparison["findings"]]
    lines = [f"{finding['text']}: {finding['relief']}" for finding in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"and {len(findings) - MAX_FINDINGS} more; --json has all")
    for line in lines:
        grid = Table.grid()
        grid.add_row(Text("! ", style="bold yellow"), Text(line))
        console.print(grid, highlight=False)


def _read_trace(job: Path, plan: Plan, ranks: Sequence[int], report: Callable[..., None]) -> dict[str, Any]:
    import json
    import subprocess
    import sys
    from dataclasses import asdict

    from craton.planning import PlanError

    command = [sys.executable, "-m", "craton.ml.trace", str(job), "--layout", json.dumps(asdict(plan.layout))]
    command.append(f"--ranks={','.join(str(rank) for rank in ranks)}")
    answer: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            if "what" in answer:
                report(answer["done"], answer["of"], answer["what"])
    if "error" in answer:
        raise PlanError(f"--trace: {answer['error']}")
    if process.returncode:
        raise OSError(f"--trace: the traced step failed with exit code {process.returncode}; its traceback is above")
    return answer


def _print_rows(
    console: Console,
    title: str,
    rows: list[dict[str, Any]],
    write: Callable[[float], str],
    are_calls: bool = False,
) -> None:
    from rich.table import Table
    from rich.text import Text

    head = Text(title, style="dim")
    if are_calls:  # too long for a column header
        console.print(head)
        head = Text("")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(head, min_width=30, no_wrap=True)
    for name in ("planned", "traced", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [write(row[side]) for side in ("planned", "traced")]
        difference = _difference(row["planned"], row["traced"])
        if are_calls:
            counts = [row["planned_count"], row["traced_count"]]
            cells = [f"{size} in {calls:,.0f}" for calls, size in zip(counts, cells, strict=True)]
            if row["is_negligible"]:
                difference = "negligible"
        style = "" if row["agrees"] else "bold yellow"
        table.add_row(Text(f"  {row['name']}"), *cells, Text(difference, style=style))
    console.print(table, highlight=False)


def _difference(planned: float, traced: float) -> str:
    return formatting.signed_percent(traced / planned - 1) if planned else "not planned" if traced else "±0%"
