"""Results of an evaluation for people: a table, a comparison, and a page with accuracy against tokens and dollars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton import formatting
from craton.printable import printable_line

if TYPE_CHECKING:
    from rich.console import Console

    from craton.html_report import Figure

Entry = Mapping[str, Any]
_TITLES = ("SETTING", "ACCURACY", "95% INTERVAL", "SOLVED", "TOKENS/SOLVED", "TIME/SOLVED", "$/SOLVED")
_PAGE_TITLES = (
    "=setting", ">accuracy", ">95% interval", ">problems", ">no verdict", ">tokens/problem", ">tokens/solved",
    ">time/solved", ">$/solved",
)  # fmt: skip


def print_evaluation(result: Mapping[str, Any], console: Console) -> None:
    """Print a row for each setting, and below it pass@k, majority@k, groups and failures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title in _TITLES:
        table.add_column(title, justify="left" if title == "SETTING" else "right", no_wrap=True)
    for entry in result["strategies"]:
        table.add_row(*(Text(cell) for cell in _cells(entry)))
    console.print(f"{result['model']} on {result['suite']}, {formatting.counted(result['num_problems'], 'problem')}")
    console.print(table)
    for entry in result["strategies"]:
        for line in _details(entry):
            console.print(Text(printable_line(f"{entry['words']}: {line}")), soft_wrap=True)
    if not result.get("has_seeds", True):
        console.print("the endpoint has no seeds: the same evaluation gives other samples", style="dim", soft_wrap=True)


def print_comparison(comparison: Sequence[Entry], console: Console) -> None:
    for found in comparison:
        console.print(comparison_text(found), soft_wrap=True, markup=False)


def comparison_text(found: Entry) -> str:
    """Return `vote:4: A 61.0% against B 55.0%: +6.0 points (2.0 to 10.1), p = 0.0031 by McNemar's exact test`."""
    first, second = map(formatting.percent, found["accuracies"])
    points, low, high = (f"{100 * found[key]:+.1f}" for key in ("difference", "low", "high"))
    test = "McNemar's exact test" if found["test"] == "mcnemar" else "sign flips"
    return (
        f"{found['words']}: {found['first']} {first} against {found['second']} {second} on the same "
        f"{formatting.counted(found['num_problems'], 'problem')}: {points} points (95% interval {low} to {high}), "
        f"p = {found['p_value']:.2g} by {test}; better on {found['num_better']:,}, worse on {found['num_worse']:,}"
    )


def write_page(path: Path, results: Mapping[str, Mapping[str, Any]], comparison: Sequence[Entry]) -> None:
    """Write one file with plots and numbers, which loads nothing. `results`: of one or two runs, by their names."""
    from craton.html_report import Markup, page_html, plot_section, section, table, with_code

    name, result = next(iter(results.items()))
    figures: dict[str, Figure] = {}
    body = f"<h1>{escape(result['model'])} on {escape(result['suite'])}</h1>"
    for key, scale, title, axis in (
        ("completion_tokens_per_problem", 1, "Accuracy against tokens", "completion tokens per problem"),
        ("dollars_per_problem", 1000, "Accuracy against dollars", "dollars per 1,000 problems"),
    ):
        if any(entry.get(key) for one in results.values() for entry in one["strategies"]):
            figures[key] = _figure(results, key, scale, axis)
            body += plot_section(title, _finding(result), key)
    for found in comparison:
        body += section("Comparison", comparison_text(found), "")
    for run, one in results.items():
        rows = [("", _page_cells(entry)) for entry in one["strategies"]]
        body += section(f"Numbers of {run}: {one['model']}", _finding(one), table(_PAGE_TITLES, rows, wide=True))
        for entry in one["strategies"]:
            if len(entry["pass_at"]) > 1:
                title = f"Among k of the {entry['words']} of {run}"
                finding = "pass@k: one is right; majority@k: the most frequent answer is"
                body += section(title, finding, table(("k", ">pass@k", ">majority@k"), _at_rows(entry)))
    footer = with_code(f"The same numbers as JSON: `evaluation.json` of the run `{name}`.")
    path.write_text(page_html(f"{name}: evaluation", Markup(body), figures, footer, ""), encoding="utf-8")


def _finding(result: Mapping[str, Any]) -> str:
    best = max(result["strategies"], key=lambda entry: entry["accuracy"] or 0.0)
    return f"best: {best['words']}, {formatting.percent(best['accuracy'])}"


def _at_rows(entry: Entry) -> list[tuple[str, tuple[str, str, str]]]:
    votes = entry["majority_at"]
    return [
        ("", (k, formatting.percent(share), formatting.percent(votes[k]) if k in votes else "–"))
        for k, share in entry["pass_at"].items()
    ]


def _figure(results: Mapping[str, Mapping[str, Any]], key: str, scale: float, axis: str) -> Figure:
    from craton.html_report import axis_name, axis_title, plain_layout

    data = []
    for (run, result), color in zip(results.items(), ("@accent", "@muted"), strict=False):
        entries = sorted((entry for entry in result["strategies"] if entry.get(key)), key=lambda entry: entry[key])
        shares = [entry["accuracy"] for entry in entries]
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [entry["high"] - entry["accuracy"] for entry in entries],
            "arrayminus": [entry["accuracy"] - entry["low"] for entry in entries],
            "color": color,
        }
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": escape(run),
                "x": [scale * entry[key] for entry in entries],
                "y": shares,
                "text": [f" {escape(entry['words'])} " for entry in entries],
                "textposition": [_label_side(entry[key], entries[-1][key]) for entry in entries],
                "cliponaxis": False,
                "error_y": spread,
                "marker": {"color": color, "size": 9},
            }
        )
    layout = plain_layout(360) | {"showlegend": len(results) > 1, "annotations": [axis_name("accuracy")]}
    layout["xaxis"] |= {"title": axis_title(axis), "rangemode": "tozero"}
    layout["yaxis"] |= {"range": [0, 1.05], "tickformat": ".0%"}
    return {"data": data, "layout": layout}


def _label_side(value: float, largest: float) -> str:
    """Place a label beside its interval, and inside the plot."""
    return "middle left" if value > largest / 2 else "middle right"


def _cells(entry: Entry) -> tuple[str, ...]:
    solved = round((entry["accuracy"] or 0.0) * entry["num_scored"], 1)
    return (
        str(entry["words"]),
        formatting.percent(entry["accuracy"]),
        _interval(entry),
        f"{solved:g}/{entry['num_scored']:,}",
        formatting.amount(entry["tokens_per_solved"]),
        formatting.duration(entry["seconds_per_solved"]),
        formatting.small_dollars(entry["dollars_per_solved"]),
    )


def _page_cells(entry: Entry) -> tuple[str, ...]:
    return (
        str(entry["words"]),
        formatting.percent(entry["accuracy"]),
        _interval(entry),
        f"{entry['num_scored']:,} of {entry['num_problems']:,}",
        f"{entry['num_failures']:,}",
        formatting.amount(entry["completion_tokens_per_problem"]),
        formatting.amount(entry["tokens_per_solved"]),
        formatting.duration(entry["seconds_per_solved"]),
        formatting.small_dollars(entry["dollars_per_solved"]),
    )


def _details(entry: Entry) -> list[str]:
    lines = [f"pass@k {_at(entry['pass_at'])}"] if len(entry["pass_at"]) > 1 else []
    lines += [f"majority@k {_at(entry['majority_at'])}"] if entry["majority_at"] else []
    if entry["groups"]:
        groups = (f"{name} {formatting.percent(found['accuracy'])}" for name, found in entry["groups"].items())
        lines.append(" · ".join(groups))
    if entry["num_failures"]:
        reasons = "; ".join(f"{found['error']} ({found['count']:,})" for found in entry["errors"])
        share = formatting.percent(entry["failure_share"])
        lines.append(f"{formatting.counted(entry['num_failures'], 'sample')} without a verdict ({share}): {reasons}")
    return lines


def _interval(entry: Entry) -> str:
    return "–" if entry["low"] is None else formatting.percent_range(entry["low"], entry["high"])


def _at(numbers: Mapping[str, float]) -> str:
    return " · ".join(f"{k}: {formatting.percent(value)}" for k, value in numbers.items())
