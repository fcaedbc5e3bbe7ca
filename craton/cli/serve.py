"""`craton serve MODEL`: an OpenAI-compatible server, as the run of a job of kind serve that is written for you."""

from __future__ import annotations

from typing import Annotated, Any

import typer

PORT = 8000


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a Hub id in the local cache, a run, or a preset.", show_default=False
        ),
    ],
    port: Annotated[int | None, typer.Option(help=f"Where it listens \\[default: {PORT}].", show_default=False)] = None,
    host: Annotated[
        str | None, typer.Option(help="And at which address \\[default: 127.0.0.1].", show_default=False)
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that share the model \\[default: as few as fit].", show_default=False),
    ] = None,
    max_length: Annotated[
        str | None, typer.Option(help="Tokens of prompt and answer, e.g. 8k.", show_default=False)
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests computed together.", show_default=False)] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp8 or fp32 \\[default: bf16].", show_default=False)
    ] = None,
    kv_precision: Annotated[
        str | None, typer.Option(help="Of keys and values: auto or fp8.", show_default=False)
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Share of the device's memory \\[default: 0.9].", show_default=False)
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="For keys and values that leave the device, e.g. 64GiB.", show_default=False)
    ] = None,
    speculate: Annotated[
        int | None, typer.Option(min=1, help="Guess so many tokens at a time from n-grams.", show_default=False)
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a LoRA adapter; may be repeated.", show_default=False)
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model.", show_default=False)] = None,
    tool_parser: Annotated[str | None, typer.Option(help="How it writes tool calls.", show_default=False)] = None,
    api_keys: Annotated[
        str | None, typer.Option(help="Environment variable that holds the keys.", show_default=False)
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow requests that pause it or change weights, with a key of their own.")
    ] = False,
    admin_key: Annotated[
        str | None,
        typer.Option(help="Environment variable that holds the admin key \\[default: make one].", show_default=False),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Serve a preset without weights, to measure.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Of the run \\[default: from the model].", show_default=False)
    ] = None,
    cluster: Annotated[str, typer.Option(help="Where it runs.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written and started.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before spending money.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it when it answers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")] = False,
) -> None:
    """Serve a model over the OpenAI API. Ctrl-C drains and stops it; --detach leaves it."""
    from craton import api
    from craton.cli.run import StartView, print_draft
    from craton.cli.views.live import make_console
    from craton.cli.views.progress import progress
    from craton.cli.views.server import follow_server

    console = make_console(as_json)
    settings: dict[str, Any] = {
        "tp": tp,
        "host": host,
        "served_name": served_name,
        "max_length": max_length,
        "max_running": max_running,
        "precision": precision,
        "kv_precision": kv_precision,
        "memory": memory,
        "host_memory": host_memory,
        "speculate": None if speculate is None else {"ngram": speculate},
        "adapters": _adapters(adapter) if adapter else None,
        "tool_parser": tool_parser,
        "api_keys": api_keys,
        "admin": admin or admin_key is not None or None,
        "admin_key": admin_key,
        "initialize": "random" if random_weights else None,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    where: dict[str, Any] = {"port": PORT if port is None else port, "cluster": cluster}
    if dry_run:
        with progress("planning") as report:
            start = api.preview(api.server_job(model, name, **where, **given), on="local", progress=report)
        print_draft(start.draft, start.run.path, as_json)
        return
    view = StartView(console, yes=yes, as_json=as_json)
    server = api.serve(model, name, **where, wait=False, watch=view, **given)
    follow_server(server, view.draft, console, detach=detach, as_json=as_json, owns=True)


def _adapters(pairs: list[str]) -> dict[str, str]:
    from craton.orchestration import StartError

    result = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not name or not folder:
            raise StartError(f"--adapter {pair!r} is not NAME=FOLDER")
        result[name] = folder
    return result
