"""`craton resume RUN`: start the next generation of a run from its newest checkpoint, on the same or other nodes."""

from __future__ import annotations

from typing import Annotated

import typer


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster to resume on, e.g. 'local x 1' \\[default: as before].", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Total number of steps to train to \\[default: as before].", show_default=False),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Scheduler: local, slurm or kubernetes \\[default: as before].", show_default=False),
    ] = None,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Let nodes of this machine share its GPUs \\[default: as before].")
    ] = False,
    stop_at: Annotated[
        str | None, typer.Option(help="Stop with a checkpoint after this step, e.g. 120 or 60%.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of the cost.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the run is started.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")] = False,
) -> None:
    """Resume a run that stopped, failed or was lost: plan it again and start from the newest checkpoint."""
    from craton.api import Run
    from craton.cli.run import StartView, follow
    from craton.cli.views.live import make_console

    console = make_console(as_json)
    view = StartView(console, yes=yes, as_json=as_json)
    handle = Run(run).resume(cluster=cluster, steps=steps, on=on, share_gpus=share_gpus, stop_at=stop_at, watch=view)
    if not view.has_planned:
        console.print(
            f"{handle.name} was held by the scheduler and is now released; it starts once its nodes are allocated"
        )
        raise typer.Exit(0)
    follow(handle, view.draft, console, detach=detach, as_json=as_json)
