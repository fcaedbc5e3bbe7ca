"""`craton heal [CLUSTER|RUN]`: bad nodes taken out of service, runs moved off them, and all of it undone again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def heal(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLUSTER|RUN]",
            help="A cluster file, or a run, for the cluster that it is on; the newest run.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="off|advise|act", help="What may be done \\[default: as the cluster file says, else advise]."
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Only this node, as the scheduler calls it.", show_default=False)
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Of all nodes, at most so many out of service \\[default: as the cluster file says, else 10%].",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `craton doctor NODES --json` printed.", show_default=False),
    ] = None,
    undo: Annotated[
        str | None, typer.Option(metavar="ID", help="Undo an action by its number.", show_default=False)
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show the ledger: incidents, actions, repeat offenders.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="Between two looks of --watch.")] = "60s",
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="A Prometheus that knows the nodes; else $CRATON_PROMETHEUS.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Act without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found and done as JSON.")] = False,
) -> None:
    """Say which nodes are bad and what to do; with --mode act, take them out and move runs off. All is undoable."""
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
