"""The outcome of a run: a table of predicted against measured in a terminal, one JSON object for scripts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craton import formatting
from craton.remote import is_url

if TYPE_CHECKING:
    from rich.console import Console

    from craton.orchestration.start import SavedStep
    from craton.orchestration.watching import Recovery
    from craton.telemetry import RunDirectory, RunSummary

_TITLES = {"tokens_per_second": "tokens/s", "mfu": "MFU", "memory_bytes": "memory", "cost_dollars": "cost"}
_WRITERS = {
    "memory_bytes": formatting.memory,
    "tokens_per_second": formatting.amount,
    "mfu": formatting.percent,
    "goodput": formatting.percent,
    "cost_dollars": formatting.dollars,
}
_RANGE_WRITERS = {
    "tokens_per_second": formatting.amount_range,
    "mfu": formatting.percent_range,
    "goodput": formatting.percent_range,
    "cost_dollars": formatting.dollars_range,
}
MIN_SHARE = 0.0005  # of the time, below which a ledger kind is not printed


def exit_code(summary: RunSummary) -> int:
    """Return 0 for done or stopped as requested, 1 for failed or lost."""
    return 1 if summary.state in ("failed", "lost") else 0


def print_outcome(run: RunDirectory, summary: RunSummary, console: Console) -> None:
    """Print how the run ended, predicted against measured, and what to do next."""
    from rich.text import Text

    from craton.orchestration.start import newest_checkpoint
    from craton.orchestration.watching import read_recoveries

    if summary.state in ("done", "stopped") and summary.step and summary.plan:
        print_comparison(run, summary, console)
    if summary.results:
        console.print(results_text(summary))
    if summary.ledger:
        console.print(f"time: {ledger_text(summary)} · {goodput_text(summary)}")
    recoveries = read_recoveries(run)
    if recoveries:
        console.print(recoveries_text(recoveries), style="yellow", markup=False)
    is_gone = not run.path.is_dir()
    saved = None if is_gone else newest_checkpoint(run)
    at = f"; checkpoint of step {saved.step:,} in {shown(saved.path)}{not_in_tier(run, saved)}" if saved else ""
    name = summary.name
    if summary.state == "done":
        took = f" in {formatting.duration(summary.wall_seconds)}" if summary.wall_seconds else ""
        console.print(Text.assemble((f"{name} is done", "bold green"), f"{took}{at}"))
        if saved and summary.plan:
            console.print(f"next: craton export {name} FOLDER · {_use_of(run)}", style="dim", markup=False)
    elif summary.state == "stopped":
        of = f" of {summary.steps:,}" if summary.steps else ""
        console.print(Text.assemble((f"{name} stopped", "bold"), f" after step {summary.step:,}{of}{at}"))
        console.print(f"next: craton resume {name}", style="dim")
    elif is_gone:
        console.print(Text(f"{name} is lost", style="bold red"))
        console.print(Text(summary.message), soft_wrap=True)
    else:
        print_failure(run, summary, console, at, resumes_from(run, saved is not None))


def resumes_from(run: RunDirectory, is_saved: bool) -> str:
    """Return from where `craton resume` continues a run without a checkpoint, as the end of a sentence."""
    from craton.job import load_job

    kind = load_job(run.job_path).kind
    if is_saved or kind == "serve":
        return ""
    return ", from the problems that have no result yet" if kind == "eval" else ", from the beginning"


def _use_of(run: RunDirectory) -> str:
    """Return what to do with the trained model: ask it, or let it score the rollouts of another job."""
    from craton.job import JobError
    from craton.job.model import trains_reward_model

    try:
        if trains_reward_model(run.path):
            return "kind: grpo with reward: [{model: FOLDER}]"
    except JobError:  # the job file is broken or gone
        pass
    return f"craton sample {run.name} --prompt '...'"


def not_in_tier(run: RunDirectory, saved: SavedStep) -> str:
    """Return `, not in its tier: ...` if the newest state is in the run directory because no tier accepted it."""
    from craton.job.sections import RESCUE
    from craton.orchestration.start import find_rescue

    rescue = find_rescue(run) if saved.tier == RESCUE else None
    return f", not in its tier: {rescue.reason}" if rescue else ""


def print_failure(run: RunDirectory, summary: RunSummary, console: Console, at: str = "", begin: str = "") -> None:
    """Print that a run failed or is lost, its error message and what to do. `at`: saved state; `begin`: resume from."""
    from rich.text import Text

    name = summary.name
    console.print(Text(f"{name} {'failed' if summary.state == 'failed' else 'is lost'}{at}", style="bold red"))
    console.print(Text(summary.message or "no error message"))
    console.print(f"logs: {shown(run.path / 'logs')} · craton logs {name}", style="dim", soft_wrap=True)
    job = shown(run.job_path)
    console.print(f"next: fix the cause (job file: {job}), then run: craton resume {name}{begin}", style="dim")


def ledger_text(summary: RunSummary) -> str:
    """Return where the time went: `start 3.0 s (12%) · productive 22.0 s (88%)`."""
    total = sum(summary.ledger.values())
    return " · ".join(
        f"{kind} {formatting.duration(seconds)} ({formatting.percent(seconds / total)})"
        for kind, seconds in summary.ledger.items()
        if total and seconds / total >= MIN_SHARE
    )


def results_text(summary: RunSummary) -> str:
    """Return what post-training reached: `reward 0.12 · length 143 · KL 0.01`."""
    from craton.telemetry import result_details, result_words

    details = [f"{title} {text}" for title, text in result_details(summary.results)]
    return " · ".join([*result_words(summary.results), *details])


def goodput_text(summary: RunSummary) -> str:
    """Return `goodput 91% (planned 97%)`."""
    planned = summary.plan.get("goodput")
    return f"goodput {formatting.percent(summary.goodput)}" + (
        f" (planned {formatting.percent(planned)})" if planned else ""
    )


def recoveries_text(recoveries: list[Recovery]) -> str:
    """Return `2 recoveries, the last: rank 3 was killed ...`."""
    count = len(recoveries)
    return f"{'1 recovery' if count == 1 else f'{count} recoveries, the last'}: {recoveries[-1].text}"


def print_comparison(run: RunDirectory, summary: RunSummary, console: Console) -> None:
    """Print the table of predicted against measured."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from craton.cli.views.live import change_style
    from craton.orchestration.watching import compare

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Predicted against measured", title_justify="left")
    table.title_style = "bold"
    for column in ("", "predicted", "80% interval", "measured", "ratio", ""):
        table.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
    for item in compare(run, summary):
        write = _WRITERS.get(item.name, formatting.duration)
        write_range = _RANGE_WRITERS.get(item.name, formatting.duration_range)
        interval = "" if item.low is None or item.high is None else write_range(item.low, item.high)
        ratio = "" if item.ratio is None else f"{item.ratio:.2f}"
        style = change_style(formatting.change(item.measured, item.predicted)) if ratio and item.measured else ""
        inside = {None: "", True: "inside", False: "outside"}[item.is_inside]
        table.add_row(
            _TITLES.get(item.name, item.name.removesuffix("_seconds")),
            write(item.predicted),
            interval,
            Text(write(item.measured), style="bold"),
            Text(ratio, style=style),
            Text(inside, style={"outside": "yellow"}.get(inside, "dim")),
        )
    console.print(table, highlight=False)


def outcome_json(run: RunDirectory, summary: RunSummary) -> dict[str, Any]:
    from craton.orchestration.start import newest_checkpoint
    from craton.orchestration.watching import compare, read_recoveries

    saved = newest_checkpoint(run) if run.path.is_dir() else None
    rows = compare(run, summary)
    return {
        **summary_json(summary),
        **recoveries_json(read_recoveries(run)),
        "checkpoint_step": saved.step if saved else None,
        "checkpoint_path": str(saved.path) if saved else None,
        "comparison": [{**asdict(row), "ratio": row.ratio, "is_inside": row.is_inside} for row in rows],
    }


def recoveries_json(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    return {"recoveries": [{**asdict(recovery), "text": recovery.text} for recovery in recoveries]}


def summary_json(summary: RunSummary) -> dict[str, Any]:
    """Return a summary as JSON: paths as text, NaN as null."""
    document = asdict(summary)
    document["path"] = str(summary.path)
    document["against_plan"] = summary.against_plan
    document["node_seconds"] = summary.node_seconds
    document["total_node_seconds"] = summary.total_node_seconds
    document["total_cost_dollars"] = summary.total_cost_dollars
    loss = summary.loss
    document["loss"] = None if loss is None or loss != loss else loss
    return document


def shown(path: Path | str) -> str:
    """Return a path relative to the working directory where it is inside it; a URL unchanged."""
    if is_url(str(path)):
        return str(path)
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
