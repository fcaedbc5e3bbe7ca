"""`craton top RUN`: a run's nodes and ranks in a terminal, as they do now."""

from __future__ import annotations

from typing import Annotated

import typer


def top(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Prometheus to ask for GPUs: http://HOST:9090; else $CRATON_PROMETHEUS.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one picture as JSON.")] = False,
) -> None:
    """Show what every rank of a run does: phases, step, progress, GPUs, and why it is slow if it is."""
    import json
    import sys
    from contextlib import closing

    from craton.cli.views.live import make_console
    from craton.observability.web import TopView, frame, frame_json, show_top
    from craton.telemetry import find_run

    view = TopView(find_run(run), prometheus)
    console = make_console(as_json)
    if as_json:
        print(json.dumps(frame_json(view.look(wait_for_verdict=True))))
    elif once or not console.is_terminal or not sys.stdin.isatty():  # keys come from there
        look, has_color = view.look(wait_for_verdict=True), console.is_terminal and not console.no_color
        console.print(frame(look, min(console.width, 160), rows=None, has_color=has_color))
    else:
        with closing(view):
            show_top(view, console)
