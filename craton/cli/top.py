"""`craton top RUN`: show a run's nodes and ranks live in a terminal."""

from __future__ import annotations

from typing import Annotated

import typer


def top(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Prometheus with GPU metrics, e.g. http://HOST:9090 \\[default: $CRATON_PROMETHEUS].",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON.")] = False,
) -> None:
    """Show every rank of a run live: phases, step, progress, GPUs, and the cause if it is slow."""
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
    elif once or not console.is_terminal or not sys.stdin.isatty():  # key presses are read from stdin
        look, has_color = view.look(wait_for_verdict=True), console.is_terminal and not console.no_color
        console.print(frame(look, min(console.width, 160), rows=None, has_color=has_color))
    else:
        with closing(view):
            show_top(view, console)
