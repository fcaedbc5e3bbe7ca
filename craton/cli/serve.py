"""`craton serve MODEL`: start an OpenAI-compatible server as a run, from a generated job of kind serve."""

from __future__ import annotations

from typing import Annotated, Any

import typer

PORT = 8000


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model folder, Hub id in the local cache, run, or preset.", show_default=False
        ),
    ],
    port: Annotated[
        int | None, typer.Option(help=f"Port to listen on \\[default: {PORT}].", show_default=False)
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on \\[default: 127.0.0.1].", show_default=False)
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor-parallel size \\[default: the smallest that fits].", show_default=False),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Expert-parallel size; divides tp \\[default: 1; without --tp, the planner chooses].",
            show_default=False,
        ),
    ] = None,
    max_length: Annotated[
        str | None,
        typer.Option(
            help="Maximum context length in tokens, prompt plus output, e.g. 8k \\[default: the model's].",
            show_default=False,
        ),
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Maximum number of concurrent requests \\[default: 256].", show_default=False)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Weight precision: bf16, fp8, int4 or fp32 \\[default: bf16, or the folder's own 4 bits].",
            show_default=False,
        ),
    ] = None,
    kv_precision: Annotated[
        str | None, typer.Option(help="KV cache precision: auto or fp8 \\[default: auto].", show_default=False)
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Fraction of the GPU memory to use \\[default: 0.9].", show_default=False)
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Host memory for KV cache offloading, e.g. 64GiB \\[default: none].", show_default=False),
    ] = None,
    speculate: Annotated[
        int | None,
        typer.Option(
            min=1, help="Speculative decoding: number of n-gram draft tokens \\[default: off].", show_default=False
        ),
    ] = None,
    speculate_model: Annotated[
        str | None,
        typer.Option(help="Speculative decoding: draft model with the same tokenizer.", show_default=False),
    ] = None,
    speculate_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Number of the draft model's tokens per step \\[default: auto].", show_default=False),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="LoRA adapter as NAME=FOLDER; repeatable.", show_default=False)
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="Model name in the API \\[default: from the model].", show_default=False)
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="Tool call format: auto, off, llama3, hermes, qwen3 or qwen3-coder \\[default: auto].",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Default strategy of test-time compute, e.g. vote:16 \\[default: none].",
            show_default=False,
        ),
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(help="Environment variable with the API keys, separated by commas.", show_default=False),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Enable the admin API (pause, sleep, change weights), with a separate key.")
    ] = False,
    admin_key: Annotated[
        str | None,
        typer.Option(help="Environment variable with the admin key \\[default: generate one].", show_default=False),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Serve a preset with random weights, for benchmarks.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Run name \\[default: from the model].", show_default=False)] = None,
    cluster: Annotated[str, typer.Option(help="Cluster to run on.")] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and commands; write and start nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of the cost.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the server is ready.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")] = False,
) -> None:
    """Serve a model over the OpenAI API. Ctrl-C drains and stops the server; --detach leaves it running."""
    from craton import api
    from craton.cli.run import StartView, print_draft
    from craton.cli.views.live import make_console
    from craton.cli.views.progress import progress
    from craton.cli.views.server import follow_server
    from craton.job.sections.strategy import read_strategy

    console = make_console(as_json)
    settings: dict[str, Any] = {
        "tp": tp,
        "ep": ep,
        "host": host,
        "served_name": served_name,
        "max_length": max_length,
        "max_running": max_running,
        "precision": precision,
        "kv_precision": kv_precision,
        "memory": memory,
        "host_memory": host_memory,
        "speculate": _speculate(speculate, speculate_model, speculate_tokens),
        "adapters": _adapters(adapter) if adapter else None,
        "tool_parser": tool_parser,
        "strategy": None if strategy is None else read_strategy(strategy, "--strategy"),
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


def _speculate(ngram: int | None, model: str | None, tokens: int | None) -> dict[str, object] | None:
    given = {"ngram": ngram, "model": model, "tokens": tokens}
    return {key: value for key, value in given.items() if value is not None} or None


def _adapters(pairs: list[str]) -> dict[str, str]:
    from craton.orchestration import StartError

    result = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not name or not folder:
            raise StartError(f"--adapter {pair!r} is not NAME=FOLDER, e.g. --adapter sql=./adapters/sql")
        result[name] = folder
    return result
