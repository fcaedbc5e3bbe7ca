"""`craton run JOB`: plan a job, write its run directory, start it and watch it."""

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
        typer.Option(help="Scheduler: local, slurm or kubernetes \\[default: the cluster's].", show_default=False),
    ] = None,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Let nodes of this machine share its GPUs, if it has fewer than nodes.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run \\[default: the job's].", show_default=False)
    ] = None,
    stop_at: Annotated[
        str | None,
        typer.Option(
            help="Stop with a checkpoint after this step, e.g. 120 or 60%; `craton resume` continues.",
            show_default=False,
        ),
    ] = None,
    chaos: Annotated[
        list[str] | None,
        typer.Option(
            help="Inject a fault, e.g. 'kill rank=1@step=40'; repeatable (see `craton chaos`).",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and commands; write and start nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of the cost.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the run is started.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")] = False,
) -> None:
    """Run a job: plan it, prepare the data, start the ranks, and show progress against the plan."""
    from craton import api
    from craton.cli.views.live import make_console
    from craton.cli.views.progress import progress

    console = make_console(as_json)
    if dry_run:
        with progress("planning") as report:
            start = api.preview(
                job, name, on=on, share_gpus=share_gpus, chaos=chaos or (), stop_at=stop_at, progress=report
            )
        print_draft(start.draft, start.run.path, as_json)
        return
    view = StartView(console, yes=yes, as_json=as_json)
    handle = api.run(job, name, on=on, share_gpus=share_gpus, chaos=chaos or (), stop_at=stop_at, watch=view)
    if view.draft.job.run.copies > 1:
        print_array(view.runs, console, as_json)
        return
    follow(handle, view.draft, console, detach=detach, as_json=as_json)


class StartView:
    """Shows the steps of a start on the terminal, and asks for confirmation of the cost."""

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
            if start.resumes and not job.serve and not job.sweep:  # each member says where it continues
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
    """Return what a resumed run starts from."""
    from craton.job.sections import RESCUE

    if saved is not None:
        return f"step {saved.step:,} in {shown(saved.path) if saved.tier == RESCUE else saved.tier}"
    if job.eval is not None:
        return "the problems that have no result yet"
    return "the state its command saved" if job.kind == "command" else "the beginning: there is no checkpoint"


def print_array(started: list[RunDirectory], console: Console, as_json: bool) -> None:
    """Print the names of all copies of a job; there is no live view of several runs."""
    if as_json:
        print(json.dumps([{"name": run.name, "path": str(run.path)} for run in started]))
        return
    console.print(f"{len(started)} runs wait for their nodes, {started[0].name} to {started[-1].name}: `craton ps`")


def warn_of_place(draft: Draft, root: Path, console: Console) -> None:
    """Print a warning if the nodes of a cluster may not see the run directory."""
    from craton.orchestration.start import sharing_doubt

    if draft.on == "slurm" and (doubt := sharing_doubt(root, draft.job)):
        console.print(f"warning: {doubt}", style="yellow", soft_wrap=True, markup=False)


def follow(run: Run, draft: Draft, console: Console, *, detach: bool, as_json: bool) -> None:
    """Watch a started run until it ends and exit with its code; with `detach`, print how to follow it."""
    if draft.job.serve and not detach and draft.on == "local":
        from craton.api import Server
        from craton.cli.views.server import follow_server

        follow_server(Server(run), draft, console, detach=False, as_json=as_json)
        return
    from craton.cli.views.live import watch
    from craton.cli.views.outcome import exit_code, outcome_json, print_outcome
    from craton.cli.views.sweep import is_sweep, print_sweep, sweep_outcome, watch_sweep
    from craton.orchestration import read_submission
    from craton.orchestration.draft import code_summary
    from craton.orchestration.preflight import sharing_found

    name, sweeps = run.name, is_sweep(run.directory)
    if not as_json:
        print_field(console, "run", f"{shown(run.path)}, {_ranks(draft)}")
        if submitted := read_submission(run.directory).job:
            print_field(console, draft.on, f"job {submitted}")
        if code := code_summary(run.directory):
            print_field(console, "code", code)
        if draft.launch.nodes_per_gpu > 1:
            print_field(console, "pre-flight", sharing_found(run.directory, draft.launch.nodes[0]))
    if detach:
        if as_json:
            print(json.dumps(outcome_json(run.directory, run.summary())))
        else:
            status = "runs in the background" if draft.on == "local" else "starts once its nodes are allocated"
            console.print(f"{name} {status}: {_way_back(draft.job, name)}")
        return
    try:
        summary = watch_sweep(run, console) if sweeps and not as_json else watch(run, console, quiet=as_json)
    except KeyboardInterrupt:
        console.print(f"\nleft the view; {name} continues. {_way_back(draft.job, name)}")
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({**outcome_json(run.directory, summary), **(sweep_outcome(run.directory) if sweeps else {})}))
    elif sweeps and run.path.is_dir():
        print_sweep(run.directory, summary, console)
    else:
        print_outcome(run.directory, summary, console)
    raise typer.Exit(exit_code(summary))


def print_plan(draft: Draft, console: Console, begin: SavedStep | None = None) -> None:
    """Print the layout and the prediction in a few lines; `craton plan` prints all."""
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
        console.print(Text(f"CHAOS: {text}", style="bold red"))
    if draft.launch.nodes_per_gpu > 1:
        print_field(console, "sharing", _sharing(draft))
    if draft.members is not None:
        from craton.cli.views.sweep import members_text

        print_field(console, "members", members_text(draft.members))
    if serving is not None:
        print_serving(serving, console, job.run.copies)
    if job.kind in TRAINING_KINDS and (warning := job.checkpoint.end_only_warning):
        advice = "set an interval under checkpoint.tiers, e.g. {to: shared, every: 10m}"
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
        f"{formatting.duration(plan.step_seconds)} per step ({between}) · {speed} · "
        f"{formatting.memory(plan.memory_bytes)} of {formatting.memory(plan.memory_limit_bytes)} per rank",
    )
    smaller = [size for size in draft.sizes if size.num_nodes < draft.launch.working_nodes]
    if smaller:
        counts = ", ".join(f"{size.num_nodes} ({formatting.duration(size.step_seconds)} per step)" for size in smaller)
        print_field(console, "elastic", f"continues on fewer nodes if some are lost: {counts}")
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
    """Print a server's predicted KV cache and throughput."""
    from craton import formatting

    print_field(console, "layout", f"{plan.layout} · {plan.precision}")
    single, best = (formatting.amount(value) for value in (plan.single_tokens_per_second, plan.best_tokens_per_second))
    print_field(
        console,
        "predicted",
        f"{single} tokens/s for one request, {best} for {plan.best_batch} concurrent requests · "
        f"{formatting.amount(plan.kv_tokens)} tokens of KV cache · "
        f"{formatting.memory(plan.memory_bytes)} of {formatting.memory(plan.memory_limit_bytes)} per rank",
    )
    if plan.dollars_per_hour is not None:
        dollars = formatting.dollars(copies * plan.dollars_per_hour)
        print_field(console, "cost", f"{dollars} per hour{_for_copies(copies)}")
    for warning in plan.warnings:
        print_field(console, "!", warning)


def _for_copies(copies: int) -> str:
    return f" for {copies} copies" if copies > 1 else ""


def _with_spares(draft: Draft) -> str:
    return ", spares included" if draft.num_spares else ""


def _unplanned_price(draft: Draft) -> str:
    """Return the price of a job of unknown duration; empty if it has no price."""
    from craton import formatting

    copies, limit = draft.job.run.copies, draft.job.run.time_limit
    if draft.dollars_per_hour is None:
        return ""
    hourly = copies * draft.dollars_per_hour
    text = f"{formatting.dollars(hourly)} per hour{_for_copies(copies)}"
    if limit is None or draft.on == "local":
        return text
    maximum, hours = formatting.dollars(hourly * limit / 3600.0), formatting.setting(limit)
    # Kubernetes counts over all starts.
    when = f"each start of {hours}" if draft.on == "slurm" and draft.job.run.restarts else f"its time limit of {hours}"
    return f"{text}, at most {maximum} in {when}"


def _share_left(plan: Plan, begin: SavedStep | None) -> float:
    return 1.0 - begin.step / plan.steps if begin else 1.0


def _run_seconds(plan: Plan) -> tuple[float, float, float]:
    return plan.run_seconds_low, plan.run_seconds, plan.run_seconds_high


def _run_dollars(cost: CostPlan) -> tuple[float, float, float]:
    return cost.cost_dollars_low, cost.cost_dollars, cost.cost_dollars_high


def confirm(draft: Draft, yes: bool, begin: SavedStep | None = None) -> None:
    """Ask for confirmation of the cost on a priced cluster."""
    from craton import formatting
    from craton.orchestration import StartError

    plan, serving = draft.plan, draft.serving
    copies = draft.job.run.copies
    if yes:
        return
    if serving is not None and serving.dollars_per_hour is not None:
        dollars = f"{formatting.dollars(copies * serving.dollars_per_hour)} per hour"
    elif plan is not None and plan.cost is not None:
        dollars = formatting.dollars(copies * _share_left(plan, begin) * plan.cost.cost_dollars)
    elif plan is None and serving is None and (price := _unplanned_price(draft)):
        dollars = price
    else:
        return
    if not sys.stdin.isatty():
        raise StartError(
            f"this run costs about {dollars} and there is no terminal to confirm on; use --yes to start it"
        )
    if not typer.confirm(
        f"Start it for about {dollars}?", err=True
    ):  # stdout may carry JSON, or be redirected to a file
        typer.echo("not started", err=True)
        raise typer.Abort


def print_draft(draft: Draft, run: Path, as_json: bool) -> None:
    """Print the files a launch would write, and the commands it would start or submit."""
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
        print(f"# and the same files, without the script, for {draft.job.name}-2 to {draft.job.name}-{copies}")
    print("# processes to start" if draft.on == "local" else f"# commands to submit to {draft.on}")
    for command in commands:
        print(shlex.join(command))


def _ranks(draft: Draft) -> str:
    launch = draft.launch
    count, spares = launch.working_nodes, draft.num_spares
    ranks, nodes = counted(draft.num_ranks, "rank"), counted(count, "node")
    threads = f"{launch.threads_per_rank} thread{'s' if launch.threads_per_rank > 1 else ''} each"
    beside = f" and {spares} spare{'s' if spares > 1 else ''}" if spares else ""
    members = draft.scheduled_nodes - len(launch.nodes)
    job = f"; its job has {counted(draft.scheduled_nodes, 'node')} with those of its members" if members else ""
    return f"{ranks if draft.num_ranks > 1 else '1 rank'} on {nodes if count > 1 else '1 node'}{beside}, {threads}{job}"


def _sharing(draft: Draft) -> str:
    """Return how the ranks share GPUs, also for a job without a plan."""
    from craton.planning.report import sharing_text

    if draft.plan is not None:
        return sharing_text(draft.plan.cluster)
    return f"{draft.launch.nodes_per_gpu} nodes share each GPU; communication is a socket on loopback"


def _way_back(job: Job, name: str) -> str:
    from craton.job import TRAINING_KINDS

    stops = "drains and stops it" if job.serve else "stops it"
    if job.kind in TRAINING_KINDS:
        stops += " with a checkpoint"
    return f"`craton logs {name} -f` follows it, `craton stop {name}` {stops}"
