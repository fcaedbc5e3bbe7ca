"""`craton rm RUN...`: remove ended runs with their records, logs and checkpoints."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Names or folders of runs.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the removed runs, and what stays, as JSON.")] = False,
) -> None:
    """Remove runs with their records, logs and checkpoints. Refuses live runs; keeps tiers outside the run."""
    import json

    from craton import formatting
    from craton.api import Run
    from craton.cli.views.live import make_console
    from craton.cli.views.outcome import shown
    from craton.formatting import counted
    from craton.orchestration import StartError

    console = make_console(as_json)
    found = list(dict.fromkeys(Run(run).directory for run in runs))
    removals = [Run(directory).draft_removal() for directory in found]  # check all before removing the first
    for entry in removals:
        text = f"{entry.run.name}: {formatting.stored(entry.size_bytes)} in {shown(entry.run.path)}"
        steps = f", {counted(entry.num_checkpoints, 'checkpoint')} with it" if entry.num_checkpoints else ""
        console.print(f"{text}{steps}", markup=False, soft_wrap=True)
        for place in entry.stays:
            console.print(f"  stays: {place}", markup=False, soft_wrap=True, style="dim")
    if not yes:
        what = removals[0].run.name if len(removals) == 1 else counted(len(removals), "run")
        if not sys.stdin.isatty():
            raise StartError(f"{what}: there is no terminal to confirm on; use --yes to remove")
        if not typer.confirm(f"Remove {what} permanently?", err=True):
            typer.echo("nothing was removed", err=True)
            raise typer.Abort
    for element in removals:
        Run(element.run).remove()
    if as_json:
        messages = [
            {"name": item.run.name, "path": str(item.run.path), "bytes": item.size_bytes, "stays": list(item.stays)}
            for item in removals
        ]
        print(json.dumps(messages))
        return
    console.print(f"removed {', '.join(removal.run.name for removal in removals)}", markup=False, soft_wrap=True)
