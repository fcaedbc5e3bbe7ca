"""`craton resize RUN N`: another number of nodes for a run, while it runs and without losing a step."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from craton.formatting import counted, duration


def resize(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    nodes: Annotated[int, typer.Argument(metavar="N", min=1, help="Nodes to go on with.", show_default=False)],
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Ask for it and return at once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Go on with more or fewer nodes: the ranks finish their step, and the next one is done by the new ones."""
    import json
    from contextlib import ExitStack

    from rich.status import Status

    from craton.api import Run
    from craton.cli.views.live import make_console
    from craton.cli.views.outcome import outcome_json
    from craton.cli.views.progress import progress
    from craton.orchestration import RunEndedError

    console = make_console(as_json)
    handle = Run(run)
    with progress("planning"):
        wanted = handle.draft_resize(nodes)
    began, is_asked, is_done = time.monotonic(), False, True
    many = f"{wanted.before} to {nodes} node{'s' if nodes > 1 else ''}"
    with ExitStack() as shown:

        def asked(started: list[str]) -> None:
            nonlocal is_asked
            is_asked = True
            console.print(f"{handle.name}: from {many}, {wanted.size.layout}")
            if started:
                console.print(
                    f"started the agent{'s' if len(started) > 1 else ''} of {', '.join(started)}", style="dim"
                )
            if not detach:
                shown.enter_context(Status(f"going from {many}", console=console))

        try:
            summary = handle.resize(wanted, wait=not detach, asked=asked)
        except RunEndedError as ended:
            if not is_asked:
                raise
            summary, is_done = ended.summary, False
        except KeyboardInterrupt:
            if not is_asked:
                raise
            shown.close()
            console.print(f"\nnot waiting any longer; {handle.name} goes to {counted(nodes, 'node')} by itself")
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(outcome_json(handle.directory, summary)))
    elif not is_done:
        console.print(
            f"{handle.name} is {summary.state}, not on {counted(nodes, 'node')}: {summary.message}", style="red"
        )
    elif not detach:
        took = duration(time.monotonic() - began)
        console.print(f"{handle.name} goes on at step {summary.step:,} on {many.partition(' to ')[2]}, {took} later")
    raise typer.Exit(0 if is_done else 1)
