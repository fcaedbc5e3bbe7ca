"""The report as one self-contained HTML file: no network, no server, no fonts.

Every text from a user or a server is escaped. A table beside each plot has its numbers, so the page is complete without
JavaScript.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files

from craton import html_report
from craton.bench.load.benchmark import Report
from craton.bench.load.report import findings, plots
from craton.formatting import duration, percent, rate
from craton.html_report import Figure, Markup


def report_page(report: Report) -> str:
    figures: dict[str, Figure] = {}
    body = (
        _header(report)
        + _tiles(report)
        + html_report.warning_list("Warnings", report.notes)
        + _failures(report)
        + _sweep_section(report, figures)
        + _latency_section(report, figures)
        + _timeline_section(report, figures)
        + _prompt_section(report, figures)
        + _basis_section(report)
    )
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return html_report.page_html(f"{report.model}: load test", Markup(body), figures, findings.MEASURED_FROM, style)


def _header(report: Report) -> Markup:
    target = report.settings.target
    return Markup(f"""<header>
<div class="eyebrow">Craton bench serve · {report.started:%d %b %Y, %H:%M} UTC</div>
<h1>{escape(report.model)}</h1>
<p class="verdict">{escape(findings.verdict(report))}</p>
<p class="facts">{escape(target.base + target.path)}</p>
<p class="facts">{escape(findings.load_text(report))}</p>
</header>
""")


def _tiles(report: Report) -> Markup:
    summary = report.shown.summary
    ttft, itl, e2e = summary.ttft_seconds, summary.itl_seconds, summary.e2e_seconds
    objectives = report.settings.objectives
    return html_report.tiles(
        [
            html_report.Tile(
                "Output",
                rate(summary.output_tokens_per_second, "tokens"),
                f"{rate(summary.total_tokens_per_second, 'tokens')} with the input",
            ),
            html_report.Tile(
                "Throughput",
                rate(summary.requests_per_second, "requests"),
                f"{summary.answered:,} of {summary.requests:,} in {duration(summary.duration_seconds)}",
            ),
            html_report.Tile(
                "Goodput",
                rate(summary.goodput_requests_per_second, "requests"),
                f"{percent(summary.good_share)} meet {objectives}" if objectives else "no objectives given: --slo",
            ),
            *(
                html_report.Tile(
                    name,
                    duration(item.p50 if item else None),
                    f"median; p99 {duration(item.p99 if item else None)}",
                )
                for name, item in (("Time to first token", ttft), ("Inter-token latency", itl), ("End to end", e2e))
            ),
        ]
    )


def _failures(report: Report) -> Markup:
    summary = report.shown.summary
    if not summary.failures:
        return Markup()
    rows = [("", [failure.kind, f"{failure.count:,}", failure.example]) for failure in summary.failures]
    title = f"{summary.failed:,} of {summary.requests:,} requests failed"
    return html_report.section("Errors", title, html_report.table(["=kind", ">count", "first message"], rows))


def _sweep_section(report: Report, figures: dict[str, Figure]) -> Markup:
    if report.saturation is None:
        return Markup()
    figures["plot-sweep"] = plots.sweep_figure(report.levels)
    rows = [
        (
            "trouble" if level.trouble else "chosen" if level is report.shown else "",
            [*findings.level_cells(level), level.trouble],
        )
        for level in report.levels
    ]
    table = html_report.table([*(f">{name}" for name in _LEVEL_COLUMNS), ""], rows, wide=True)
    return html_report.plot_section("Saturation", findings.saturation_text(report), "plot-sweep", below=table)


_LEVEL_COLUMNS = ("offered/s", "done/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "goodput/s")


def _latency_section(report: Report, figures: dict[str, Figure]) -> Markup:
    summary = report.shown.summary
    if summary.ttft_seconds is None:
        return html_report.absent_section("Latency", "No request was answered.")
    figures["plot-latency"] = plots.distribution_figure(report.shown.samples, report.settings.objectives)
    colors = {"TTFT": plots.FIRST, "ITL": plots.BETWEEN}
    rows = [
        ("", [html_report.chip(colors[name], name) if name in colors else name, *findings.latency_cells(item)])
        for name, item in findings.latencies(summary)
    ]
    table = html_report.table(["=", ">mean", ">p50", ">p95", ">p99"], rows)
    facts = html_report.table(["=", ""], [("", [name, value]) for name, value in findings.counts(summary)])
    itl, ttft = summary.itl_seconds, summary.ttft_seconds
    title = f"TTFT: p50 {duration(ttft.p50)}, p99 {duration(ttft.p99)}"
    if itl is not None:
        title += f"; ITL: p50 {duration(itl.p50)}, p99 {duration(itl.p99)}"
    return html_report.plot_section("Latency", title, "plot-latency", Markup(f"{table}<br>{facts}"))


def _timeline_section(report: Report, figures: dict[str, Figure]) -> Markup:
    samples = report.shown.samples
    if not report.shown.summary.answered:
        return Markup()
    figures["plot-timeline"] = plots.timeline_figure(samples)
    peak = _peak_running(report)
    return html_report.plot_section("Timeline", f"Up to {peak:,} requests ran at once", "plot-timeline")


def _peak_running(report: Report) -> int:
    """Return the maximum number of requests that were sent and had not ended."""
    changes = [(sample.sent_seconds, 1) for sample in report.shown.samples]
    changes += [(sample.end_seconds, -1) for sample in report.shown.samples]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def _prompt_section(report: Report, figures: dict[str, Figure]) -> Markup:
    lengths = {sample.prompt_tokens for sample in report.shown.samples if not sample.error} - {None}
    if len(lengths) < 2:
        reason = f"All prompts have {next(iter(lengths)):,} tokens" if lengths else "The prompt lengths are unknown"
        return html_report.absent_section("First token and prompt", f"{reason}: nothing to compare.")
    figures["plot-prompt"] = plots.prompt_figure(report.shown.samples)
    known_lengths = [length for length in lengths if length is not None]
    title = f"Time to first token of prompts of {min(known_lengths):,} to {max(known_lengths):,} tokens"
    return html_report.plot_section("First token and prompt", title, "plot-prompt")


def _basis_section(report: Report) -> Markup:
    """Return the settings, so that a reader can repeat the test."""
    settings, workload = report.settings, report.settings.workload
    busy = report.shown.busy
    late = report.shown.summary.late_seconds
    facts = [
        ("load", f"{settings.load}; {settings.limit}" + " per level" * (report.saturation is not None)),
        ("prompts", report.prompts if workload.trace else f"{report.prompts}, {workload.input} tokens"),
        ("prefix", findings.prefix_text(report) if workload.prefixes.tokens else "none"),
        ("answers", f"{'of the trace' if workload.trace else workload.output} tokens, temperature 0"),
        ("end of text", "ignored" if settings.target.ignore_eos else "ends an answer"),
        ("seed", str(settings.seed)),
        ("warm-up", f"{settings.warm_up_requests:,} requests, not counted"),
        ("objectives", str(settings.objectives) if settings.objectives else "none"),
        ("client", f"busy {percent(busy)} of a core; sent p99 {duration(late.p99 if late else None)} after due"),
    ]
    rows = [("", [name, text]) for name, text in facts]
    return html_report.section("Basis", "Workload and settings", html_report.table(["=", ""], rows))
