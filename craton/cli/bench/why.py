"""`craton bench why`: how often `craton why` is right about faults that were put there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from craton.formatting import percent

if TYPE_CHECKING:
    from rich.console import Console

    from craton.bench.why import Score


def why(
    seed: Annotated[
        int | None,
        typer.Option(help="What victims and strengths are drawn from; today's date.", show_default=False),
    ] = None,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Also break real processes on this machine.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print scores and every outcome as JSON.")] = False,
) -> None:
    """Score `craton why` on faults of every layer, on healthy runs, and on runs of which nobody can tell."""
    import json
    import tempfile
    from pathlib import Path

    from rich.console import Console

    from craton.bench.why import live_outcomes, seed_of_today, simulated_outcomes
    from craton.bench.why import score as scored
    from craton.cli.views.progress import progress

    chosen = seed_of_today() if seed is None else seed
    outcomes = []
    with progress("scenarios") as report:
        outcomes += simulated_outcomes(chosen, report)
    if live:
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
    words = {"quiet": "nothing wrong", "single": "one fault", "double": "two faults", "blind": "cannot be told"}
    for group, (right, of) in score.groups.items():
        table.add_row(words[group], str(right), str(of), percent(right / of) if of else "")
    table.add_section()
    for layer, (right, of) in score.layers.items():
        table.add_row(f"  {layer}", str(right), str(of), percent(right / of) if of else "")
    console.print(table)
    confusion = Table(title="True layer (rows) and what was said; two faults at once left out", title_justify="left")
    confusion.add_column("")
    for name in score.confusion:
        confusion.add_column(name, justify="right")
    for name, row in score.confusion.items():
        confusion.add_row(name, *(str(count) if count else "·" for count in row.values()))
    console.print(confusion)
    console.print(
        f"right layer {percent(score.layer_share)} (bar 95%) · right node or rank {percent(score.victim_share)} of "
        f"{score.num_victims} (bar 90%) · false alarms {score.false_alarms} of {score.num_quiet} (bar 0) · "
        f"cannot tell, rightly {percent(score.blind_share)}",
        highlight=False,
    )
    bins = " · ".join(
        f"{item.mean_confidence:.2f} said, {item.right_share:.2f} right ({item.count})" for item in score.bins
    )
    console.print(f"Brier score {score.brier:.3f}; {bins}" if score.brier is not None else bins, highlight=False)
    for miss in score.misses:
        console.print(f"  missed: {miss}", highlight=False, markup=False)
