"""`craton bench plan CASES.json`: measure how well the planner predicts published runs. `craton bench recover`: measure
how fast a broken training recovers. `craton bench serve` and `craton bench why` are in serve.py and why.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craton.cli.bench.inference import plan_inference, print_choices
from craton.cli.bench.serve import serve
from craton.cli.bench.why import why
from craton.formatting import percent, signed_percent

if TYPE_CHECKING:
    from rich.console import Console

    from craton.bench.recovery import RecoveryCase

app = typer.Typer(help="Benchmark Craton itself: planner, recovery, serving, diagnosis.", no_args_is_help=True)
app.command("serve")(serve)
app.command("why")(why)


@app.callback()
def bench() -> None:
    """Benchmark Craton itself: planner, recovery, serving, diagnosis."""


@app.command("plan")
def plan(
    cases: Annotated[
        Path,
        typer.Argument(
            metavar="CASES",
            help="JSON file with published training runs or inference measurements.",
            show_default=False,
        ),
    ],
    holdout: Annotated[
        str,
        typer.Option(
            help="Runs to hold out of the fit: group (same family, GPU and model), family, model (same shape), gpu, "
            "release (of a family), or none; of inference files group, engine or none. Runs that Craton does not ship "
            "are never in the fit."
        ),
    ] = "group",
    given: Annotated[
        int, typer.Option(help="With --holdout family: number of the family's runs given to the calibration.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print cases, skipped runs and summary as JSON.")] = False,
) -> None:
    """Predict every run of a file and print the prediction errors: training runs, or measurements of servers."""
    import json
    from typing import cast

    from rich.console import Console

    from craton.bench import HOLDOUT_KEYS, bench_json, bench_plan, is_inference_file
    from craton.bench import summary as summarise
    from craton.cli.views.progress import progress
    from craton.errors import CratonError

    if is_inference_file(cases):
        plan_inference(cases, holdout, given, as_json)
        return
    if holdout not in (*HOLDOUT_KEYS, "none"):
        raise CratonError(f"--holdout {holdout!r} is not allowed; choose {', '.join(HOLDOUT_KEYS)} or none")
    if given < 0 or (given and holdout != "family"):
        raise CratonError("--given takes a number of runs and requires --holdout family")
    with progress("fits") as report:
        result = bench_plan(cases, cast(Any, holdout), given, report)
    if as_json:
        print(json.dumps(bench_json(result)))
        return
    console = Console()
    _print(console, summarise(result), len(result.results))
    if result.skipped:
        console.print(f"\nskipped {len(result.skipped)}:", highlight=False)
        for entry in result.skipped:
            console.print(f"  {entry.quality or '-'}  {entry.id}: {entry.reason}", highlight=False, markup=False)


@app.command("recover")
def recover(
    ranks: Annotated[
        list[int] | None, typer.Option(help="Number of ranks, on two nodes of this machine; repeatable \\[default: 4].")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of faults per case.")] = 5,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="respawn (a killed rank), spare (a lost node), hang or torchrun; repeatable \\[default: all]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every measurement as JSON.")] = False,
) -> None:
    """Inject faults into a small training on this machine, and measure the time to recover."""
    import json
    import tempfile

    from rich.console import Console

    from craton.bench.recovery import CASES as RECOVERY_CASES
    from craton.bench.recovery import bench_recover
    from craton.cli.views.progress import progress
    from craton.extras import require_extra

    require_extra("train", "`craton bench recover`")
    with tempfile.TemporaryDirectory(prefix="craton-bench-") as folder, progress("recoveries") as report:
        cases = bench_recover(
            Path(folder),
            ranks or [4],
            rounds,
            case or RECOVERY_CASES,
            lambda label, done, total: report(done, total, label),
        )
    if as_json:
        print(json.dumps([entry.to_json() for entry in cases]))
        return
    _print_recoveries(Console(), cases)


def _print_recoveries(console: Console, cases: list[RecoveryCase]) -> None:
    from statistics import median

    from rich.table import Table

    from craton.bench.recovery import SHOWN_KINDS as RECOVERY_KINDS

    table = Table(title="From the fault to the end of the next step, medians in seconds", title_justify="left")
    table.add_column("")
    for entry in cases:  # one column per case: one row each would not fit into a terminal
        table.add_column(f"{entry.name}\n{entry.ranks} ranks", justify="right")
    table.add_row("seconds", *(f"[bold]{entry.median:.2f}[/bold]" for entry in cases))
    table.add_row("range", *(f"{min(entry.seconds):.1f}–{max(entry.seconds):.1f}" for entry in cases))
    table.add_row("noticed", *(f"{median(entry.noticed):.2f}" if entry.noticed else "" for entry in cases))
    kinds = [entry.median_kinds() if entry.kinds else {} for entry in cases]
    for kind in RECOVERY_KINDS:
        table.add_row(kind, *(f"{item[kind]:.2f}" if kind in item else "" for item in kinds))
    table.add_row("(one step)", *(f"{entry.step_seconds:.2f}" for entry in cases))
    console.print(table)
    console.print(
        "respawn: a rank is killed · spare: a node is lost, a spare replaces it · hang: a rank stops making progress · "
        "torchrun: the same training under torchrun, which restarts all ranks from a checkpoint on disk",
        highlight=False,
    )


def _print(console: Console, summary: dict[str, Any], count: int) -> None:
    from rich.table import Table

    left_out = summary["holdout"]
    title = "in sample" if left_out == "none" else f"leave one {'GPU' if left_out == 'gpu' else left_out} out"
    handed = f", {summary['given']} of its runs given" if summary["given"] else ""
    table = Table(title=f"{count} predictions, {title}{handed}", title_justify="left")
    table.add_column("")
    for name in ("n", "median", "mean", "p90", "bias", "inside 80%", "high/low"):
        table.add_column(name, justify="right")
    rows = [(name, summary[name]) for name in ("all", "dense quality A", "moe quality A and B", "256 GPUs or more")]
    for index, (name, entry) in enumerate(rows):
        _row(table, name, entry, end_section=index == len(rows) - 1)
    for view, entries in summary["by"].items():
        for index, (name, entry) in enumerate(entries.items()):
            _row(
                table,
                f"{view}: {name}" if index == 0 else f"{' ' * len(view)}  {name}",
                entry,
                index == len(entries) - 1,
            )
    console.print(table)
    for name in ("median of family medians", "dense quality A, median of family medians"):
        if summary[name] is not None:
            console.print(f"{name}: {percent(summary[name])}", highlight=False)
    print_choices(console, summary["decisions"])
    console.print(
        f"skipped of quality A and B: {percent(summary['skipped share of quality A and B'])}", highlight=False
    )


def _row(table: Any, name: str, entry: dict[str, float] | None, end_section: bool = False) -> None:
    if entry is None:
        return
    table.add_row(
        name,
        str(entry["n"]),
        *(percent(entry[key]) for key in ("median", "mean", "p90")),
        signed_percent(entry["bias"]),
        percent(entry["inside"]),
        f"{entry['width']:.2f}",
        end_section=end_section,
    )
