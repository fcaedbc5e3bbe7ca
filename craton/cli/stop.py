"""`craton stop RUN`: stop a run with a checkpoint, or drain and stop a server; `--now` kills it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from craton.api import Run
    from craton.telemetry import RunSummary

NOT_VISIBLE = "its checkpoints are in the run directory of its pods, which is not visible from here"
UNKNOWN_STATE = "Craton does not know what its command saved"


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Kill it without a checkpoint: progress since the last one, and open requests, are lost."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Stop a run with a checkpoint, or drain and stop a server, and wait until it has stopped."""
    import json

    from craton.api import Run
    from craton.cli.views.live import StopStatus, make_console
    from craton.cli.views.outcome import not_in_tier, outcome_json, resumes_from, shown
    from craton.cli.views.sweep import is_sweep
    from craton.job import load_job
    from craton.job.sections import RESCUE
    from craton.orchestration import RunEndedError, UnsavedError, is_elsewhere
    from craton.orchestration.watching import is_server
    from craton.telemetry.files import storage_problem

    console = make_console(as_json)
    handle = Run(run)
    directory = handle.directory
    serves = is_server(directory)
    before = None if serves else handle.checkpoint()
    unsaved, status = "", StopStatus(console, serves)
    try:
        with status:
            summary = handle.stop(now=now, ended_ok=False, look=status.look)
    except RunEndedError as ended:
        _report_ended(handle, ended.summary, console, as_json)
    except UnsavedError as error:
        summary, unsaved = error.summary, error.summary.unsaved
    except KeyboardInterrupt:
        if not status.is_shown:
            raise
        console.print(f"\nstopped waiting; {directory.name} still stops")
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(outcome_json(directory, summary)))
        raise typer.Exit(1 if summary.state == "failed" or (summary.state == "lost" and not now) or unsaved else 0)
    if summary.state == "failed":
        console.print(f"{directory.name} failed while stopping:\n{summary.message}", style="red", markup=False)
        raise typer.Exit(1)
    if unsaved:
        console.print(f"{directory.name} is not stopped: {unsaved}", style="red", markup=False)
        raise typer.Exit(1)
    if now and not directory.has("STOP"):
        problem = storage_problem(directory.path) or f"{directory.path} cannot be written"
        console.print(
            f"{directory.name} was killed, but `craton ps` shows it as lost: {problem}", style="yellow", markup=False
        )
        return
    if summary.state == "lost" and not now:
        console.print(f"{directory.name} is not stopped: {summary.message}", style="red", markup=False)
        raise typer.Exit(1)
    if summary.state == "stopping":
        reason = "; ".join(filter(None, [summary.message, summary.storage]))
        console.print(f"{directory.name} is still stopping: {reason}", markup=False)
        raise typer.Exit(1)
    if summary.state == "done":
        _report_ended(handle, summary, console, as_json)
    if serves:
        console.print(f"{directory.name} stopped")
        console.print(f"next: craton resume {directory.name}", style="dim")
        return
    if is_sweep(directory):
        members = f": {summary.members.text}" if summary.members else ""
        console.print(f"{directory.name} stopped{members}; each member continues from its newest checkpoint")
        console.print(f"next: craton resume {directory.name}", style="dim")
        return
    saved = handle.checkpoint()
    if is_elsewhere(directory):  # and so are its steps
        text = f"the newest checkpoint visible from here is step {saved.step:,}" if saved else NOT_VISIBLE
        console.print(f"{directory.name} stopped; {text}")
        console.print(f"next: craton resume {directory.name}", style="dim")
        return
    kind = load_job(directory.job_path).kind
    if kind == "eval":
        console.print(f"{directory.name} stopped after {summary.step:,} of {summary.steps or 0:,} problems")
        console.print(f"next: craton resume {directory.name}{resumes_from(directory, False)}", style="dim")
        return
    is_foreign = saved is None and kind == "command"
    if is_foreign:
        text = UNKNOWN_STATE
    elif saved is None:
        text = "there is no checkpoint yet"
    elif now or (before and before.step == saved.step):
        text = f"its newest checkpoint is step {saved.step:,}"
    else:
        text = f"checkpoint of step {saved.step:,} saved"
    if saved is not None and saved.tier == RESCUE:
        text += f" in {shown(saved.path)}{not_in_tier(directory, saved)}"
    console.print(f"{directory.name} stopped after step {summary.step:,}; {text}")
    begin = "" if saved or is_foreign else " (from the beginning)"
    console.print(f"next: craton resume {directory.name}{begin}", style="dim")


def _report_ended(handle: Run, summary: RunSummary, console: Console, as_json: bool) -> NoReturn:
    """Report how a run that has already ended did so, and where its state is. Exit code 1 if it failed or is lost."""
    import json

    from craton.cli.views.outcome import exit_code, not_in_tier, outcome_json, print_failure, resumes_from, shown
    from craton.job import load_job
    from craton.orchestration import is_elsewhere
    from craton.orchestration.watching import is_server

    run, code = handle.directory, exit_code(summary)
    if as_json:
        print(json.dumps(outcome_json(run, summary)))
        raise typer.Exit(code)
    name, serves = run.name, is_server(run)
    saved = None if serves else handle.checkpoint()
    if code:
        at = f"; checkpoint of step {saved.step:,} in {shown(saved.path)}{not_in_tier(run, saved)}" if saved else ""
        print_failure(run, summary, console, at, resumes_from(run, saved is not None))
        raise typer.Exit(code)
    if serves:
        message = ""
    elif saved is not None:
        of = "" if saved.step == summary.step else f" of step {saved.step:,}"
        message = f"; its state{of} is saved at {shown(saved.path)}{not_in_tier(run, saved)}"
    elif is_elsewhere(run):
        message = f"; {NOT_VISIBLE}"
    else:
        is_foreign = load_job(run.job_path).kind == "command"
        message = f"; {UNKNOWN_STATE}" if is_foreign else "; there is no checkpoint"
    after = f" after step {summary.step:,}" if summary.step and not serves else ""
    resume = f"; `craton resume {name}` {'restarts it' if serves else 'continues it'}"
    state, next_text = ("is already done", "") if summary.state == "done" else ("already stopped", resume)
    console.print(f"{name} {state}{after}{message}{next_text}", markup=False, soft_wrap=True)
    raise typer.Exit(0)
