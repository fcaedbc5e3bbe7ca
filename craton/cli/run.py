"""`craton run JOB`: plan it, write the run directory, start it, and watch."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from craton.cli.views.fields import print_field
from craton.cli.views.outcome import shown
from craton.formatting import counted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from craton.api import Run
    from craton.job import Job
    from craton.orchestration.draft import Draft, Progress
    from craton.orchestration.start import RunStart, SavedStep
    from craton.planning import CostPlan, Plan
    from craton.planning.serving import ServePlan
    from craton.telemetry import RunDirectory


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).", show_default=False)],
    on: Annotated[
        str | None,
        typer.Option(help="local, slurm or kubernetes \\[default: as the cluster says].", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run \\[default: the job's].", show_default=False)
    ] = None,
    stop_at: Annotated[
        str | None,
        typer.Option(help="Stop with a checkpoint after this step (120, or 60%); resume goes on.", show_default=False),
    ] = None,
    chaos: Annotated[
        list[str] | None,
        typer.Option(
            help="Break it on purpose, such as 'kill rank=1@step=40'; may be repeated (see craton chaos).",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written and started.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before spending money.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it and return at once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")] = False,
) -> None:
    """Run a job: plan, prepare the data, start the ranks, and show how it goes against the plan."""
    from craton import api
    from craton.cli.views.live import make_console
    from craton.cli.views.progress import progress

    console = make_console(as_json)
    if dry_run:
        with progress("planning") as report:
            start = api.preview(job, name, on=on, chaos=chaos or (), stop_at=stop_at, progress=report)
        print_draft(start.draft, start.run.path, as_json)
        return
    view = StartView(console, yes=yes, as_json=as_json)
    handle = api.run(job, name, on=on, chaos=chaos or (), stop_at=stop_at, watch=view)
    if view.draft.job.run.copies > 1:
        print_array(view.runs, console, as_json)
        return
    follow(handle, view.draft, console, detach=detach, as_json=as_json)


class StartView:
    """Shows a start on the terminal, and asks before it spends money."""

    def __init__(self, console: Console, *, yes: bool, as_json: bool) -> None:
        self._console, self._yes, self._as_json = console, yes, as_json
        self._start: RunStart | None = None

    @property
    def has_planned(self) -> bool:
        return self._start is not None

    @property
    def draft(self) -> Draft:
        assert self._start is not None, "nothing was planned"
        return self._start.draft

    @property
    def runs(self) -> list[RunDirectory]:
        assert self._start is not None, "nothing was planned"
        return self._start.runs

    def stage(self, name: str) -> AbstractContextManager[Progress]:
        from craton.cli.views.progress import progress

        return progress(name, in_bytes=name == "data")

    def planned(self, start: RunStart) -> None:
        from craton.api import Run

        self._start, job = start, start.draft.job
        saved = Run(start.run).checkpoint() if start.resumes and not job.serve else None
        if not self._as_json:
            print_plan(start.draft, self._console, saved)
            if start.resumes and not job.serve:
                print_field(self._console, "from", _beginning(job, saved))
        warn_of_place(start.draft, start.root, self._console)
        confirm(start.draft, self._yes, saved)

    def prepared(self, start: RunStart, tokens: dict[str, int]) -> None:
        from craton import formatting

        self._start = start
        for path, count in tokens.items():
            where = path if path.partition("/")[0] else shown(Path(path))
            print_field(self._console, "data", f"{where}, {formatting.amount(count)} tokens")


def _beginning(job: Job, saved: SavedStep | None) -> str:
    """What a resumed run begins with."""
    from craton.job.sections import RESCUE

    if saved is not None:
        return f"step {saved.step:,} in {shown(saved.path) if saved.tier == RESCUE else saved.tier}"
    return "what its command has saved" if job.kind == "command" else "the beginning: there is no checkpoint"


def print_array(started: list[RunDirectory], console: Console, as_json: bool) -> None:
    """All copies of a job at once; there is no view of many."""
    if as_json:
        print(json.dumps([{"name": run.name, "path": str(run.path)} for run in started]))
        return
    console.print(f"{len(started)} runs wait for their nodes, {started[0].name} to {started[-1].name}: `craton ps`")


def warn_of_place(draft: Draft, root: Path, console: Console) -> None:
    """Say it when the nodes of a cluster may not see the run directory."""
    from craton.orchestration.start import sharing_doubt

    if draft.on == "slurm" and (doubt := sharing_doubt(root, draft.job)):
        console.print(f"warning: {doubt}", style="yellow", soft_wrap=True, markup=False)


def follow(run: Run, draft: Draft, console: Console, *, detach: bool, as_json: bool) -> None:
    """Watch a started run to its end and exit as it did; or with `detach` say where to look."""
    if draft.job.serve and not detach and draft.on == "local":
        from craton.api import Server
        from craton.cli.views.server import follow_server

        follow_server(Server(run), draft, console, detach=False, as_json=as_json)
        return
    from craton.cli.views.live import watch
    from craton.cli.views.outcome import exit_code, outcome_json, print_outcome
    from craton.orchestration import read_submission
    from craton.orchestration.draft import code_summary

    name = run.name
    if not as_json:
        print_field(console, "run", f"{shown(run.path)}, {_ranks(draft)}")
        if submitted := read_submission(run.directory).job:
            print_field(console, draft.on, f"job {submitted}")
        if code := code_summary(run.directory):
            print_field(console, "code", code)
    if detach:
        if as_json:
            print(json.dumps(outcome_json(run.directory, run.summary())))
        else:
            goes_on = "runs on its own" if draft.on == "local" else "starts by itself once it has its nodes"
            console.print(f"{name} {goes_on}: {_way_back(draft.job)}")
        return
    try:
        summary = watch(run, console, quiet=as_json)
    except KeyboardInterrupt:
        console.print(f"\nleft the view; {name} goes on. {_way_back(draft.job)}")
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(outcome_json(run.directory, summary)))
    else:
        print_outcome(run.directory, summary, console)
    raise typer.Exit(exit_code(summary))


def print_plan(draft: Draft, console: Console, begin: SavedStep | None = None) -> None:
    """The layout and what it is predicted to do, in a few lines; `craton plan` tells all."""
    from rich.text import Text

    from craton import formatting
    from craton.job import TRAINING_KINDS
    from craton.orchestration.draft import STOP_AT

    job, plan, serving = draft.job, draft.plan, draft.serving
    shape = plan.model if plan else serving.model if serving else None
    model = "" if shape is None else f" · {shape.name}, {formatting.amount(shape.parameters)} parameters"
    console.print(Text.assemble((job.name, "bold"), f"  {job.kind}{model} · {job.cluster}"))
    if draft.note:
        console.print(Text(draft.note, style="yellow"))
    for text in draft.launch.chaos:
        console.print(Text(f"CHAOS on purpose: {text}", style="bold red"))
    if serving is not None:
        print_serving(serving, console, job.run.copies)
    if job.kind in TRAINING_KINDS and (warning := job.checkpoint.end_only_warning):
        advice = "give checkpoint.tiers an interval, such as {to: shared, every: 10m}"
        print_field(console, "!", f"{warning}; {advice}")
    if plan is None:
        if serving is None and (price := _unplanned_price(draft)):
            print_field(console, "cost", f"{price}{_with_spares(draft)}")
        return
    between = formatting.duration_range(plan.step_seconds_low, plan.step_seconds_high)
    speed = formatting.rate(plan.tokens_per_second, "tokens")
    print_field(console, "layout", str(plan.layout))
    print_field(
        console,
        "predicted",
        f"{formatting.duration(plan.step_seconds)} a step ({between}) · {speed} · "
        f"{formatting.memory(plan.memory_bytes)} of {formatting.memory(plan.memory_limit_bytes)} a rank",
    )
    smaller = [size for size in draft.sizes if size.num_nodes < draft.launch.working_nodes]
    if smaller:
        counts = ", ".join(f"{size.num_nodes} ({formatting.duration(size.step_seconds)} a step)" for size in smaller)
        print_field(console, "elastic", f"goes on with fewer nodes when some are lost: {counts}")
    left = _share_left(plan, begin)
    low, middle, high = (left * seconds for seconds in _run_seconds(plan))
    takes = f"{formatting.duration(middle)} ({formatting.duration_range(low, high)})"
    steps = f"{plan.steps - begin.step:,} of {plan.steps:,} steps" if begin else counted(plan.steps, "step")
    stop_at = draft.launch.env.get(STOP_AT)
    stop = f"; stops with a checkpoint after step {stop_at}" if stop_at else ""
    print_field(console, "to do", f"{steps} in {takes}{stop}")
    if plan.cost is not None:
        copies = job.run.copies
        low, middle, high = (copies * left * dollars for dollars in _run_dollars(plan.cost))
        costs = f"{formatting.dollars(middle)} ({formatting.dollars_range(low, high)})"
        print_field(
            console,
            "cost",
            f"{costs}{_for_copies(copies)}, {plan.cost.purchase}{_with_spares(draft)}",
        )


def print_serving(plan: ServePlan, console: Console, copies: int = 1) -> None:
    """What a server is predicted to hold and to reach."""
    from craton import formatting

    print_field(console, "layout", f"tp {plan.tp} · {plan.precision}")
    single, best = (formatting.amount(value) for value in (plan.single_tokens_per_second, plan.best_tokens_per_second))
    print_field(
        console,
        "predicted",
        f"{single} tokens/s for one request, {best} for {plan.best_batch} together · "
        f"{formatting.amount(plan.kv_tokens)} tokens of keys and values · "
        f"{formatting.memory(plan.memory_bytes)} of {formatting.memory(plan.memory_limit_bytes)} a rank",
    )
    if plan.dollars_per_hour is not None:
        dollars = formatting.dollars(copies * plan.dollars_per_hour)
        print_field(console, "cost", f"{dollars} an hour{_for_copies(copies)}")
    for warning in plan.warnings:
        print_field(console, "!", warning)


def _for_copies(copies: int) -> str:
    return f" for {copies} copies" if copies > 1 else ""


def _with_spares(draft: Draft) -> str:
    return ", spares included" if draft.num_spares else ""


def _unplanned_price(draft: Draft) -> str:
    """What is known of the price where nobody knows how long it takes; nothing where there is none."""
    from craton import formatting

    copies, limit = draft.job.run.copies, draft.job.run.time_limit
    if draft.dollars_per_hour is None:
        return ""
    hourly = copies * draft.dollars_per_hour
    text = f"{formatting.dollars(hourly)} an hour{_for_copies(copies)}"
    if limit is None or draft.on == "local":
        return text
    most, hours = formatting.dollars(hourly * limit / 3600.0), formatting.setting(limit)
    # Kubernetes counts over all starts.
    when = f"each start of {hours}" if draft.on == "slurm" and draft.job.run.restarts else f"the {hours} it may take"
    return f"{text}, at most {most} in {when}"


def _share_left(plan: Plan, begin: SavedStep | None) -> float:
    return 1.0 - begin.step / plan.steps if begin else 1.0


def _run_seconds(plan: Plan) -> tuple[float, float, float]:
    return plan.run_seconds_low, plan.run_seconds, plan.run_seconds_high


def _run_dollars(cost: CostPlan) -> tuple[float, float, float]:
    return cost.cost_dollars_low, cost.cost_dollars, cost.cost_dollars_high


def confirm(draft: Draft, yes: bool, begin: SavedStep | None = None) -> None:
    """On a priced cluster nothing starts without a yes."""
    from craton import formatting
    from craton.orchestration import StartError

    plan, serving = draft.plan, draft.serving
    copies = draft.job.run.copies
    if yes:
        return
    if serving is not None and serving.dollars_per_hour is not None:
        dollars = f"{formatting.dollars(copies * serving.dollars_per_hour)} an hour"
    elif plan is not None and plan.cost is not None:
        dollars = formatting.dollars(copies * _share_left(plan, begin) * plan.cost.cost_dollars)
    elif plan is None and serving is None and (price := _unplanned_price(draft)):
        dollars = price
    else:
        return
    if not sys.stdin.isatty():
        raise StartError(f"this run costs about {dollars} and there is no terminal to ask on; give --yes to start it")
    if not typer.confirm(f"Start it for about {dollars}?", err=True):  # stdout may carry JSON, and go to a file
        typer.echo("not started", err=True)
        raise typer.Abort


def print_draft(draft: Draft, run: Path, as_json: bool) -> None:
    """What a launch would write and start, or send."""
    from craton.orchestration import backend_of
    from craton.orchestration.start import first_copy
    from craton.telemetry import RunDirectory

    backend, place, copies = backend_of(draft.on), RunDirectory(run), draft.job.run.copies
    if copies > 1:
        place, files = first_copy(draft, run.parent)
        run = place.path
    else:
        files = {**draft.files(), **backend.files(draft, place)}
    commands = backend.command(draft, place)
    if as_json:
        print(json.dumps({"run": str(run), "files": files, "commands": commands}))
        return
    for name, text in files.items():
        print(f"# {run / name}\n{text}")
    if copies > 1:
        print(f"# and the same for {draft.job.name}-2 to {draft.job.name}-{copies}, but for the script")
    print("# would be started, each on its own" if draft.on == "local" else f"# would be sent to {draft.on}")
    for command in commands:
        print(shlex.join(command))


def _ranks(draft: Draft) -> str:
    launch = draft.launch
    count, spares = launch.working_nodes, draft.num_spares
    ranks, nodes = counted(draft.num_ranks, "rank"), counted(count, "node")
    threads = f"{launch.threads_per_rank} thread{'s' if launch.threads_per_rank > 1 else ''} each"
    beside = f" and {spares} spare{'s' if spares > 1 else ''}" if spares else ""
    return f"{ranks if draft.num_ranks > 1 else '1 rank'} on {nodes if count > 1 else '1 node'}{beside}, {threads}"


def _way_back(job: Job) -> str:
    from craton.job import TRAINING_KINDS

    stops = "drains and stops it" if job.serve else "stops it"
    if job.kind in TRAINING_KINDS:
        stops += " with a checkpoint"
    return f"`craton logs {job.name} -f` follows it, `craton stop {job.name}` {stops}"
