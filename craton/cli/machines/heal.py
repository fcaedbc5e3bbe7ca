"""`craton heal [CLUSTER|RUN]`: take bad nodes out of service, move runs off them, and undo both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def heal(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLUSTER|RUN]",
            help="Cluster file, or a run on that cluster \\[default: the newest run].",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="off|advise|act",
            help="off: do nothing; advise: report; act: repair \\[default: the cluster file's, else advise].",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Check only this node, by its name in the scheduler.", show_default=False),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Maximum share of nodes out of service \\[default: the cluster file's, else 10%].",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Output of `craton doctor NODES --json` to use as evidence.", show_default=False
        ),
    ] = None,
    undo: Annotated[str | None, typer.Option(metavar="ID", help="Undo an action by ID.", show_default=False)] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show the ledger: incidents, actions, repeat offenders.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="With --watch: time between two checks.")] = "60s",
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Prometheus with the nodes' metrics \\[default: $CRATON_PROMETHEUS]."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Act without asking for confirmation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and actions as JSON.")] = False,
) -> None:
    """Find bad nodes and advise; with --mode act, drain them and move runs off them. Every action can be undone."""
    import json

    from craton.cli.views import heal as heal_view
    from craton.cli.views.live import make_console
    from craton.observability.healing import place_of
    from craton.observability.healing import undo as undo_action

    console = make_console(as_json)
    place = place_of(target)
    if undo is not None:
        done = undo_action(place, undo)
        print(json.dumps({"undone": undo, "done": done})) if as_json else console.print("; ".join(done), markup=False)
        return
    if history:
        heal_view.show_history(place, console, as_json)
        return
    options = heal_view.options_of(place, mode, share, every, can_ask=not (watch or as_json), asks=not yes)
    if node is not None:
        heal_view.check_node(place, node)
    if watch:
        heal_view.watch(lambda: place_of(target), options, node, report, prometheus, console, as_json)
        return
    healing = heal_view.one_pass(place, options, node, report, prometheus, console, as_json)
    raise typer.Exit(0 if healing.is_well else 1)
