"""`craton ui`: the page of all runs, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8080,
    listen: Annotated[
        str, typer.Option(help="Address to listen at; beyond this machine even looking needs the token.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token; made where there is none.", show_default=False)
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            help="Where a TLS proxy serves the page: https://HOST; even looking needs the token then.",
            show_default=False,
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Prometheus to ask for alerts and GPUs: http://HOST:9090; else $CRATON_PROMETHEUS.",
            show_default=False,
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it is as JSON.")] = False,
) -> None:
    """Show all runs on a web page: progress, cost, verdicts, and for each run its curves, ranks, nodes and logs."""
    import json

    from craton.cli.views.live import make_console
    from craton.observability.web.http import can_open, serve_page
    from craton.telemetry import runs_root

    def tell(address: str, link: str) -> None:
        if as_json:
            print(json.dumps({"address": address, "link": link, "runs": str(runs_root())}), flush=True)
            return
        console = make_console()
        console.print(f"runs in {runs_root()}: {link}", soft_wrap=True, markup=False)
        held = (
            f"the token is in {token_file}"
            if token_file
            else "the link holds the token, which changes need: keep it to yourself"
        )
        console.print(f"{held} · Ctrl-C ends the page, runs go on", style="dim", soft_wrap=True, markup=False)

    serve_page(
        runs_root(),
        port=port,
        listen=listen,
        token_file=token_file,
        public_url=public_url,
        prometheus=prometheus,
        opens=not no_open and not as_json and can_open(),
        announce=tell,
    )
