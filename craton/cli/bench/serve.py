"""`craton bench serve URL`: how fast a server answers, whoever wrote it, as long as it speaks OpenAI's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from craton.bench.load import Closed, Limit, LoadSettings, LoadWorkload, Open, Sweep, Timed

DEFAULT_CONCURRENCY = 16
DEFAULT_REQUESTS = 100
DEFAULT_LEVEL_SECONDS = 20.0
_LOAD, _ASKED, _REPORT = "Load", "What is asked", "Report"


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://localhost:8000.")],
    model: Annotated[str | None, typer.Option(help="Model; default: the first that the server names.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat completions instead of completions.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Sent as bearer token; process lists show it, so prefer the variable."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a request has failed.")] = 600.0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed load: so many at a time; default 16.", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open load: requests/s, whatever the server does.", rich_help_panel=_LOAD),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01, help="Of an open load: 1 is Poisson, less is burstier, more is steadier.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    sweep: Annotated[
        str | None,
        typer.Option(help="Open loads with rising rates, such as 1..64, to find saturation.", rich_help_panel=_LOAD),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests to send; default 100.", rich_help_panel=_LOAD)
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds to send for; default of a sweep: 20 a rate.", rich_help_panel=_LOAD),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests before, which are not counted.", rich_help_panel=_LOAD)
    ] = 4,
    input_lengths: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="Tokens of a prompt: 512 (default), 100..1024, normal(512,128), lognormal(512,400).",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    output_lengths: Annotated[
        str, typer.Option("--output", help="Tokens of an answer, at most; written likewise.", rich_help_panel=_ASKED)
    ] = "128",
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens before those of --input that requests share.", rich_help_panel=_ASKED)
    ] = 0,
    prefix_groups: Annotated[
        int, typer.Option(min=1, help="How many different shared beginnings there are.", rich_help_panel=_ASKED)
    ] = 1,
    prefix_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that begin with one.", rich_help_panel=_ASKED)
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, output_tokens and at (seconds).", rich_help_panel=_ASKED),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=2, help="Random prompts are token ids below this.", rich_help_panel=_ASKED)
    ] = 32_000,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers are as long as they may be.", rich_help_panel=_ASKED)
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed asks the same.", rich_help_panel=_ASKED)] = 0,
    slo: Annotated[
        str | None,
        typer.Option(help="What is good enough: ttft, itl, tpot, e2e; ttft=500ms,itl=50ms.", rich_help_panel=_REPORT),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots.", rich_help_panel=_REPORT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all numbers as JSON.", rich_help_panel=_REPORT)
    ] = False,
) -> None:
    """Drive a server with requests and report latencies, throughput and goodput."""
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
        raise CratonError("--input and --prefix-tokens make prompts; --trace already has them")
    if trace is not None and sweep is not None:
        raise CratonError("--sweep needs new prompts for every rate; a --trace has only its own")
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
        raise CratonError("--concurrency, --rate and --sweep are three kinds of load; give one of them")
    if burstiness != 1 and rate is None and sweep is None:
        raise CratonError("--burstiness belongs to an open load; give --rate or --sweep too")
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
        raise CratonError("--requests and --duration both say when to stop; give one of them")
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
    from craton.cli.views.progress import progress

    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)  # before the load: nobody wants to drive a server in vain
    report = bench_serve(settings, progress)
    if html is not None:
        html.write_text(report_page(report), encoding="utf-8")
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print_report(report, Console())
        if html is not None:
            Console().print(f"wrote {html}", highlight=False, markup=False)
    if not report.shown.summary.answered:
        raise typer.Exit(1)
