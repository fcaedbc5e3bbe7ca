"""Sentences and table rows that the terminal and HTML reports share."""

from __future__ import annotations

from craton.bench.load.benchmark import Level, Report
from craton.bench.load.load import Open
from craton.bench.load.summary import Distribution, Summary
from craton.formatting import amount, digits, duration, percent, rate

MEASURED_FROM = "Latencies count from when a request was due, not from when it was sent."
_LATENCIES = {
    "TTFT": "ttft_seconds",
    "ITL": "itl_seconds",
    "TPOT": "tpot_seconds",
    "end to end": "e2e_seconds",
}


def latencies(summary: Summary) -> list[tuple[str, Distribution | None]]:
    return [(name, getattr(summary, field)) for name, field in _LATENCIES.items()]


def latency_cells(distribution: Distribution | None) -> list[str]:
    return [duration(getattr(distribution, name, None)) for name in ("mean", "p50", "p95", "p99")]


def verdict(report: Report) -> str:
    """Return the summary sentence of the report."""
    summary = report.shown.summary
    if not summary.answered:
        return f"None of {summary.requests:,} requests was answered."
    output, requests = (
        rate(summary.output_tokens_per_second, "output tokens"),
        rate(summary.requests_per_second, "requests"),
    )
    message = f"{output} and {requests} answered (load: {report.shown.load})."
    return message if report.saturation is None else f"{saturation_text(report)} {message}"


def saturation_text(report: Report) -> str:
    saturation = report.saturation
    assert saturation is not None, "only a sweep looks for saturation"
    if saturation.too_much is None:
        highest = digits(saturation.sustained or 0)
        return f"Not saturated: the server sustains {highest} requests/s, the highest rate tried."
    if saturation.sustained is None:
        return f"Saturated below {digits(saturation.too_much)} requests/s, the lowest rate tried."
    return f"Saturated between {digits(saturation.sustained)} and {digits(saturation.too_much)} requests/s."


def load_text(report: Report) -> str:
    settings, workload = report.settings, report.settings.workload
    per_level = " each" if report.saturation is not None else ""
    words = f"{settings.limit}{per_level}, {settings.load}"
    if not workload.trace:
        words += f"; input {workload.input}, output {workload.output}"
        if workload.prefixes.tokens:
            words += f"; prefix {prefix_text(report)}"
    return f"{words}; seed {settings.seed}"


def prefix_text(report: Report) -> str:
    prefixes = report.settings.workload.prefixes
    groups = f"one of {prefixes.groups}" if prefixes.groups > 1 else "the same"
    return f"{prefixes.tokens:,}, {groups} for {percent(prefixes.share)} of the requests"


def counts(summary: Summary) -> list[tuple[str, str]]:
    """Return throughput and token counts as rows of a name and a value."""
    rows = [
        ("requests", f"{summary.answered:,} of {summary.requests:,} answered in {duration(summary.duration_seconds)}"),
        ("output", rate(summary.output_tokens_per_second, "tokens")),
        ("output and input", rate(summary.total_tokens_per_second, "tokens")),
        ("throughput", rate(summary.requests_per_second, "requests")),
    ]
    if summary.goodput_requests_per_second is not None:
        share = percent(summary.good_share)
        rows.append(("goodput", f"{rate(summary.goodput_requests_per_second, 'requests')}, {share} of all"))
    if summary.answered:
        means = (tokens / summary.answered for tokens in (summary.prompt_tokens, summary.output_tokens))
        rows.append(("mean tokens", "{} in, {} out".format(*map(digits, means))))
    if summary.tokens_per_chunk is not None and abs(summary.tokens_per_chunk - 1) > 0.02:
        rows.append(("tokens per chunk", digits(summary.tokens_per_chunk)))
    if summary.cached_tokens is not None:
        share = percent(summary.cached_tokens / max(1, summary.prompt_tokens))
        rows.append(("cached", f"{summary.cached_tokens:,} tokens, {share} of the input"))
    return rows


LEVEL_COLUMNS = ("rate", "done/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "goodput")


def level_cells(level: Level) -> list[str]:
    summary = level.summary
    offered = level.load.requests_per_second if isinstance(level.load, Open) else 0.0
    ttft, itl = summary.ttft_seconds, summary.itl_seconds
    return [
        digits(offered),
        amount(summary.requests_per_second),
        amount(summary.output_tokens_per_second),
        *(duration(getattr(item, name, None)) for item in (ttft, itl) for name in ("p50", "p99")),
        amount(summary.goodput_requests_per_second),
    ]
