"""`craton bench plan` of a file with inference measurements: its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton.formatting import percent, signed_percent

if TYPE_CHECKING:
    from rich.console import Console

TITLES = {"group": "leave one group out", "engine": "leave one engine out", "none": "in sample"}


def plan_inference(cases: Path, holdout: str, given: int, as_json: bool) -> None:
    """Predict every measurement of the file and print the errors."""
    import json
    from typing import cast

    from craton.bench import bench_inference, inference_json, inference_summary
    from craton.cli.views.progress import progress
    from craton.errors import CratonError

    if holdout not in TITLES:
        raise CratonError(
            f"--holdout {holdout!r} is not allowed for inference measurements; choose {', '.join(TITLES)}"
        )
    if given:
        raise CratonError("--given is for training runs; use `craton calibrate` with measurements of your server")
    with progress("fits") as report:
        bench = bench_inference(cases, cast(Any, holdout), report)
    if as_json:
        print(json.dumps(inference_json(bench)))
        return
    _print(inference_summary(bench), len(bench.results))
    from rich.console import Console

    console = Console()
    if bench.skipped:
        console.print(f"\nskipped {len(bench.skipped)}:", highlight=False)
        for entry in bench.skipped:
            console.print(f"  {entry.id}: {entry.reason}", highlight=False, markup=False)


def _print(summary: dict[str, Any], count: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{count} predictions, {TITLES[summary['holdout']]}; rows with a stated layout", title_justify="left"
    )
    table.add_column("")
    for name in ("n", "median", "p90", "bias", "inside 80%", "high/low"):
        table.add_column(name, justify="right")
    views = {**summary["stated layout"], "layout searched": summary["open layout"]}
    for view, entries in views.items():
        for index, (name, entry) in enumerate(entries.items()):
            table.add_row(
                f"{view}: {name}" if view == "layout searched" else name,
                str(entry["n"]),
                percent(entry["median"]),
                percent(entry["p90"]),
                signed_percent(entry["bias"]),
                percent(entry["inside"]),
                f"{entry['width']:.2f}",
                end_section=index == len(entries) - 1,
            )
    console.print(table)
    print_choices(console, summary["decisions"])
    console.print(
        f"skipped of the {summary['rows'] - summary['contradictory']} rows that do not contradict themselves: "
        f"{percent(summary['skipped share of consistent rows'])}",
        highlight=False,
    )


def print_choices(console: Console, choices: dict[str, Any]) -> None:
    """Print how often the planner's choice among measured layouts is right."""
    if choices["groups"]:
        console.print(
            f"decisions: the planner's choice is within 5% of the best measured in {choices['right']} of "
            f"{choices['groups']} groups with three or more layouts",
            highlight=False,
        )
