"""A report as one HTML file that needs nothing else: no network, no server, no fonts.

A content security policy forbids the page to load or send anything; every text that came from a user or a server is
escaped; the numbers of every plot stand in a table beside it, so the page is whole without JavaScript too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from craton.loadtest import findings, report_plots
from craton.loadtest.benchmark import Report
from craton.loadtest.quantities import duration, percent, rate
from craton.loadtest.report_plots import Figure

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Markup(str):
    """Text that is already HTML; every other string is escaped on its way into the page."""


def report_page(report: Report) -> str:
    from plotly.offline import get_plotlyjs  # large, and only the page needs it

    figures: dict[str, Figure] = {}
    body = (
        _header(report)
        + _tiles(report)
        + _notes(report)
        + _failures(report)
        + _sweep_section(report, figures)
        + _latency_section(report, figures)
        + _timeline_section(report, figures)
        + _prompt_section(report, figures)
        + _basis_section(report)
    )
    package = files("craton.loadtest")
    # "<" cannot end the script element when it is written as an escape of JSON.
    data = json.dumps(figures, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(report.model)}: load test</title>
<style>{package.joinpath("report.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{body}
<footer>{findings.MEASURED_FROM}</footer>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{package.joinpath("report.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _header(report: Report) -> str:
    target = report.settings.target
    return f"""<header>
<div class="eyebrow">Craton bench serve · {report.started:%d %b %Y, %H:%M} UTC</div>
<h1>{escape(report.model)}</h1>
<p class="verdict">{escape(findings.verdict(report))}</p>
<p class="facts">{escape(target.base + target.path)}</p>
<p class="facts">{escape(findings.load_text(report))}</p>
</header>
"""


def _tiles(report: Report) -> str:
    summary = report.shown.summary
    ttft, itl, e2e = summary.ttft_seconds, summary.itl_seconds, summary.e2e_seconds
    objectives = report.settings.objectives
    tiles = [
        (
            "Output",
            rate(summary.output_tokens_per_second, "tokens"),
            f"{rate(summary.total_tokens_per_second, 'tokens')} with the input",
        ),
        (
            "Throughput",
            rate(summary.requests_per_second, "requests"),
            f"{summary.answered:,} of {summary.requests:,} in {duration(summary.duration_seconds)}",
        ),
        (
            "Goodput",
            rate(summary.goodput_requests_per_second, "requests"),
            f"{percent(summary.good_share)} meet {objectives}" if objectives else "no objectives given: --slo",
        ),
        *(
            (
                name,
                duration(found.p50 if found else None),
                f"median; p99 {duration(found.p99 if found else None)}",
            )
            for name, found in (("Time to first token", ttft), ("Between tokens", itl), ("End to end", e2e))
        ),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><div class="title">{escape(name)}</div><div class="value">{escape(value)}</div>'
            f'<div class="note">{escape(note)}</div></div>'
            for name, value, note in tiles
        )
        + "</div>\n"
    )


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<div class="callout"><h2>Before you believe it</h2><ul>{items}</ul></div>\n'


def _failures(report: Report) -> str:
    summary = report.shown.summary
    if not summary.failures:
        return ""
    rows = [("", [each.kind, f"{each.count:,}", each.example]) for each in summary.failures]
    title = f"{summary.failed:,} of {summary.requests:,} requests failed"
    table = _table(["=kind", ">how often", "the first of them"], rows)
    return f"<section><h2>Errors</h2><h3>{title}</h3>{table}</section>\n"


def _sweep_section(report: Report, figures: dict[str, Figure]) -> str:
    if report.saturation is None:
        return ""
    figures["plot-sweep"] = report_plots.sweep_figure(report.levels)
    rows = [
        (
            "trouble" if level.trouble else "chosen" if level is report.shown else "",
            [*findings.level_cells(level), level.trouble],
        )
        for level in report.levels
    ]
    table = _table([*(f">{name}" for name in _LEVEL_COLUMNS), ""], rows, wide=True)
    return _section("Saturation", findings.saturation_text(report), "plot-sweep", "", table)


_LEVEL_COLUMNS = ("asked for/s", "done/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "goodput/s")


def _latency_section(report: Report, figures: dict[str, Figure]) -> str:
    summary = report.shown.summary
    if summary.ttft_seconds is None:
        return _absent("Latency", "No request was answered.")
    figures["plot-latency"] = report_plots.distribution_figure(report.shown.samples, report.settings.objectives)
    colors = {"TTFT": report_plots.FIRST, "ITL": report_plots.BETWEEN}
    rows = [
        ("", [Markup(_chip(colors.get(name)) + escape(name)), *findings.latency_cells(found)])
        for name, found in findings.latencies(summary)
    ]
    table = _table(["=", ">mean", ">p50", ">p95", ">p99"], rows)
    facts = _table(["=", ""], [("", [name, value]) for name, value in findings.counts(summary)])
    itl, ttft = summary.itl_seconds, summary.ttft_seconds
    title = f"Half of the first tokens come within {duration(ttft.p50)}, 99 % within {duration(ttft.p99)}"
    if itl is not None:
        title += f"; half of the gaps between tokens are within {duration(itl.p50)}, 99 % within {duration(itl.p99)}"
    return _section("Latency", title, "plot-latency", f"{table}<br>{facts}")


def _timeline_section(report: Report, figures: dict[str, Figure]) -> str:
    samples = report.shown.samples
    if not report.shown.summary.answered:
        return ""
    figures["plot-timeline"] = report_plots.timeline_figure(samples)
    most = _most_running(report)
    return _section("Timeline", f"At most {most:,} requests ran at once", "plot-timeline", "")


def _most_running(report: Report) -> int:
    """The highest number of requests that were sent and had not ended."""
    changes = [(sample.sent_seconds, 1) for sample in report.shown.samples]
    changes += [(sample.end_seconds, -1) for sample in report.shown.samples]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def _prompt_section(report: Report, figures: dict[str, Figure]) -> str:
    lengths = {sample.prompt_tokens for sample in report.shown.samples if not sample.error} - {None}
    if len(lengths) < 2:
        what = f"All prompts have {next(iter(lengths)):,} tokens" if lengths else "No prompt's length is known"
        return _absent("First token and prompt", f"{what}: nothing to compare.")
    figures["plot-prompt"] = report_plots.prompt_figure(report.shown.samples)
    known = [length for length in lengths if length is not None]
    title = f"Prompts of {min(known):,} to {max(known):,} tokens, and when their first token came"
    return _section("First token and prompt", title, "plot-prompt", "")


def _basis_section(report: Report) -> str:
    """What was asked for, so that a reader can repeat it."""
    settings, workload = report.settings, report.settings.workload
    busy = report.shown.busy
    late = report.shown.summary.late_seconds
    facts = [
        ("load", f"{settings.load}; {settings.limit}" + " a level" * (report.saturation is not None)),
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
    return f"<section><h2>Basis</h2><h3>What was asked for</h3>{_table(['=', ''], rows)}</section>\n"


def _section(name: str, finding: str, plot: str, table: str, below: str = "") -> str:
    figure = f'<div class="plot" id="{plot}" role="img" aria-label="{escape(finding)}"></div>'
    body = f'<div class="pair">{figure}<div>{table}</div></div>' if table else figure
    return f"<section><h2>{escape(name)}</h2><h3>{escape(finding)}</h3>{body}{below}</section>\n"


def _absent(name: str, sentence: str) -> str:
    return f'<section><h2>{escape(name)}</h2><p class="absent">{escape(sentence)}</p></section>\n'


def _table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], wide: bool = False) -> str:
    """Rows with their class; a column is of numbers after ">", of unbroken names after "="; a wide table becomes cards
    on a phone."""
    names = [column.lstrip(">=") for column in columns]
    classes = [{">": "number", "=": "name"}.get(column[:1], "plain") for column in columns]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(classes, names, strict=True))
    lines = []
    for row_class, cells in rows:
        line = "".join(
            f'<td class="{kind}" data-label="{escape(name)}">{cell if isinstance(cell, Markup) else escape(cell)}</td>'
            for kind, name, cell in zip(classes, names, cells, strict=True)
        )
        lines.append(f'<tr class="{row_class}">{line}</tr>')
    thead = f"<thead><tr>{head}</tr></thead>" if any(names) else ""
    return f'<table class="{"wide" if wide else ""}">{thead}<tbody>{"".join(lines)}</tbody></table>'


def _chip(color: str | None) -> str:
    return f'<span class="chip" style="background:var(--{color.removeprefix("@")})"></span>' if color else ""
