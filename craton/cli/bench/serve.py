"""`craton bench serve URL`: load-test any server with an OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.bench.load import Closed, Limit, LoadSettings, LoadWorkload, Open, Sweep, Timed

DEFAULT_CONCURRENCY = 16
DEFAULT_REQUESTS = 100
DEFAULT_LEVEL_SECONDS = 20.0
_LOAD, _WORKLOAD, _REPORT = "Load", "Workload", "Report"


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Server address, e.g. http://localhost:8000.")],
    model: Annotated[str | None, typer.Option(help="Model name \\[default: the first the server lists].")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use chat completions instead of completions.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            help="API key, sent as bearer token; prefer $OPENAI_API_KEY, since process lists show options.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Request timeout in seconds.")] = 600.0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed load: number of concurrent requests \\[default: 16].", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Open load: arrival rate in requests/s, independent of the server.", rich_help_panel=_LOAD
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Burstiness of an open load: 1 is Poisson, less is burstier, more is steadier.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Open loads at rising rates, e.g. 1..64, to find the saturation point.", rich_help_panel=_LOAD
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests to send \\[default: 100].", rich_help_panel=_LOAD)
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Duration in seconds \\[default with --sweep: 20 per rate].", rich_help_panel=_LOAD
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Number of warm-up requests, which are not counted.", rich_help_panel=_LOAD)
    ] = 4,
    input_lengths: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="Prompt tokens: 512, 100..1024, normal(512,128) or lognormal(512,400) \\[default: 512].",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    output_lengths: Annotated[
        str, typer.Option("--output", help="Maximum output tokens, in the same notation.", rich_help_panel=_WORKLOAD)
    ] = "128",
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a shared prefix, in addition to --input.", rich_help_panel=_WORKLOAD)
    ] = 0,
    prefix_groups: Annotated[
        int, typer.Option(min=1, help="Number of different shared prefixes.", rich_help_panel=_WORKLOAD)
    ] = 1,
    prefix_share: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of requests with a shared prefix.", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace to replay: JSON lines with prompt, output_tokens and at (seconds).", rich_help_panel=_WORKLOAD
        ),
    ] = None,
    vocabulary: Annotated[
        int,
        typer.Option(
            min=2, help="Vocabulary size: random prompts are token ids below this.", rich_help_panel=_WORKLOAD
        ),
    ] = 32_000,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Ignore end-of-sequence: generate the maximum number of output tokens.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed for prompts and arrival times.", rich_help_panel=_WORKLOAD)
    ] = 0,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Latency objectives for goodput: ttft, itl, tpot, e2e; e.g. ttft=500ms,itl=50ms.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML report with plots to this file.", rich_help_panel=_REPORT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all numbers as JSON.", rich_help_panel=_REPORT)
    ] = False,
) -> None:
    """Load-test a server and report latency, throughput and goodput."""
    from craton.errors import CratonError
    from craton.extras import require_package

    require_package("aiohttp", "`craton bench serve`")
    from craton.bench.load import (
        LoadSettings,
        LoadTarget,
        LoadWorkload,
        Prefixes,
        load_trace,
        parse_lengths,
        parse_objectives,
    )

    if trace is not None and (input_lengths is not None or prefix_tokens):
        raise CratonError(
            "--input and --prefix-tokens generate prompts, but --trace already has them; use one or the other"
        )
    if trace is not None and sweep is not None:
        raise CratonError("--sweep needs new prompts for every rate, but --trace has a fixed list; omit one of them")
    output = parse_lengths(output_lengths, "--output")
    workload = LoadWorkload(
        input=parse_lengths(input_lengths or "512", "--input"),
        output=output,
        prefixes=Prefixes(prefix_tokens, prefix_groups, prefix_share),
        vocabulary=vocabulary,
        trace=tuple(load_trace(trace, output, seed)) if trace is not None else (),
    )
    load = _load(concurrency, rate, burstiness, sweep, workload)
    settings = LoadSettings(
        target=LoadTarget(url, model, chat, api_key or None, ignore_eos, timeout),
        workload=workload,
        load=load,
        limit=_limit(requests, duration, load, workload),
        seed=seed,
        warm_up_requests=warmup,
        objectives=parse_objectives(slo) if slo is not None else None,
    )
    _run(settings, html, as_json)


def _load(
    concurrency: int | None, rate: float | None, burstiness: float, sweep: str | None, workload: LoadWorkload
) -> Closed | Open | Timed | Sweep:
    from craton.bench.load import Closed, Open, Timed, parse_sweep
    from craton.errors import CratonError

    if sum(value is not None for value in (concurrency, rate, sweep)) > 1:
        raise CratonError("--concurrency, --rate and --sweep are alternative kinds of load; use one of them")
    if burstiness != 1 and rate is None and sweep is None:
        raise CratonError("--burstiness applies to an open load; add --rate or --sweep")
    if sweep is not None:
        return parse_sweep(sweep, burstiness)
    if rate is not None:
        return Open(rate, burstiness)
    if concurrency is None and workload.trace and workload.trace[0].at_seconds is not None:
        return Timed()
    return Closed(concurrency or DEFAULT_CONCURRENCY)


def _limit(
    requests: int | None, duration: float | None, load: Closed | Open | Timed | Sweep, workload: LoadWorkload
) -> Limit:
    from craton.bench.load import Limit, Sweep
    from craton.errors import CratonError

    if requests is not None and duration is not None:
        raise CratonError("--requests and --duration both set the end of the test; use one of them")
    if duration is None and requests is None and isinstance(load, Sweep):
        duration = DEFAULT_LEVEL_SECONDS
    if duration is not None:
        return Limit(seconds=duration)
    if workload.trace:
        return Limit(requests=min(requests or len(workload.trace), len(workload.trace)))
    return Limit(requests=requests or DEFAULT_REQUESTS)


def _run(settings: LoadSettings, html: Path | None, as_json: bool) -> None:
    import json

    from rich.console import Console

    from craton.bench.load import bench_serve
    from craton.bench.load.report import print_report, report_page
    from craton.cli.views.pages import prepare_page, write_page
    from craton.cli.views.progress import progress

    if html is not None:
        prepare_page(html)
    report = bench_serve(settings, progress)
    if html is not None:
        write_page(html, report_page(report))
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print_report(report, Console())
        if html is not None:
            Console().print(f"wrote {html}", highlight=False, markup=False)
    if not report.shown.summary.answered:
        raise typer.Exit(1)
