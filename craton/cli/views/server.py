"""The live view of a server: its stages, address and an example request, then one live line until it has drained.

Leaving the view does not affect the server, unless the command owns it (`craton serve`): then Ctrl-C or SIGTERM drains
and stops it, and a second one kills it.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from craton import formatting
from craton.cli.views.outcome import exit_code, outcome_json, print_failure, recoveries_text, shown
from craton.formatting import whole_duration
from craton.orchestration import ServerTargets

if TYPE_CHECKING:
    from rich.console import Console

    from craton.api import Server
    from craton.job import Job
    from craton.orchestration import ServerState, Stages
    from craton.orchestration.draft import Draft
    from craton.orchestration.watching import View
    from craton.planning.serving import PlannedLoad, ServePlan
    from craton.telemetry import RunDirectory, RunState, RunSummary

LOOK_SECONDS = 0.5
PLAIN_SECONDS = 5.0
REPORT_SECONDS = 2.0  # to wait after a server's first response for its report of the KV cache size


def follow_server(
    server: Server, draft: Draft, console: Console, *, detach: bool, as_json: bool, owns: bool = False
) -> None:
    """Follow a server until it is ready (`detach`) or until it ends, and exit with its code."""
    from craton.cli.views.fields import print_field
    from craton.orchestration import NoAnswerError, Stages

    handle, run = server.run, server.run.directory
    stages = Stages(run)
    if not as_json:
        ranks = "1 rank" if draft.num_ranks == 1 else f"{draft.num_ranks} ranks"
        print_field(console, "run", f"{shown(run.path)}, {ranks}")
    with _interrupted_by_sigterm(owns and not detach):
        try:
            try:
                _wait_until_ready(server, stages, console, quiet=as_json)
            except NoAnswerError:  # it ended before it was ready; the outcome reports why
                summary = handle.wait()
            else:
                ready = ready_json(draft.job, draft.serving, stages.newest, run)
                if not as_json:
                    print_ready(draft.job, draft.serving, ready, console)
                if detach:
                    _leave(run, console, ready if as_json else None)
                    return
                if not as_json:
                    end = "Ctrl-C drains and stops it" if owns else "Ctrl-C leaves the view; the server continues"
                    console.print(end, style="dim")
                summary = _watch(server, console, quiet=as_json)
        except KeyboardInterrupt:
            if not owns or detach:
                console.print(f"\nleft the view; {run.name} continues. {way_back(run.name)}")
                raise typer.Exit(130) from None
            summary = _drain(server, draft.job, console)
    if as_json:
        print(json.dumps({**outcome_json(run, summary), "url": server.url}))
    else:
        print_server_outcome(run, summary, console)
    raise typer.Exit(exit_code(summary))


def way_back(name: str) -> str:
    return f"`craton logs {name} -f` follows it, `craton stop {name}` drains and stops it"


def ready_json(job: Job, plan: ServePlan | None, stage: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    """Return what is known of a ready server; the engine's measurements override the plan."""
    from craton.orchestration import address_of

    planned = {} if plan is None else {"kv_tokens": plan.kv_tokens, "max_length": plan.max_length}
    measured = {key: stage[key] for key in planned if isinstance(stage.get(key), int)}
    speeds = {} if plan is None else _speeds(plan)
    assert job.serve is not None
    has_file = job.serve.admin and job.serve.admin_key is None
    admin = {"admin_key_file": shown(run.admin_key_path)} if has_file else {}
    named = {"name": run.name, "url": address_of(job).url, "model": job.served_name}
    return {**named, **admin, **planned, **measured, **speeds}


def print_ready(job: Job, plan: ServePlan | None, ready: dict[str, Any], console: Console) -> None:
    """Print address, model names, KV cache size, predicted throughput and an example request."""
    from rich.text import Text

    from craton.cli.views.fields import print_field

    assert job.serve is not None
    console.print(Text.assemble((ready["name"], "bold"), " serves at ", (ready["url"], "bold green")))
    print_field(console, "model", ", ".join([ready["model"], *job.serve.adapters]))
    if plan is not None:
        cache = f"{formatting.amount(ready['kv_tokens'])} tokens, maximum {ready['max_length']:,} per request"
        print_field(console, "KV cache", cache)
        single, best = (formatting.amount(ready[f"plan_{name}_tokens_per_second"]) for name in ("single", "best"))
        print_field(
            console, "predicted", f"{single} tokens/s for one request, {best} for {plan.best_batch} concurrent requests"
        )
        if plan.load is not None:
            print_field(console, "its load", load_text(plan.load))
    if limits := job.serve.slo.limits:
        load = {} if plan is None or plan.load is None else vars(plan.load)
        print_field(console, "limits", ServerTargets.planned_for(load, limits).limits_text())
    if "admin_key_file" in ready:
        print_field(console, "admin", f"POST with the key in {ready['admin_key_file']} as bearer token")
    console.print(f"try:  {curl_line(job, ready['url'])}", soft_wrap=True, markup=False)


def load_text(load: PlannedLoad) -> str:
    """Return what is predicted for the load that the job states."""
    ttft, tpot = formatting.duration(load.ttft_seconds), formatting.duration(load.tpot_seconds)
    return (
        f"TTFT {ttft} (p95 {formatting.duration(load.ttft_p95_seconds)}), TPOT {tpot} at {load.rate:.3g} requests/s; "
        f"it saturates at {load.saturation_rate:.3g}"
    )


def curl_line(job: Job, url: str) -> str:
    """Return an example request; a model without a tokenizer takes token ids only."""
    assert job.serve is not None
    has_text = job.serve.initialize != "random"
    prompt: object = "Once upon a time" if has_text else [1, 2, 3]
    body = json.dumps({"model": job.served_name, "prompt": prompt, "max_tokens": 16})
    words = ["curl", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    line = shlex.join(words)
    return line if job.serve.api_keys is None else f'{line} -H "Authorization: Bearer ${job.serve.api_keys}"'


def state_line(
    name: str,
    state: ServerState | None,
    run_state: RunState,
    view: View | None = None,
    targets: ServerTargets | None = None,
) -> str:
    """Return `serve-llama: 12 running, 3 waiting · 4.2k tokens/s · first token after 38 ms (planned 45 ms) · TPOT 12 ms
    (planned 11 ms)`, and the limits that it misses; planned are the means for the load that the job states."""
    if view is not None and view.recovering is not None:
        return f"{name}: RECOVERING  {view.recovering.text}"
    if state is None:  # normal while it starts or stops
        return f"{name}: {run_state if run_state in ('starting', 'stopping') else 'no response'}"
    targets = targets or ServerTargets()
    planned = targets.planned.get(("ttft", "mean"))
    first = f"first token after {formatting.duration(state.first_token_seconds)}"
    parts = [
        f"{name}: {state.running} running, {state.waiting} waiting",
        *targets.missed_texts(state),
        f"{formatting.amount(state.tokens_per_second)} tokens/s",
        first if planned is None else f"{first} (planned {formatting.duration(planned)})",
        *targets.tpot_texts(state),
    ]
    return " · ".join(parts)


def print_server_outcome(run: RunDirectory, summary: RunSummary, console: Console) -> None:
    """Print how a server ended, and what to do next."""
    from rich.text import Text

    from craton.orchestration.watching import read_recoveries

    recoveries = read_recoveries(run)
    if recoveries:
        console.print(recoveries_text(recoveries), style="yellow", markup=False)
    if exit_code(summary):
        print_failure(run, summary, console)
        return
    console.print(Text(f"{run.name} {summary.state}", style="bold"))
    console.print(f"next: craton resume {run.name}", style="dim")


def _speeds(plan: ServePlan) -> dict[str, float]:
    names = ("single_tokens_per_second", "best_tokens_per_second")
    return {f"plan_{name}": getattr(plan, name) for name in names}


def _wait_until_ready(server: Server, stages: Stages, console: Console, *, quiet: bool) -> None:
    """Wait until it is ready and has reported its KV cache size; NoAnswerError if it ends before."""
    from rich.status import Status

    began, name = time.monotonic(), server.run.name
    with Status(f"{name}: starting", console=console) as status:

        def look(view: View | None = None) -> None:
            for stage in stages.look():
                if not quiet and not console.is_terminal and stage != stages.LAST:
                    console.print(f"{name}: {stage}", soft_wrap=True, markup=False)
            seconds = whole_duration(time.monotonic() - began)
            status.update(f"{name}: {stages.newest.get('stage', 'starting')} ({seconds})")

        server.wait_until_ready(look=look, look_seconds=LOOK_SECONDS)
        answers_since = time.monotonic()
        look()
        while not stages.is_ready and time.monotonic() - answers_since <= REPORT_SECONDS:
            time.sleep(LOOK_SECONDS)
            look()


def _watch(server: Server, console: Console, *, quiet: bool) -> RunSummary:
    """Follow until the run ends: one updated line, or a new line every few seconds if it changed."""
    from rich.live import Live
    from rich.text import Text

    from craton.orchestration import ServerWatch

    watch, name, targets = ServerWatch(server.address), server.run.name, ServerTargets.of(server.run.directory)
    state = watch.look()
    printed, printed_at = "", -PLAIN_SECONDS
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def look(view: View) -> None:
            nonlocal state, printed, printed_at
            if not view.is_moving:
                return
            text = state_line(name, state, view.summary.state, view, targets)
            if console.is_terminal and not quiet:
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            elif not quiet and text != printed and time.monotonic() - printed_at >= PLAIN_SECONDS:
                console.print(text, soft_wrap=True, markup=False)
                printed, printed_at = text, time.monotonic()
            time.sleep(LOOK_SECONDS)
            state = watch.look()  # before the next look: a server asked to stop meanwhile no longer responds

        return server.run.wait(look=look, look_seconds=0.0)


def _drain(server: Server, job: Job, console: Console) -> RunSummary:
    """Drain and stop the server; a second Ctrl-C kills it."""
    from craton.orchestration import RunStateError, ServerWatch

    assert job.serve is not None
    name, state = server.run.name, ServerWatch(server.address).look()
    count = state.running + state.waiting if state else 0
    left = f"{count} open request{'s' if count > 1 else ''} may finish within {formatting.setting(job.serve.drain)}"
    console.print(
        f"\n{name} is draining: {left if count else 'no open requests'}, new requests are refused; Ctrl-C kills it"
    )
    try:
        return server.stop()
    except KeyboardInterrupt:
        summary = server.run.stop(now=True)
        console.print(f"\n{name} was killed")
        return summary
    except RunStateError:  # its STOP marker cannot be written: print its state anyway
        return server.run.summary()


def _leave(run: RunDirectory, console: Console, ready: dict[str, Any] | None) -> None:
    if ready is not None:
        print(json.dumps(ready))
    else:
        console.print(f"{run.name} runs in the background: {way_back(run.name)}")


@contextmanager
def _interrupted_by_sigterm(owns: bool) -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: a supervisor stops the command that owns a server with it."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    if not owns:
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
