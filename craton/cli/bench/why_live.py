"""`craton bench why --live`: run the live faults and healthy runs, and print the scores by family."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from craton.cli.views.progress import progress
from craton.formatting import counted, percent

if TYPE_CHECKING:
    from craton.bench.why.faults import HealthyRecord, LiveScore, Tally


def bench_live(families: str, only: Sequence[str], healthy: int, keep: Path | None, as_json: bool) -> None:
    """Run the chosen faults and so many healthy runs; exit with code 1 below a bar."""
    from craton.bench.why.faults import chosen_faults, run_faults, run_healthy, score

    faults = chosen_faults(families, only)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="craton-bench-why-")))
        with progress("live faults") as report:
            records = run_faults(faults, folder, keep or folder / "kept", report)
        quiet: list[HealthyRecord] = []
        if healthy:
            with progress("healthy runs") as report:
                quiet = run_healthy(healthy, folder, report)
    scores = score(records)
    alarms = [record for record in quiet if record.alarms]
    broken = [record for record in quiet if record.error]
    if as_json:
        healthy_json = {
            "runs": len(quiet),
            "false_alarms": [{"run": record.name, "sentence": record.alarms[0].sentence} for record in alarms],
            "errors": [f"{record.name}: {record.error}" for record in broken],
        }
        print(json.dumps({**scores.to_json(), "healthy": healthy_json}, default=str))
    else:
        _print(Console(), scores, quiet)
    if scores.failures or alarms or broken:
        raise typer.Exit(1)


def _print(console: Console, scores: LiveScore, quiet: Sequence[HealthyRecord]) -> None:
    table = Table(title=counted(scores.total.faults, "live fault"), title_justify="left")
    for name in ("", "faults", "layer", "victim", "remedy", 'false "runs well"', "early alarms", "seconds"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for family, tally in scores.families.items():
        table.add_row(family, *_cells(tally))
    table.add_section()
    table.add_row("all", *_cells(scores.total))
    console.print(table)
    total = scores.total
    console.print(
        f"confidence of 0.9 and more: {total.confident_right} of {total.confident} right (target 90%) · targets: layer "
        '85%, victim 85%, remedy 80%, false "runs well" 0, median time to a right verdict 10 s',
        highlight=False,
    )
    for item in scores.judgements:
        if not (item.is_layer_right and item.is_victim_right is not False and item.is_remedy_useful):
            parts = {"layer": item.is_layer_right, "victim": item.is_victim_right, "remedy": item.is_remedy_useful}
            wrong = ", ".join(name for name, is_right in parts.items() if is_right is False)
            message = f"  missed: {item.family} {item.name} ({wrong}): expected {item.expected}; said {item.said}"
            console.print(message, highlight=False, markup=False)
    for name, reason in scores.not_run.items():
        console.print(f"  not run: {name}: {reason}", highlight=False, markup=False)
    for name, error in scores.errors.items():
        console.print(f"  the bench failed: {name}: {error.splitlines()[0]}", highlight=False, markup=False)
    if quiet:
        alarms = [record for record in quiet if record.alarms]
        console.print(f"healthy runs: {len(alarms)} of {len(quiet)} with a false alarm (target 0)", highlight=False)
        for record in alarms:
            console.print(f"  {record.name}: {record.alarms[0].sentence}", highlight=False, markup=False)
        for record in quiet:
            if record.error:
                console.print(f"  the bench failed: {record.name}: {record.error}", highlight=False, markup=False)
    if scores.failures:
        console.print(f"missed targets: {', '.join(scores.failures)}", highlight=False)


def _cells(tally: Tally) -> list[str]:
    def share(right: int, of: int) -> str:
        return f"{right} ({percent(right / of)})" if of else "-"

    return [
        str(tally.faults),
        share(tally.layers, tally.faults),
        share(tally.victims, tally.judged_victims),
        share(tally.remedies, tally.faults),
        str(tally.false_health),
        str(tally.early_alarms),
        "-" if tally.median_seconds is None else f"{tally.median_seconds:.1f}",
    ]
