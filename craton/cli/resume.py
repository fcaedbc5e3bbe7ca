"""`craton resume RUN`: the next generation of a run, from its newest checkpoint, on the same or other nodes."""

from __future__ import annotations

from typing import Annotated

import typer


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    cluster: Annotated[
        str | None, typer.Option(help="Other nodes than before, e.g. 'local x 1'.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train up to this step.", show_default=False)] = None,
    on: Annotated[
        str | None, typer.Option(help="Elsewhere than before: local, slurm or kubernetes.", show_default=False)
    ] = None,
    stop_at: Annotated[
        str | None, typer.Option(help="Stop with a checkpoint after this step (120, or 60%).", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before spending money.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it and return at once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")] = False,
) -> None:
    """Go on with a run that stopped, failed or was lost: plan it again and start from the newest checkpoint."""
    from craton.api import Run
    from craton.cli.run import StartView, follow
    from craton.cli.views.live import make_console

    console = make_console(as_json)
    view = StartView(console, yes=yes, as_json=as_json)
    handle = Run(run).resume(cluster=cluster, steps=steps, on=on, stop_at=stop_at, watch=view)
    if not view.has_planned:
        console.print(f"{handle.name} was held; it is let go, and starts when its nodes are there")
        raise typer.Exit(0)
    follow(handle, view.draft, console, detach=detach, as_json=as_json)
