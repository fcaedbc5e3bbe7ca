"""`craton plan` of a server's load: the options that override the job's keys, and the plan in every format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from craton.job import Job
    from craton.job.sections.serving import LoadSection, SloSection

LOAD_OPTIONS = ("rate", "concurrency", "requests", "input", "output", "prefix_hits", "acceptance", "burstiness")
SLO_OPTIONS = ("ttft", "tpot", "e2e")
PRECISION_OPTIONS = ("precision", "activation_precision", "kv_precision")


def plan_served_load(
    job: Job, options: dict[str, str], instances: list[str], gpus: str, by: str, html: Path | None, as_json: bool
) -> None:
    """Print the plan of the job's load, with the options in place of its keys. If nothing holds the load, PlanError
    after the plan; with JSON, which says so itself, the exit code 2."""
    import json

    import typer
    from rich.console import Console

    from craton.cli.views.pages import write_page
    from craton.cli.views.progress import progress
    from craton.planning import PlanError
    from craton.planning.report import load_html, load_to_json, load_verdict, render_load
    from craton.planning.serving.search import CHOICES, plan_load

    assert job.serve is not None
    job = with_precisions(job, options)
    load, slo = overridden(job, options)
    if by and by not in CHOICES:
        raise PlanError(f"--by {by!r} is not allowed; choose {', '.join(CHOICES)}")
    with progress("planning"):
        plan = plan_load(job, load, slo, instances=instances, gpus=_count(gpus), by=by)
    if html:
        write_page(html, load_html(plan))
    if as_json:
        print(json.dumps(load_to_json(plan)))
        raise typer.Exit(0 if plan.holds else 2)
    render_load(plan, Console())
    if html:
        Console().print(f"report: {html}", highlight=False)
    if not plan.holds:
        raise PlanError(load_verdict(plan))


def overridden(job: Job, options: dict[str, str]) -> tuple[LoadSection, SloSection]:
    """Return the job's load and limits with these options, which are the keys' values in YAML. PlanError names the
    option."""
    from craton.job import check_load
    from craton.job.document import KeyConflictError
    from craton.job.sections.serving import LoadSection, SloSection
    from craton.planning import PlanError

    assert job.serve is not None
    stated = job.serve.load.model_dump(exclude_unset=True) if job.serve.load else {}
    given = {name: _value(name, options[name]) for name in LOAD_OPTIONS if options.get(name)}
    if "rate" in given and "concurrency" in given:
        raise PlanError("--rate and --concurrency: a load is open or closed; remove one of them")
    if "rate" in given:
        stated.pop("concurrency", None)
        stated.pop("requests", None)
    if "concurrency" in given:
        stated.pop("rate", None)
        stated.pop("burstiness", None)
    limits = {**job.serve.slo.model_dump(exclude_none=True)}
    limits |= {name: _value(name, options[name]) for name in SLO_OPTIONS if options.get(name)}
    load = _section(LoadSection, {**stated, **given})
    slo = _section(SloSection, limits)
    try:
        check_load(job.serve, load, job.served_length)
    except KeyConflictError as error:
        raise PlanError(str(error)) from None
    return load, slo


def with_precisions(job: Job, options: dict[str, str]) -> Job:
    """Return the job with the precisions of these options. PlanError names the option."""
    from craton.job import check_precisions
    from craton.job.document import KeyConflictError
    from craton.planning import PlanError

    given = {name: options[name] for name in PRECISION_OPTIONS if options.get(name)}
    if not given:
        return job
    assert job.serve is not None
    checked = _section(type(job.serve), given)
    serve = job.serve.model_copy(update={name: getattr(checked, name) for name in given})
    try:
        check_precisions(serve, job.software)
    except KeyConflictError as error:
        raise PlanError(str(error)) from None
    return job.model_copy(update={"serve": serve})


def _section(section: Any, values: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from craton.job.document import section_problems
    from craton.planning import PlanError

    try:
        return section.model_validate(values)
    except ValidationError as error:
        problem = section_problems(section, error, "option")[0]
        if unknown := re.fullmatch(r"(key .*) is not known under option\.(\w+)(.*)", problem):
            raise PlanError(f"--{unknown[2].replace('_', '-')}: {unknown[1]} is not known{unknown[3]}") from None
        name, colon, reason = problem.removeprefix("option.").partition(":")
        key = name.partition(".")[0]
        if colon and key in (*LOAD_OPTIONS, *SLO_OPTIONS, *PRECISION_OPTIONS):
            raise PlanError(f"--{key.replace('_', '-')}:{reason}") from None
        raise PlanError(reason.strip() if key == "load" else problem) from None


def _value(name: str, text: str) -> Any:
    """Parse an option: a value, `100..2000` for a range of lengths, or `mean=1024,p95=3000`."""
    from craton.job import JobError
    from craton.job.document import parse_document
    from craton.planning import PlanError

    if name in ("input", "output") and ".." in text:
        low, _, high = text.partition("..")
        return {"min": low, "max": high}
    if "=" in text:
        pairs = [(key.strip(), value.strip()) for key, _, value in (part.partition("=") for part in _parts(text))]
        for key, _ in pairs:
            if [other for other, _ in pairs].count(key) > 1:
                raise PlanError(f"--{name.replace('_', '-')} {text!r} gives {key} twice; remove one of them")
        return dict(pairs)
    try:
        return parse_document(f"value: {text}\n", f"--{name.replace('_', '-')}").data["value"]
    except JobError:
        raise PlanError(f"--{name.replace('_', '-')} {text!r} cannot be read; write e.g. 20, 500ms or p99=1s") from None


def _parts(text: str) -> list[str]:
    """Split `mean=1,024,p95=3,000` before each name."""
    return re.split(r",(?![0-9])", text)


def _count(text: str) -> int | None:
    from craton.planning import PlanError

    if not text:
        return None
    if not text.isdecimal() or not int(text) or len(text) > 9:
        raise PlanError(f"--gpus {text!r} is not a number of GPUs for a server; write e.g. 8")
    return int(text)
