"""`craton resize RUN N`: change the number of nodes of a running run without losing a step."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from craton.formatting import counted, duration


def resize(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    nodes: Annotated[int, typer.Argument(metavar="N", min=1, help="New number of nodes.", show_default=False)],
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Request the resize and return immediately.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Change the number of nodes of a running run: ranks finish their step, and the next step runs on the new nodes."""
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
                shown.enter_context(Status(f"resizing from {many}", console=console))

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
            console.print(f"\nstopped waiting; {handle.name} still resizes to {counted(nodes, 'node')}")
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(outcome_json(handle.directory, summary)))
    elif not is_done:
        console.print(
            f"{handle.name} is {summary.state}, not on {counted(nodes, 'node')}: {summary.message}", style="red"
        )
    elif not detach:
        took = duration(time.monotonic() - began)
        console.print(f"{handle.name} continues at step {summary.step:,} on {many.partition(' to ')[2]}, after {took}")
    raise typer.Exit(0 if is_done else 1)
