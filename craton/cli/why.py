"""`craton why RUN`: diagnose why a run waits, is slow, hangs, is dead or produces wrong results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def why(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Name or folder of a run \\[default: the newest run].", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the snapshot of the run, to share it or to diagnose it again."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Diagnose a saved snapshot instead of a run.")
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Prometheus with the nodes' metrics \\[default: $CRATON_PROMETHEUS]."),
    ] = None,
) -> None:
    """Diagnose why a run waits, is slow, hangs, is dead or wrong: root cause, layer, node, evidence, fix and cost."""
    import json

    from craton.api import Run
    from craton.cli.views.live import make_console
    from craton.observability.diagnosis import diagnose
    from craton.observability.diagnosis.collect import chosen_run, read_snapshot

    snapshot = read_snapshot(replay) if replay else Run(chosen_run(run)).snapshot(prometheus)
    if save:
        save.write_text(snapshot.to_json() + "\n", encoding="utf-8")
    verdict = diagnose(snapshot)
    if as_json:
        scheduler = {"job": snapshot.scheduler.job, "reason": snapshot.scheduler.reason}
        run_fields = {
            "name": snapshot.run.name,
            "state": snapshot.run.state,
            "message": snapshot.run.message,
            **scheduler,
        }
        print(json.dumps({**run_fields, **verdict.to_json(), "notes": list(snapshot.notes)}))
        return
    console = make_console()
    console.print(verdict.sentence, soft_wrap=True, markup=False)
    for line in verdict.evidence if verdict.is_alarm else ():
        console.print(f"  · {line}", soft_wrap=True, markup=False, highlight=False)
    for note in snapshot.notes:
        console.print(f"  ({note})", soft_wrap=True, markup=False, highlight=False)
