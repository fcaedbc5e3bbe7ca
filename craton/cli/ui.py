"""`craton ui`: serve the web page of all runs from this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8080,
    listen: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine, viewing requires the token too.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the access token; created if missing \\[default: a new token in the link].",
            show_default=False,
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            help="Public address behind a TLS proxy, https://HOST; viewing then requires the token too.",
            show_default=False,
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Prometheus with alerts and GPU metrics, e.g. http://HOST:9090 \\[default: $CRATON_PROMETHEUS].",
            show_default=False,
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Show all runs on a web page: progress, cost, diagnosis, and each run's curves, ranks, nodes and logs."""
    import json

    from craton.cli.views.live import make_console
    from craton.observability.web.http import can_open, serve_page
    from craton.telemetry import runs_root

    def announce(address: str, link: str) -> None:
        if as_json:
            print(json.dumps({"address": address, "link": link, "runs": str(runs_root())}), flush=True)
            return
        console = make_console()
        console.print(f"runs in {runs_root()}: {link}", soft_wrap=True, markup=False)
        held = (
            f"the token is in {token_file}"
            if token_file
            else "the link contains the token that allows changes: keep it private"
        )
        console.print(f"{held} · Ctrl-C ends the page; runs continue", style="dim", soft_wrap=True, markup=False)

    serve_page(
        runs_root(),
        port=port,
        listen=listen,
        token_file=token_file,
        public_url=public_url,
        prometheus=prometheus,
        opens=not no_open and not as_json and can_open(),
        announce=announce,
    )
