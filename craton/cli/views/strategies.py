"""`craton plan --eval`: read what is known of a model's samples, plan strategies, and show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from craton.job import Job
    from craton.planning.strategies import PriceModel, SampleLengths, SampleRecord


def plan_test_time(
    job: Path | None,
    evaluation: str,
    accuracy: str,
    tokens: str,
    price: str,
    budget: str,
    strategies: list[str],
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of strategies, as a table or as JSON, and write it as HTML."""
    from rich.console import Console

    from craton.api import is_suite, suite_record
    from craton.cli.views.pages import write_page
    from craton.cli.views.progress import progress
    from craton.job.sections.strategy import read_strategy
    from craton.planning import PlanError
    from craton.planning.report import render_strategies, strategies_html, strategies_to_json
    from craton.planning.strategies import parse_accuracy, parse_budget, plan_strategies, shape_of

    suite = bool(evaluation) and is_suite(evaluation) and not _has_evaluation(evaluation)
    if evaluation and accuracy and not suite:
        _record(evaluation)  # what is wrong with it says more
        raise PlanError("--eval and --accuracy both say what is known; remove one of them, or give a suite as --eval")
    if job is not None and price:
        raise PlanError("--price is that of an endpoint, and JOB is a server of our own; remove one of them")
    server = None if job is None else _server(job)
    if suite:
        record = suite_record(evaluation, server, accuracy)
    else:
        record = parse_accuracy(accuracy) if accuracy else _record(evaluation)
    lengths = _lengths(tokens)
    limit = parse_budget(budget) if budget else None
    shapes = [shape_of(read_strategy(text, "--strategy"), "--strategy") for text in strategies]
    prices = _prices(server, price, record)
    with progress("strategies"):
        plan = plan_strategies(record, prices, limit, shapes, lengths)
    if html:
        write_page(html, strategies_html(plan))
    if as_json:
        print(json.dumps(strategies_to_json(plan)))
        return
    console = Console()
    render_strategies(plan, console)
    if html:
        console.print(f"report: {html}", highlight=False)


def _record(name: str) -> SampleRecord:
    from craton.planning.strategies import read_record
    from craton.telemetry import RunError, find_run

    path = Path(name).expanduser()
    if not path.exists():
        try:
            path = find_run(name).path
        except RunError:
            path = Path(name)
    return read_record(path)


def _lengths(text: str) -> SampleLengths | None:
    from craton.planning.strategies import SampleLengths

    if not text:
        return None
    prompt, completion = _pair(text, "--tokens", "tokens of a prompt and a completion, e.g. 300,800")
    return SampleLengths(prompt, completion)


def _has_evaluation(name: str) -> bool:
    """Return whether this is the name of a run that has evaluated, which may have the name of a suite."""
    from craton.telemetry import RunError, find_run

    try:
        return (find_run(name).path / "evaluation.json").is_file()
    except RunError:
        return False


def _server(path: Path) -> Job:
    from craton.job import load_job
    from craton.planning import PlanError

    job = load_job(path)
    if not job.serve:
        raise PlanError(f"{job.where('kind')}kind {job.kind} does not serve; with --eval name a job of kind serve")
    return job


def _prices(job: Job | None, price: str, record: SampleRecord) -> PriceModel:
    from craton.planning.serving import plan_serving
    from craton.planning.strategies import EndpointPrice, MeasuredPrice, NoPrice, ServerPrice

    if price:
        return EndpointPrice(
            *_pair(price, "--price", "dollars per million prompt and completion tokens, e.g. 0.15,0.60")
        )
    if job is not None:
        return ServerPrice(plan_serving(job))
    if record.dollars_per_token is not None or record.seconds_per_token is not None:
        return MeasuredPrice(record.seconds_per_token, record.dollars_per_token)
    return NoPrice()


def _pair(text: str, option: str, what: str) -> tuple[float, float]:
    from craton.planning import PlanError

    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        first = second = -1.0
    if not (0 <= first < float("inf") and 0 < second < float("inf")):
        raise PlanError(f"{option} {text!r} is not two numbers; write the {what}")
    return first, second
