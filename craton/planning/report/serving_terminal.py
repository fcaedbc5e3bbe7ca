"""A server's plan in the terminal: whether it fits, the KV cache it has, and its throughput. 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from craton import formatting
from craton.planning.serving import ServePlan

TITLE_WIDTH = 13


_PART_NAMES = {"keys and values": "KV cache"}  # display names of the plan's memory parts


def render_serving(plan: ServePlan, console: Console) -> None:
    """Print the whole plan."""
    status = ("FITS", "bold green") if plan.fits else ("DOES NOT FIT", "bold red")
    console.print(Text.assemble((plan.job, "bold"), "  ", status), highlight=False)
    console.print(Text(_verdict(plan)), highlight=False)
    for title, text in _memory_fields(plan) + (_speed_fields(plan) if plan.fits else []):
        print_field(console, title, text)
    if plan.fits:
        heading = "Decode throughput in tokens/s, by number of requests and context length"
        console.print(Text(f"\n{heading}", style="bold"), highlight=False)
        console.print(_decode_table(plan), highlight=False)
    for warning in plan.warnings:
        print_field(console, "!", warning, style="yellow")


def print_field(console: Console, title: str, text: str, style: str = "dim") -> None:
    """Print a title and its text, which continues in the column of the text."""
    grid = Table.grid(padding=0)
    grid.add_column(no_wrap=True, min_width=TITLE_WIDTH)
    grid.add_column(overflow="fold")
    grid.add_row(Text(title, style=style), Text(text))
    console.print(grid, highlight=False)


def _verdict(plan: ServePlan) -> str:
    model, gpu = plan.model, plan.cluster.instance.gpu
    size = f"{formatting.count(model.parameters)} parameters"
    ranks = f"{plan.tp} ranks ({plan.layout})" if plan.tp > 1 else "1 rank"
    return f"Serving {model.name}, {size}, in {plan.precision} with {ranks} on {gpu.name}."


def _memory_fields(plan: ServePlan) -> list[tuple[str, str]]:
    parts = {_PART_NAMES.get(name, name): size for name, size in plan.memory_parts.items()}
    gibibytes = ", ".join(f"{name} {formatting.gibibytes(size)}" for name, size in parts.items())
    memory = f"{formatting.memory(plan.memory_bytes)} of {formatting.memory(plan.memory_limit_bytes)} per rank"
    kv = f"{formatting.count(plan.kv_tokens)} tokens ({formatting.stored(plan.kv_bytes_per_token)} each)"
    if plan.fits:
        kv += f": {_requests(plan.requests)} of {plan.prompt_tokens + plan.output_tokens:,} tokens"
    if plan.host_kv_tokens:
        kv += f"; {formatting.count(plan.host_kv_tokens)} more in host memory"
    if not plan.fits:
        kv += f"; {plan.needed_tokens:,} are needed: raise serve.memory, use fp8, more ranks (tp) or a smaller model"
    return [("memory", f"{memory} (GiB: {gibibytes})"), ("KV cache", kv)]


def _speed_fields(plan: ServePlan) -> list[tuple[str, str]]:
    single = _speed(
        plan.single_tokens_per_second, plan.single_tokens_per_second_low, plan.single_tokens_per_second_high
    )
    best = _speed(plan.best_tokens_per_second, plan.best_tokens_per_second_low, plan.best_tokens_per_second_high)
    fields = [
        ("one request", f"{single}; roofline {formatting.count(round(plan.single_roof_tokens_per_second))}"),
        *_speculation_fields(plan),
        (
            "together",
            f"{best}: {_requests(plan.best_batch)} at once, {formatting.duration(plan.best_tpot_seconds)} per token; "
            f"the largest part of a step: {plan.bound}",
        ),
        (
            "first token",
            f"{formatting.duration(plan.first_token_seconds)} on an idle server; prefill at "
            f"{formatting.count(round(plan.prefill_tokens_per_second))} tokens/s",
        ),
    ]
    if plan.dollars_per_hour is not None and plan.dollars_per_million_tokens is not None:
        per_million = formatting.dollars(plan.dollars_per_million_tokens)
        fields.append(
            ("cost", f"{formatting.dollars(plan.dollars_per_hour)} per hour, {per_million} per million tokens together")
        )
    lengths = f"{plan.prompt_tokens:,} prompt tokens and answers of {plan.output_tokens:,}"
    fields.append(("assumed", f"{lengths}; 80% intervals of engine {plan.engine}, {plan.basis}"))
    return fields


def _speculation_fields(plan: ServePlan) -> list[tuple[str, str]]:
    drafts = plan.speculation
    if drafts is None:
        return []
    acceptance = f"acceptance {formatting.percent(drafts.acceptance)} assumed"
    published = f"{formatting.percent(drafts.acceptance_low)} to {formatting.percent(drafts.acceptance_high)}"
    if not drafts.draft_tokens:
        return [("drafts", f"{drafts.model}: no draft tokens, they would cost more than they save at {acceptance}")]
    tokens = "1 draft token" if drafts.draft_tokens == 1 else f"{drafts.draft_tokens} draft tokens"
    return [
        (
            "drafts",
            f"{drafts.model}, {tokens} per step{' (auto)' if drafts.is_auto else ''}: one request "
            f"{formatting.count(round(drafts.single_tokens_per_second))} tokens/s, {drafts.speedup:.2f}x "
            f"({drafts.speedup_low:.2f}x to {drafts.speedup_high:.2f}x); {acceptance} ({published})",
        )
    ]


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def _speed(value: float, low: float, high: float) -> str:
    value_text, low_text, high_text = (formatting.count(round(each)) for each in (value, low, high))
    return f"{value_text} tokens/s ({low_text} to {high_text})"


def _decode_table(plan: ServePlan) -> Table:
    contexts = sorted({point.context for point in plan.decode})
    rates = {(point.batch, point.context): point.tokens_per_second for point in plan.decode}
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("requests", justify="right")
    for context in contexts:
        table.add_column(f"context {context:,}", justify="right")
    for batch in sorted({point.batch for point in plan.decode}):
        cells = [rates.get((batch, context)) for context in contexts]
        table.add_row(f"{batch:,}", *("no room" if rate is None else formatting.count(round(rate)) for rate in cells))
    return table
