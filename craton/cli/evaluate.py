"""`craton eval MODEL SUITE`: evaluate a model, a run or a server, as a run of kind eval; compare it with another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from craton.api import Run


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, Hub id in the local cache, training run, server run, or URL of an OpenAI endpoint.",
            show_default=False,
        ),
    ],
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="Suite file (YAML), or a built-in suite: arithmetic, code, json or reasoning.",
            show_default=False,
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_RUN", help="Compare with another model, or with an evaluation run.", show_default=False
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="Also evaluate a strategy, e.g. vote:16 or '{kind: vote, answer: boxed}'; repeatable; replaces those "
            "of the suite.",
            show_default=False,
        ),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Evaluate the first N problems \\[default: all].", show_default=False)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per problem \\[default: the suite's].", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Sampling temperature \\[default: the suite's, else 0 for one sample, 1 for several].",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of an answer \\[default: the suite's].", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of all samples \\[default: the suite's].", show_default=False)
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Checkpoints of a training run: all, or steps such as 100,200 \\[default: the newest].",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of answers in flight \\[default: 64].", show_default=False)
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT",
            help="Price of an endpoint in dollars per million prompt and completion tokens, e.g. 0.5,1.5.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Environment variable with the API key of an endpoint.", show_default=False)
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="Model name at an endpoint \\[default: its first].", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Run name \\[default: from model and suite].", show_default=False)
    ] = None,
    cluster: Annotated[str, typer.Option(help="Cluster to run on.")] = "local",
    on: Annotated[
        str | None,
        typer.Option(help="Scheduler: local, slurm or kubernetes \\[default: the cluster's].", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with accuracy against tokens and dollars.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of the cost.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the run is started.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
) -> None:
    """Evaluate a model on a suite. The evaluation is a run: `craton resume` continues it where it ended."""
    from craton import api
    from craton.cli.run import StartView
    from craton.cli.views.evaluation import print_comparison, print_evaluation, write_page
    from craton.cli.views.live import make_console
    from craton.job.sections.strategy import read_strategy
    from craton.orchestration import StartError

    if detach and (against is not None or html is not None):
        raise StartError("--detach returns before there are results; omit it, or --against and --html")
    if html is not None:
        _check_page(html)
    console = make_console(as_json)
    given = {
        "strategies": [read_strategy(text, "--strategy") for text in strategy or ()] or None,
        "problems": problems,
        "samples": samples,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "checkpoints": _checkpoints(checkpoints),
        "concurrency": concurrency,
        "price": _price(price),
    }
    settings: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    other = None if against is None else _evaluation_run(against)

    if against is not None and other is None:
        api.eval_job(against, suite, cluster=cluster, **settings)  # refuse it before the first one runs

    def start(target: str, run_name: str | None, **more: Any) -> Run:
        view = StartView(console, yes=yes, as_json=as_json)
        return api.evaluate(target, suite, run_name, cluster=cluster, on=on, watch=view, **more, **settings)

    run = start(model, name, key=key, served_name=served_name)
    if detach:
        _print_started(run, console, as_json)
        return
    _finish(run, console, as_json)
    if against is not None and other is None:
        from craton.orchestration import endpoint_of

        other = start(against, None, key=key if endpoint_of(against) else None)
        _finish(other, console, as_json)
    result = api.evaluation_of(run)
    comparison = [] if other is None else api.comparison_of(run.directory, other.directory)
    if html is not None:
        write_page(html, {done.name: api.evaluation_of(done) for done in (run, other) if done is not None}, comparison)
    if as_json:
        extra = {"comparison": comparison} if other is not None else {}
        print(json.dumps({"run": run.name, "path": str(run.path), **result, **extra}))
        return
    print_evaluation(result, console)
    if other is not None:
        print_comparison(comparison, console)
    console.print(f"results: {run.path}/evaluation.json and problems.jsonl", style="dim", soft_wrap=True)


def _check_page(path: Path) -> None:
    """Make the folder of the page before the evaluation, not after it."""
    from craton.orchestration import StartError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--html {path}: its folder cannot be made ({error.strerror}); give another file") from None
    if path.is_dir():
        raise StartError(f"--html {path} is a folder; give the name of a file")


def _finish(run: Run, console: Console, as_json: bool) -> None:
    """Watch an evaluation until it ends; exit with 1 if it failed."""
    from craton.cli.views.live import watch
    from craton.cli.views.outcome import exit_code, outcome_json, print_failure, resumes_from

    try:
        summary = watch(run, console, quiet=as_json)
    except KeyboardInterrupt:
        console.print(f"\nleft the view; {run.name} continues. {_way_back(run)}", soft_wrap=True)
        raise typer.Exit(130) from None
    if summary.state == "done":
        return
    if as_json:
        print(json.dumps(outcome_json(run.directory, summary)))
    elif exit_code(summary):
        print_failure(run.directory, summary, console, "", resumes_from(run.directory, False))
    else:
        console.print(f"{run.name} stopped; next: craton resume {run.name}")
    raise typer.Exit(exit_code(summary))


def _print_started(run: Run, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": run.name, "path": str(run.path)}))
    else:
        console.print(f"{run.name} runs in the background: {_way_back(run)}", soft_wrap=True)


def _way_back(run: Run) -> str:
    return f"`craton logs {run.name} -f` follows it, `craton stop {run.name}` stops it, `craton resume` continues it"


def _evaluation_run(name: str) -> Run | None:
    """Return the run of an evaluation, None if the name is that of a model."""
    from craton.api import Run
    from craton.errors import CratonError
    from craton.telemetry import find_run

    try:
        run = find_run(name)
    except CratonError:
        return None
    return Run(run) if (run.path / "evaluation.json").is_file() else None


def _checkpoints(text: str | None) -> object:
    from craton.orchestration import StartError

    if text is None or text == "all":
        return text
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise StartError(f"--checkpoints {text!r} is neither all nor a list of steps, e.g. 100,200")
    return [int(word) for word in words]


def _price(text: str | None) -> object:
    from craton.orchestration import StartError

    if text is None:
        return None
    words = text.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(0 <= number < float("inf") for number in numbers):
        raise StartError(f"--price {text!r} is not IN,OUT in dollars per million tokens, e.g. 0.5,1.5")
    return numbers
