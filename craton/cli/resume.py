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
    from craton.cli.run import confirm, follow, prepare, print_plan, warn_of_place
    from craton.cli.views.fields import print_field
    from craton.cli.views.live import make_console
    from craton.cli.views.outcome import shown
    from craton.cli.views.progress import progress
    from craton.job.sections import RESCUE
    from craton.orchestration.start import check_start, draft_resumption, newest_checkpoint, release_run, resume_start
    from craton.telemetry import RunDirectory, find_run

    console = make_console(as_json)
    # What is linked here is called by its own path on other nodes.
    directory = RunDirectory(find_run(run).path.resolve())
    if release_run(directory):
        console.print(f"{directory.name} was held; it is let go, and starts when its nodes are there")
        raise typer.Exit(0)
    with progress("planning") as report:
        start = draft_resumption(directory, cluster=cluster, steps=steps, on=on, stop_at=stop_at, progress=report)
    check_start(start)
    job = start.draft.job
    saved = None if job.serve else newest_checkpoint(directory)
    if not as_json:
        print_plan(start.draft, console, saved)
    if not as_json and not job.serve:
        none = "what its command has saved" if job.kind == "command" else "the beginning: there is no checkpoint"
        where = "" if saved is None else shown(saved.path) if saved.tier == RESCUE else saved.tier
        at = f"step {saved.step:,} in {where}" if saved else none
        print_field(console, "from", at)
    warn_of_place(start.draft, start.root, console)
    confirm(start.draft, yes, saved)
    start = prepare(start, console)
    follow(resume_start(start), start.draft, console, detach=detach, as_json=as_json)
