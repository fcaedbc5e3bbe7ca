"""The page of the lifecycle: accuracy after each stage, and the curves of every stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy import Accuracy

from craton.formatting import duration
from craton.html_report import (
    Figure,
    Markup,
    axis_name,
    axis_title,
    page_html,
    plain_layout,
    plot_section,
    section,
    table,
)
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

CURVES = {
    "pretrain": ("run_loss", "loss"),
    "sft": ("run_loss", "loss"),
    "dpo": ("run_reward_accuracy", "share of pairs whose chosen completion has the larger reward"),
    "grpo": ("run_reward", "mean reward of a step"),
}


@dataclass(frozen=True)
class Stage:
    """A stage that has run."""

    name: str
    seconds: float
    accuracy: Accuracy
    run: RunDirectory

    def curve(self) -> tuple[list[int], list[float]]:
        """Return the steps and the values of the stage's own curve."""
        metric = CURVES[self.name][0]
        lines, _ = read_lines(self.run.metrics_path("node-0"))
        points = {int(line["step"]): float(line[metric]) for line in lines if metric in line}
        return list(points), list(points.values())


def write_page(path: Path, stages: list[Stage], served: float) -> None:
    """Write one file with all plots, which loads nothing."""
    figures: dict[str, Figure] = {"accuracy": _bars(stages)}
    finding = f"right answers at temperature 1: {stages[0].accuracy.mean:.0%} → {stages[-1].accuracy.mean:.0%}"
    body = "<h1>One model through all stages</h1>" + plot_section("Accuracy", finding, "accuracy")
    for stage in stages:
        figures[stage.name] = _line(stage)
        _, values = stage.curve()
        body += plot_section(stage.name, f"{CURVES[stage.name][1]}: {values[0]:.2f} → {values[-1]:.2f}", stage.name)
    rows = [
        ("", (stage.name, f"{stage.accuracy.mean:.1%}", f"{stage.accuracy.greedy_mean:.1%}", duration(stage.seconds)))
        for stage in stages
    ]
    numbers = table(("=stage", ">right at temperature 1", ">right greedily", ">time"), rows)
    body += section("Numbers", f"over HTTP, greedily: {served:.0%} right", numbers)
    path.write_text(
        page_html("Craton: lifecycle", Markup(body), figures, "1,000 sums that no stage has seen", ""), encoding="utf-8"
    )


def _bars(stages: list[Stage]) -> Figure:
    names = [stage.name for stage in stages]
    series = (
        ("temperature 1", "@accent", [s.accuracy.mean for s in stages]),
        ("greedy", "@muted", [s.accuracy.greedy_mean for s in stages]),
    )
    data = [
        {"type": "bar", "name": name, "x": names, "y": values, "marker": {"color": color}}
        for name, color, values in series
    ]
    layout = plain_layout(300) | {"showlegend": True, "barmode": "group", "annotations": [axis_name("right answers")]}
    layout["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    return {"data": data, "layout": layout}


def _line(stage: Stage) -> Figure:
    steps, values = stage.curve()
    layout: dict[str, Any] = plain_layout(220) | {"annotations": [axis_name(CURVES[stage.name][1])]}
    layout["xaxis"] |= {"title": axis_title("step")}
    return {"data": [{"type": "scatter", "x": steps, "y": values, "line": {"color": "@accent"}}], "layout": layout}
