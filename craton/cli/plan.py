"""`craton plan JOB`: predict layout, step time, memory, goodput and cost of a job; for a server its throughput."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datetime import date

    from craton.cli.views.member_plans import MemberPlan
    from craton.job import Job
    from craton.planning import Plan


def plan(
    context: typer.Context,
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="Job file (YAML). Optional with --eval and --accuracy.", show_default=False),
    ] = None,
    instances: Annotated[
        str, typer.Option(help="Also search these instance types, e.g. p5,p5en,p6-b200.", show_default=False)
    ] = "",
    gpus: Annotated[
        str,
        typer.Option(
            help="With --instances: numbers of GPUs, e.g. 256,512 \\[default: 64..1024]. Server: GPUs to use, e.g. 8.",
            show_default=False,
        ),
    ] = "",
    by: Annotated[
        str,
        typer.Option(
            help="With --instances, or for a server: minimize time (server: mean end-to-end latency), cost or gpus "
            "\\[default: cost].",
            show_default=False,
        ),
    ] = "",
    deadline: Annotated[
        str, typer.Option(help="With --instances: maximum run time, e.g. 14d.", show_default=False)
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="With --instances: maximum dollars, e.g. 2M. With --eval: per problem, e.g. $0.01, 20k tokens or 30s.",
            show_default=False,
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            metavar="REQUESTS/S", help="Server: requests per second (open load), e.g. 20.", show_default=False
        ),
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="USERS",
            help="Server: in place of --rate, users who each wait for their answer, e.g. 64.",
            show_default=False,
        ),
    ] = "",
    requests: Annotated[
        str,
        typer.Option(
            metavar="NUMBER",
            help="Server: with --concurrency, requests of a benchmark that begins with all users at once, e.g. 640.",
            show_default=False,
        ),
    ] = "",
    input_: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="TOKENS",
            help="Server: prompt lengths, e.g. 1024, 100..2000 or mean=1024,p95=3000.",
            show_default=False,
        ),
    ] = "",
    output: Annotated[
        str, typer.Option(metavar="TOKENS", help="Server: output lengths, as --input.", show_default=False)
    ] = "",
    prefix_hits: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Server: share of the prompt tokens in the prefix cache, e.g. 0.4 or 40%.",
            show_default=False,
        ),
    ] = "",
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Server: share of accepted draft tokens, e.g. 0.7 or 70%.", show_default=False
        ),
    ] = "",
    burstiness: Annotated[
        str,
        typer.Option(
            help="Server: burstiness of --rate, as in bench serve: 1 is Poisson, less is burstier, more is steadier.",
            show_default=False,
        ),
    ] = "",
    ttft: Annotated[
        str,
        typer.Option(
            metavar="LIMIT",
            help="Server: limit of the time to first token, e.g. 500ms (p95) or p99=1s.",
            show_default=False,
        ),
    ] = "",
    tpot: Annotated[
        str,
        typer.Option(
            metavar="LIMIT", help="Server: limit of the time per output token, e.g. 30ms.", show_default=False
        ),
    ] = "",
    e2e: Annotated[
        str,
        typer.Option(
            metavar="LIMIT", help="Server: limit of the time of a whole answer, e.g. 10s.", show_default=False
        ),
    ] = "",
    precision: Annotated[
        str, typer.Option(help="Server: precision of the weights, e.g. fp8 or int4.", show_default=False)
    ] = "",
    activation_precision: Annotated[
        str,
        typer.Option(
            help="Server of another engine: precision of the inputs of matmuls; bf16: weight-only quantization.",
            show_default=False,
        ),
    ] = "",
    kv_precision: Annotated[
        str, typer.Option(help="Server: precision of the KV cache: auto, bf16 or fp8.", show_default=False)
    ] = "",
    evaluation: Annotated[
        str,
        typer.Option(
            "--eval",
            metavar="SUITE_OR_RUN",
            help="Plan test-time compute on a suite (file or built-in), or from an evaluation: its run, its "
            "evaluation.json, or YAML with pass_at.",
            show_default=False,
        ),
    ] = "",
    accuracy: Annotated[
        str,
        typer.Option(
            help="The same from shares of problems with a correct answer among n samples, e.g. 1:0.55,4:0.7; with "
            "a suite as --eval, its accuracy.",
            show_default=False,
        ),
    ] = "",
    tokens: Annotated[
        str,
        typer.Option(
            metavar="PROMPT,COMPLETION",
            help="With --eval or --accuracy: mean tokens of a prompt and of one completion, e.g. 300,800.",
            show_default=False,
        ),
    ] = "",
    price: Annotated[
        str,
        typer.Option(
            metavar="IN,OUT",
            help="With --eval or --accuracy: dollars per million prompt and completion tokens of an endpoint.",
            show_default=False,
        ),
    ] = "",
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="With --eval or --accuracy: a strategy to plan, e.g. vote:16 or tree:32; repeatable "
            "\\[default: best of n and votes of 2 to 64].",
            show_default=False,
        ),
    ] = None,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Plan nodes of this machine that share its GPUs.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML report with plots to this file.", show_default=False)
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Also trace the real training step on fake ranks, and compare it with the plan."),
    ] = False,
    ranks: Annotated[
        str,
        typer.Option(
            help="With --trace: ranks to trace, e.g. 0,8 \\[default: one per distinct pipeline stage].",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predict layout, step time, memory, goodput and cost, with intervals; for a server, latency, throughput and cost.

    With --eval or --accuracy: what more samples of a model are worth, and what they cost.
    """
    import json
    from datetime import date

    from rich.console import Console

    from craton.job import load_job
    from craton.planning import PlanError

    _refuse_blank_options(context)
    served = {
        **{"rate": rate, "concurrency": concurrency, "requests": requests, "input": input_, "output": output},
        **{"prefix_hits": prefix_hits},
        **{"acceptance": acceptance, "burstiness": burstiness, "ttft": ttft, "tpot": tpot, "e2e": e2e},
        **{"precision": precision, "activation_precision": activation_precision, "kv_precision": kv_precision},
    }
    options: dict[str, object] = {"--instances": instances, "--gpus": gpus, "--by": by, "--deadline": deadline}
    if evaluation or accuracy:
        options |= {"--trace": trace, "--ranks": ranks, "--share-gpus": share_gpus}
        _refuse(options, "applies to training jobs only; remove it, or --eval and --accuracy")
        from craton.cli.views.strategies import plan_test_time

        plan_test_time(job, evaluation, accuracy, tokens, price, budget, strategy or [], html, as_json)
        return
    _refuse(
        {"--tokens": tokens, "--price": price, "--strategy": strategy},
        "requires --eval SUITE or --accuracy, e.g. --accuracy 1:0.55,4:0.7",
    )
    if job is None:
        raise PlanError("JOB is missing; name a job file, or plan test-time compute with --eval SUITE")
    chosen = _ranks(ranks, trace)
    wanted = load_job(job)
    if share_gpus:
        wanted = wanted.with_shared_gpus()
    if wanted.serve:
        _refuse(
            {"--deadline": deadline, "--budget": budget, "--trace": trace},
            "applies to training jobs only; remove it, or plan a server with --rate, --ttft and --tpot",
        )
        serve = wanted.serve
        needs_load = serve.load is not None or bool(serve.slo.limits) or not wanted.has_own_precision
        if needs_load or any(served.values()) or instances or gpus or by or html:
            from craton.cli.views.served_load import plan_served_load

            plan_served_load(wanted, served, _instance_names(instances), gpus, by, html, as_json)
        else:
            _plan_server(wanted, as_json)
        return
    _refuse(
        {f"--{name.replace('_', '-')}": value for name, value in served.items()},
        f"applies to kind serve, not {wanted.kind}; remove it",
    )
    if wanted.sweep:
        options |= {"--html": html, "--trace": trace, "--budget": budget}
        _plan_sweep(wanted, [name for name, value in options.items() if value], as_json)
        return
    weights = _plan_members(wanted)
    result = _plan(wanted, instances, gpus, by, deadline, budget)
    traced = None
    if trace:
        from craton.cli.views.traced import run_trace

        traced = run_trace(job, result, chosen)
    today = date.today()
    if html:
        from craton.cli.views.pages import write_page
        from craton.planning.report import plan_html

        write_page(html, plan_html(result, today))
    if as_json:
        from craton.cli.views.member_plans import member_plans_json
        from craton.planning.report import plan_to_json

        print(json.dumps({**plan_to_json(result), **(traced or {}), **(member_plans_json(weights) if weights else {})}))
        return
    _render(result, weights, traced, today, with_front=bool(instances))
    if html:
        Console().print(f"report: {html}", highlight=False)


def _render(
    result: Plan, weights: list[MemberPlan], traced: dict[str, object] | None, today: date, *, with_front: bool
) -> None:
    from rich.console import Console

    from craton.planning.report import render_front, render_plan

    console = Console()
    if weights:
        from craton.cli.views.member_plans import render_member_plans

        render_member_plans(weights, console)
        console.print()
    render_plan(result, console, today)
    if with_front:
        render_front(result, console)
    if traced:
        from craton.cli.views.traced import render_trace

        render_trace(traced, console)


def _refuse_blank_options(context: typer.Context) -> None:
    """Raise PlanError for an option without a value: a limit that an unset shell variable should have held."""
    from craton.planning import PlanError

    for param in context.command.params:
        source, value = context.get_parameter_source(param.name or ""), context.params.get(param.name or "")
        texts = value if isinstance(value, list | tuple) else [value]
        if (
            source is not None
            and source.name == "COMMANDLINE"
            and any(text == "" or str(text).isspace() for text in texts)
        ):
            raise PlanError(f"{param.opts[-1]} has no value; write one, or remove the option")


def _refuse(options: dict[str, object], reason: str) -> None:
    from craton.planning import PlanError

    for name, value in options.items():
        if value:
            raise PlanError(f"{name} {reason}")


def _plan_members(job: Job) -> list[MemberPlan]:
    """Plan the jobs that train the weights of this one, and the members of its sweep."""
    if job.weights_job is None and job.sweep is None:
        return []
    from craton.cli.views.member_plans import plan_members
    from craton.cli.views.progress import progress

    with progress("members") as report:
        return plan_members(job, report)


def _plan_sweep(job: Job, options: list[str], as_json: bool) -> None:
    import json

    from rich.console import Console

    from craton.cli.views.member_plans import member_plans_json, render_member_plans
    from craton.planning import PlanError

    if options:
        raise PlanError(f"{options[0]} applies to a single job, and {job.name} is a sweep; remove it, or the sweep")
    members = _plan_members(job)
    if as_json:
        print(json.dumps({"job": job.name, **member_plans_json(members)}))
    else:
        assert job.sweep is not None
        render_member_plans(members, Console(), job.sweep.parallel or 1)


def _plan_server(job: Job, as_json: bool) -> None:
    import json

    from rich.console import Console

    from craton.cli.views.progress import progress
    from craton.planning.report import render_serving, serving_to_json
    from craton.planning.serving import plan_serving

    with progress("planning"):
        result = plan_serving(job)
    if as_json:
        print(json.dumps(serving_to_json(result)))
    else:
        render_serving(result, Console())


def _plan(job: Job, instances: str, gpus: str, by: str, deadline: str, budget: str) -> Plan:
    from craton.cli.views.progress import progress
    from craton.job.document import parse_count, parse_seconds
    from craton.nearest import did_you_mean
    from craton.planning import PlanError, plan, plan_clusters

    if by not in ("", "time", "cost", "gpus"):
        near = did_you_mean(by, ("time", "cost", "gpus"))
        raise PlanError(f"--by {by!r} is not allowed; choose time, cost or gpus{near}")
    if instances and job.run.share_gpus:
        raise PlanError("--instances searches clusters, and share_gpus is for this machine; remove one of them")
    if not instances:
        options = (("--gpus", gpus), ("--by", by), ("--deadline", deadline), ("--budget", budget))
        options_given = [name for name, value in options if value]
        if options_given:
            raise PlanError(
                f"{options_given[0]} requires --instances, e.g. --instances p5,p5en,p6-b200 --gpus 64..1024"
            )
        with progress("planning") as report:
            return plan(job, progress=report)
    try:
        deadline_seconds = parse_seconds(deadline) if deadline else None
        budget_dollars = float(parse_count(budget)) if budget else None
    except ValueError as error:
        raise PlanError(f"--deadline or --budget: {error}") from None
    with progress("clusters") as report:
        return plan_clusters(
            job,
            _instance_names(instances),
            _gpu_counts(gpus or "64..1024"),
            by=by or "cost",
            deadline_seconds=deadline_seconds,
            budget_dollars=budget_dollars,
            progress=report,
        )


def _ranks(text: str, trace: bool) -> list[int]:
    """Return the ranks to trace; empty: one per distinct stage."""
    from craton.planning import PlanError

    if text and not trace:
        raise PlanError("--ranks requires --trace, e.g. --trace --ranks 0,8")
    try:
        return [int(rank) for rank in text.split(",")] if text else []
    except ValueError:
        raise PlanError(f"--ranks {text!r} is not a list of ranks; write e.g. 0,8") from None


def _instance_names(text: str) -> list[str]:
    """Expand a family such as `p5` to its instance with at least four GPUs; keep full names."""
    from craton.infrastructure.catalog import instances
    from craton.planning import PlanError

    by_family = {node.name.split(".")[0]: node.name for node in instances() if node.num_gpus >= 4}
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(names):
        raise PlanError(f"--instances {text!r} has an empty name; write e.g. p5,p5en,p6-b200")
    return [by_family.get(name, name) for name in names]


def _gpu_counts(text: str) -> list[int]:
    """Parse `64..1024` (doubling from first to last) or `256,512`."""
    from craton.planning import PlanError

    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            counts = []
            while first <= last and first > 0:
                counts.append(first)
                first *= 2
            if counts:
                return counts
        else:
            counts = [int(part) for part in text.split(",")]
            if all(count > 0 for count in counts):
                return counts
    except ValueError:
        pass
    raise PlanError(f"--gpus {text!r} is not a number of GPUs; write 64..1024 or 256,512")
