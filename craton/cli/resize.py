"""`craton resize RUN N`: another number of nodes for a run, while it runs and without losing a step."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from craton.formatting import counted, duration

LOOK_SECONDS = 0.2


def resize(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    nodes: Annotated[int, typer.Argument(metavar="N", min=1, help="Nodes to go on with.", show_default=False)],
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Ask for it and return at once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Go on with more or fewer nodes: the ranks finish their step, and the next one is done by the new ones."""
    import json

    from rich.status import Status

    from craton.cli.views.live import make_console
    from craton.cli.views.outcome import outcome_json
    from craton.cli.views.progress import progress
    from craton.orchestration.changes import draft_resize, has_resized, resize_run
    from craton.orchestration.watching import Follower
    from craton.telemetry import find_run, summarize

    console = make_console(as_json)
    directory = find_run(run)
    with progress("planning"):
        wanted = draft_resize(directory, nodes)
    since, began = time.time(), time.monotonic()
    started = resize_run(directory, wanted)
    many = f"{wanted.before} to {nodes} node{'s' if nodes > 1 else ''}"
    console.print(f"{directory.name}: from {many}, {wanted.size.layout}")
    if started:
        console.print(f"started the agent{'s' if len(started) > 1 else ''} of {', '.join(started)}", style="dim")
    if detach:
        if as_json:
            print(json.dumps(outcome_json(directory, summarize(directory))))
        return
    follower = Follower(directory)
    try:
        with Status(f"going from {many}", console=console):
            while not (is_done := has_resized(directory, nodes, since)) and follower.look().is_moving:
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        console.print(f"\nnot waiting any longer; {directory.name} goes to {counted(nodes, 'node')} by itself")
        raise typer.Exit(130) from None
    summary = follower.look().summary
    if as_json:
        print(json.dumps(outcome_json(directory, summary)))
    elif is_done:
        took = duration(time.monotonic() - began)
        console.print(f"{directory.name} goes on at step {summary.step:,} on {many.partition(' to ')[2]}, {took} later")
    else:
        console.print(
            f"{directory.name} is {summary.state}, not on {counted(nodes, 'node')}: {summary.message}", style="red"
        )
    raise typer.Exit(0 if is_done else 1)
