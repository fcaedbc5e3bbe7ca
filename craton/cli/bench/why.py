"""`craton bench why`: measure how often `craton why` is right about injected faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from craton.errors import CratonError
from craton.formatting import percent

if TYPE_CHECKING:
    from rich.console import Console

    from craton.bench.why import Score


def why(
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed for the victims and severity of faults \\[default: today's date].", show_default=False
        ),
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Break real runs in many ways and score only those; --no-live: simulated scenarios only "
            "\\[default: simulated scenarios and a few with real processes].",
            show_default=False,
        ),
    ] = None,
    families: Annotated[
        str,
        typer.Option(help="With --live: all, first, second, third, fourth, fifth, or families separated by commas."),
    ] = "all",
    only: Annotated[
        list[str] | None, typer.Option(help="With --live: only the fault of this name; repeatable.", show_default=False)
    ] = None,
    healthy: Annotated[int, typer.Option(min=0, help="With --live: number of healthy runs to watch as well.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(help="With --live: folder for snapshots, verdicts and logs of each fault.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores and every outcome as JSON.")] = False,
) -> None:
    """Score `craton why` on faults of every layer, on healthy runs, and on runs without enough evidence."""
    import json
    import tempfile

    from rich.console import Console

    if live:
        from craton.cli.bench.why_live import bench_live

        bench_live(families, only or (), healthy, keep, as_json)
        return
    if only or healthy or keep or families != "all":
        raise CratonError("--families, --only, --healthy and --keep belong to --live; add it")
    from craton.bench.why import live_outcomes, seed_of_today, simulated_outcomes
    from craton.bench.why import score as scored
    from craton.cli.views.progress import progress

    chosen = seed_of_today() if seed is None else seed
    outcomes = []
    with progress("scenarios") as report:
        outcomes += simulated_outcomes(chosen, report)
    if live is None:
        with tempfile.TemporaryDirectory(prefix="craton-bench-why-") as folder, progress("live scenarios") as report:
            outcomes += live_outcomes(chosen, Path(folder), progress=report)
    score = scored(outcomes)
    if as_json:
        print(json.dumps({"seed": chosen, **score.to_json(), "outcomes": [outcome.to_json() for outcome in outcomes]}))
    else:
        _print(Console(), score, chosen)
    if not score.is_good:
        raise typer.Exit(1)


def _print(console: Console, score: Score, seed: int) -> None:
    from rich.table import Table

    table = Table(
        title=f"{score.num_scenarios} scenarios, {score.num_live} of them live, seed {seed}", title_justify="left"
    )
    for name in ("", "right", "of", ""):
        table.add_column(name, justify="left" if not name else "right")
    words = {"quiet": "nothing wrong", "single": "one fault", "double": "two faults", "blind": "not enough evidence"}
    for group, (right, of) in score.groups.items():
        table.add_row(words[group], str(right), str(of), percent(right / of) if of else "")
    table.add_section()
    for layer, (right, of) in score.layers.items():
        table.add_row(f"  {layer}", str(right), str(of), percent(right / of) if of else "")
    console.print(table)
    shown = {"cannot tell": words["blind"]}  # the JSON keeps the key
    confusion = Table(
        title="True layer (rows) against diagnosed layer; without the two-fault scenarios", title_justify="left"
    )
    confusion.add_column("")
    for name in score.confusion:
        confusion.add_column(shown.get(name, name), justify="right")
    for name, row in score.confusion.items():
        confusion.add_row(shown.get(name, name), *(str(count) if count else "·" for count in row.values()))
    console.print(confusion)
    console.print(
        f"right layer {percent(score.layer_share)} (target 95%) · right node or rank {percent(score.victim_share)} of "
        f"{score.num_victims} (target 90%) · false alarms {score.false_alarms} of {score.num_quiet} (target 0) · "
        f'"not enough evidence", rightly {percent(score.blind_share)}',
        highlight=False,
    )
    bins = " · ".join(
        f"{item.mean_confidence:.2f} stated, {item.right_share:.2f} right ({item.count})" for item in score.bins
    )
    console.print(f"Brier score {score.brier:.3f}; {bins}" if score.brier is not None else bins, highlight=False)
    for miss in score.misses:
        console.print(f"  missed: {miss}", highlight=False, markup=False)
