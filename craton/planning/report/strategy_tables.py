"""The plan of strategies in the terminal: the best ones first, then accuracy, then cost. 80 columns or more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from craton import formatting
from craton.planning.strategies import PlannedStrategy, StrategiesPlan

TITLE_WIDTH = 8
UNLIMITED = 10_000  # columns
_OMITTED = ("per hour", "interval", "measured", "fit")  # costs that narrow screens have no place for, the first first
THOUSAND = 1000.0
BEST, FRONT = "◆", "·"


def render_strategies(plan: StrategiesPlan, console: Console) -> None:
    """Print the whole plan."""
    console.print(Text(plan.title, style="bold"), highlight=False)
    for title, text in strategy_fields(plan):
        _print_field(console, title, text)
    if any(row.accuracy is not None for row in plan.rows):
        console.print(Text("\nAccuracy", style="bold"), Text("share of problems solved"), highlight=False)
        console.print(_accuracy_table(plan), highlight=False)
    if plan.lengths is not None:
        table = _cost_table(plan, console)
        fit = any(column.header == "fit" for column in table.columns)
        title = f"of one problem, on average{'; fit: problems whose KV cache fits at once' if fit else ''}"
        console.print(Text("\nCost", style="bold"), Text(title), highlight=False)
        console.print(table, highlight=False)
    within = "" if plan.budget is None else " within the budget; grey: beyond it"
    console.print(f"\n{BEST} best{within}   {FRONT} nothing cheaper is as accurate", style="dim", highlight=False)
    if any(row.needs_truth for row in plan.rows):
        text = "best of n is predicted for a verifier that is always right, such as unit tests"
        console.print(text, style="dim", highlight=False)
    for note in plan.notes:
        _print_field(console, "!", note, style="yellow")


def strategy_fields(plan: StrategiesPlan) -> list[tuple[str, str]]:
    """Return the sentences above the tables, each with its title."""
    fields = [("known", known_text(plan)), ("price", plan.price_source)]
    if plan.lengths_source:
        fields.insert(1, ("lengths", plan.lengths_source))
    if plan.budget is not None:
        fields.append(("budget", str(plan.budget)))
    if plan.known.most_samples:
        fields += _best_fields(plan)
    return fields


def _best_fields(plan: StrategiesPlan) -> list[tuple[str, str]]:
    fields = [("best", best_text(plan.best, "no strategy"))]
    if plan.best_with_truth is not None:
        fields.append(("verified", best_text(plan.best_with_truth, "no best of n")))
    return fields


def known_text(plan: StrategiesPlan) -> str:
    """Return what the plan is predicted from."""
    known = plan.known
    passes = ", ".join(f"{formatting.percent(share)} with {size}" for size, share in sorted(known.pass_at.items())[:1])
    text = formatting.counted(known.num_problems, "problem")
    if known.most_samples:
        text += f", up to {formatting.counted(known.most_samples, 'sample')} of each; {passes}"
    else:
        text += ", no accuracy"
    if plan.lengths is not None:
        lengths = plan.lengths
        prompt, completion = (
            formatting.count(round(part)) for part in (lengths.prompt_tokens, lengths.completion_tokens)
        )
        text += f"; {prompt} prompt and {completion} completion tokens"
    return text


def best_text(row: PlannedStrategy | None, missing: str) -> str:
    """Return a strategy with its accuracy and cost in one sentence."""
    if row is None:
        return f"{missing} is within the budget"
    source = "measured" if row.measured is not None else "predicted"
    accuracy = f"{formatting.percent(row.accuracy)} {source}"
    if row.measured is None and row.predicted is not None:
        accuracy += f" ({formatting.percent_range(row.predicted.low, row.predicted.high)})"
    parts = [f"{row.name}{f', n {row.n}' if row.n > 1 else ''}: {accuracy}"]
    if row.usage is not None:
        parts.append(f"{formatting.count(round(row.usage.tokens))} tokens")
    if row.price.dollars is not None:
        parts.append(f"{formatting.dollars(row.price.dollars * THOUSAND)} per 1,000 problems")
    return ", ".join(parts)


def mark_of(plan: StrategiesPlan, row: PlannedStrategy) -> str:
    if plan.best is not None and row.shape == plan.best.shape:
        return BEST
    if plan.best_with_truth is not None and row.shape == plan.best_with_truth.shape:
        return BEST
    return FRONT if row.is_on_front else " "


def per_thousand_solved(row: PlannedStrategy) -> str:
    """Return the dollars of a thousand solved problems, with the interval of the accuracy."""
    if row.dollars_per_solved is None:
        return formatting.UNKNOWN
    middle, low, high = (value * THOUSAND for value in row.dollars_per_solved)
    text = formatting.dollars(middle)
    if low == high or not math.isfinite(high):
        return text
    return f"{text} ({formatting.dollars_range(low, high)})"


def _accuracy_table(plan: StrategiesPlan) -> Table:
    table = _table("mark", "strategy", ">n", ">predicted", "80% interval", ">measured", ">ratio", "inside")
    for row in plan.rows:
        predicted, measured = row.predicted, row.measured
        inside = {True: "yes", False: "no", None: ""}[row.is_inside]
        table.add_row(
            mark_of(plan, row),
            row.name,
            _size(row),
            formatting.percent(predicted.accuracy) if predicted else "",
            formatting.percent_range(predicted.low, predicted.high) if predicted else "",
            formatting.percent(measured.accuracy) if measured else "",
            f"{row.ratio:.2f}" if row.ratio is not None else "",
            Text(inside, style="red" if row.is_inside is False else ""),
            style="" if row.is_affordable else "dim",
        )
    return table


def _cost_table(plan: StrategiesPlan, console: Console) -> Table:
    """Return the table of costs, without what has no place on the screen."""
    unlimited = console.options.update(width=UNLIMITED)
    for num_omitted in range(len(_OMITTED) + 1):
        table = _costs_without(plan, _OMITTED[:num_omitted])
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    return table


def _costs_without(plan: StrategiesPlan, omitted: Sequence[str]) -> Table:
    columns = ["mark", "strategy", ">n", ">tokens"]
    if any(row.measured is not None and row.measured.tokens_per_problem for row in plan.rows):
        columns.append(">measured")
    columns.append(">KV cache")
    if any(row.price.concurrency is not None for row in plan.rows):
        columns += [">fit", ">latency"]
    if any(row.price.problems_per_hour is not None for row in plan.rows):
        columns.append(">per hour")
    if any(row.price.dollars is not None for row in plan.rows):
        columns += [">$ per 1k", ">$ per 1k solved"]
    columns = [column for column in columns if column.lstrip(">") not in omitted]
    table = _table(*columns)
    for row in plan.rows:
        cells = _costs(plan, row)
        if "interval" in omitted:
            cells["$ per 1k solved"] = cells["$ per 1k solved"].partition(" (")[0]
        table.add_row(*(cells[column.lstrip(">")] for column in columns), style="" if row.is_affordable else "dim")
    return table


def _costs(plan: StrategiesPlan, row: PlannedStrategy) -> dict[str, str]:
    usage, price = row.usage, row.price
    assert usage is not None
    dollars, rate = price.dollars, price.problems_per_hour
    measured_tokens = row.measured.tokens_per_problem if row.measured is not None else None
    kv_cache = formatting.count(round(usage.kv_tokens)) if price.kv_bytes is None else formatting.memory(price.kv_bytes)
    return {
        "mark": mark_of(plan, row),
        "strategy": row.name,
        "n": _size(row),
        "tokens": formatting.count(round(usage.tokens)),
        "measured": "" if not measured_tokens else formatting.count(round(measured_tokens)),
        "KV cache": kv_cache,
        "fit": "none" if (price.concurrency or 0) < 1 else formatting.count(math.floor(price.concurrency or 0)),
        "latency": formatting.duration(price.latency_seconds),
        "per hour": formatting.UNKNOWN if rate is None else formatting.count(round(rate)),
        "$ per 1k": formatting.UNKNOWN if dollars is None else formatting.dollars(dollars * THOUSAND),
        "$ per 1k solved": per_thousand_solved(row),
    }


def _size(row: PlannedStrategy) -> str:
    return "" if row.shape.kind == "budget" else str(row.n)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(
            column.lstrip(">").replace("mark", ""), justify="right" if column.startswith(">") else "left", no_wrap=True
        )
    return table


def _print_field(console: Console, title: str, text: str, style: str = "dim") -> None:
    grid = Table.grid(padding=0)
    grid.add_column(no_wrap=True, min_width=TITLE_WIDTH + 2 if len(title) > 1 else 2)
    grid.add_column(overflow="fold")
    grid.add_row(Text(title, style=style), Text(text))
    console.print(grid, highlight=False)
