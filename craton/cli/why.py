"""`craton why RUN`: why a run waits."""

from __future__ import annotations

from typing import Annotated

import typer


def why(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Say why a run waits: what it needs, what there is, and when it may start."""
    import json
    from dataclasses import asdict

    from craton.cli.live import make_console
    from craton.orchestration import settled, standing_of
    from craton.telemetry import find_run, summarize

    found = find_run(run)
    standing = standing_of(found)
    summary = settled(summarize(found), standing)
    if as_json:
        print(json.dumps({"name": found.name, "state": summary.state, "message": summary.message, **asdict(standing)}))
        return
    console = make_console()
    if standing.condition == "waiting":
        text = f"{found.name} waits as job {standing.job}: {standing.sentence}"
    elif standing.condition == "unknown":
        text = f"{found.name}: {standing.sentence}"
    else:
        reason = f": {summary.message.splitlines()[0]}" if summary.message else ""
        text = f"{found.name} is {summary.state}{reason}"
    console.print(text, soft_wrap=True, markup=False)
