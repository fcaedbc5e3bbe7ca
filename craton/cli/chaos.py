"""`craton chaos RUN`: inject faults into a running run, to test that it recovers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from craton.job import InjectedFault
    from craton.orchestration.watching import Recovery, View
    from craton.telemetry import RunDirectory

LOOK_SECONDS = 0.2
SETTLED_SECONDS = 10.0  # of steps after a fault, after which no recovery is expected for it
# Faults after which the ranks must regroup; a run continues through the others.
_BREAKING = ("kill", "hang", "fail", "lose-node")


def chaos(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Kill a process: rank=3@step=40, agent=node-1, keeper=node-1, coordinator; or a run: member=base.",
        ),
    ] = None,
    hang: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="Hang a rank: rank=3@step=40,how=stop (or spin).")
    ] = None,
    fail: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="Raise an exception in a rank: rank=2@step=9.")
    ] = None,
    corrupt: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="Corrupt checkpoints: tier=peer,rank=1@step=50.")
    ] = None,
    slow_disk: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="Slow down checkpoint writes: tier=shared,seconds=0.5,for=20s@step=10."),
    ] = None,
    lose_node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Lose a node permanently: node-1@step=40.")
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, help="Number of random faults, spread over the remaining steps.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for --random.")] = 0,
    kinds: Annotated[
        str,
        typer.Option(
            help="Fault kinds for --random, e.g. kill,hang \\[default: all but lose-node].", show_default=False
        ),
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all faults have happened, and print each recovery.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the faults and recoveries as JSON.")] = False,
) -> None:
    """Inject faults into a running run: at a step, in a phase (@during=restore), or immediately."""
    import json

    from craton.api import Run
    from craton.cli.views.live import make_console
    from craton.telemetry import RunError

    console = make_console(as_json)
    handle = Run(run)
    directory = handle.directory
    texts_by_kind = {
        "kill": kill,
        "hang": hang,
        "fail": fail,
        "corrupt": corrupt,
        "slow-disk": slow_disk,
        "lose-node": lose_node,
    }
    texts = [f"{kind} {text}" for kind, all_of_kind in texts_by_kind.items() for text in all_of_kind or []]
    chosen = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    faults = handle.draft_faults(texts, random=random or 0, seed=seed, kinds=chosen)
    if kinds and random is None:
        raise RunError("--kinds requires --random N, the number of faults to draw")
    if not faults:
        raise RunError(f"no fault given; use e.g. `craton chaos {directory.name} --kill rank=0@step=40`, or --random 5")
    print_faults(directory, faults, console)
    confirm(directory, yes)
    since = time.time()
    path = handle.inject(faults)
    outcome: dict[str, Any] = {"run": directory.name, "order": str(path), "faults": [fault.text for fault in faults]}
    if wait:
        try:
            outcome |= follow(directory, faults, since, console)
        except KeyboardInterrupt:
            console.print(f"\nleft the view; the faults stay armed. Follow them with `craton logs {directory.name} -f`")
            raise typer.Exit(130) from None
    elif not as_json:
        console.print(f"armed; `craton logs {directory.name} --agent -f` shows when they happen")
    if as_json:
        print(json.dumps(outcome))
    if wait and outcome["not_fired"]:
        raise typer.Exit(1)


def print_faults(run: RunDirectory, faults: list[InjectedFault], console: Console) -> None:
    from rich.text import Text

    from craton.orchestration.changes import what_happens

    number = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    console.print(Text(f"CHAOS: {number} for run {run.name} ({run.path})", style="bold white on red"))
    for fault in faults:
        console.print(Text.assemble("  ", (fault.text, "bold red"), f"  {what_happens(fault)}"), soft_wrap=True)


def confirm(run: RunDirectory, yes: bool) -> None:
    import sys

    from craton.orchestration import RunStateError

    if yes:
        return
    if not sys.stdin.isatty():
        raise RunStateError(
            f"this injects faults into {run.name} and there is no terminal to confirm on; use --yes to confirm"
        )
    typer.confirm(f"Inject into {run.name}?", abort=True)


def follow(run: RunDirectory, faults: list[InjectedFault], since: float, console: Console) -> dict[str, Any]:
    """Print each fault as it happens and each recovery as it ends, until the last recovery or the run's end."""
    from dataclasses import asdict

    from craton.orchestration.changes import fired_faults
    from craton.orchestration.watching import Follower

    follower = Follower(run)
    texts = [fault.text for fault in faults]
    fired: dict[str, float] = {}
    reported: dict[int, Recovery] = {}
    while True:
        view = follower.look()  # before the events, so that the newest events are read too
        for text, moment in fired_faults(run, since).items():
            if text in texts and text not in fired:
                fired[text] = moment
                console.print(f"fired: {text}", style="bold red", markup=False)
        for recovery in view.recoveries:
            if recovery.began >= since and recovery.seconds is not None and recovery.generation not in reported:
                reported[recovery.generation] = recovery
                console.print(f"recovered: {recovery.text}", style="green", soft_wrap=True, markup=False)
        if not view.is_moving or (set(texts) == set(fired) and not _awaited(faults, fired, view)):
            break
        time.sleep(LOOK_SECONDS)
    left = [text for text in texts if text not in fired]
    for text in left:
        console.print(f"did not happen before the run ended: {text}", style="yellow", markup=False)
    return {
        "fired": list(fired),
        "not_fired": left,
        "recoveries": [{**asdict(item), "text": item.text} for item in reported.values()],
    }


def _awaited(faults: list[InjectedFault], fired: dict[str, float], view: View) -> bool:
    """Return whether the run has yet to recover from the last breaking fault. A rank that died before its first step
    is restarted without a recovery: then the run just makes progress."""
    own = [fault for fault in faults if fault.member is None]  # the run goes on while a member recovers
    breaking = [fired[fault.text] for fault in own if fault.kind in _BREAKING and fault.target != "keeper"]
    if not breaking:
        return False
    if any(
        recovery.seconds is not None and recovery.began + recovery.seconds >= max(breaking)
        for recovery in view.recoveries
    ):
        return False
    return view.recovering is not None or (view.summary.updated_at or 0.0) < max(breaking) + SETTLED_SECONDS
