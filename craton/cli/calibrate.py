"""`craton calibrate RUNS.json`: fit a software profile to logged step times, or an engine profile to measurements of a
server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from craton.formatting import duration, percent, signed_percent


def calibrate(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS",
            help="JSON file with at least three logged runs, or measurements of a server.",
            show_default=False,
        ),
    ],
    software: Annotated[str, typer.Option(help="Software profile to start from.")] = "craton",
    pin: Annotated[
        Path | None,
        typer.Option(help="JSON file with microbenchmark results that fix some constants.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fit a software profile to logged step times, or an engine profile to measurements of a server."""
    import json
    import math

    from rich.console import Console
    from rich.table import Table

    from craton.planning import CONSTANTS
    from craton.planning.calibration import CalibrationError, load_pins, load_runs, save_profile
    from craton.planning.calibration import calibrate as fit
    from craton.planning.serving.engine_fitting import is_server_file

    _check_out(out)
    if is_server_file(runs):
        calibrate_server(runs, software, pin, out, as_json)
        return
    logged = load_runs(runs, software)
    if not logged:
        raise CalibrationError(f"{runs}: contains no runs; a profile needs at least 3")
    result = fit(logged, software, out.stem, load_pins(pin, logged[0].machine) if pin else None)
    save_profile(result.profile, out)
    if as_json:
        print(
            json.dumps(
                {
                    "profile": str(out),
                    "runs": [
                        {"name": run.name, "measured": run.step_seconds, "before": before, "after": after}
                        for run, before, after in zip(result.runs, result.before, result.after, strict=True)
                    ],
                    "identified": result.identified,
                    "unidentified": result.unidentified,
                    "pinned": result.pinned,
                }
            )
        )
        return
    console = Console()
    table = Table(
        title=f"{len(result.runs)} runs on {result.profile.gpu}, from the profile {software}", title_justify="left"
    )
    for name, justify in (("run", "left"), ("measured", "right"), ("before", "right"), ("after", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for run, before, after in zip(result.runs, result.before, result.after, strict=True):
        table.add_row(
            run.name,
            duration(run.step_seconds),
            signed_percent(before / run.step_seconds - 1),
            signed_percent(after / run.step_seconds - 1),
        )
    console.print(table)
    values = Table(box=None, pad_edge=False)
    for name in ("constant", "value", "± 1 σ", ""):
        values.add_column(name, justify="right" if name in ("value", "± 1 σ") else "left")
    for index, constant in enumerate(CONSTANTS):
        message = (
            "pinned"
            if constant.name in result.pinned
            else "from these runs"
            if constant.name in result.identified
            else "not identifiable from these runs"
            if constant.name in result.unidentified
            else "not used by these runs"
        )
        deviation = math.sqrt(max(result.profile.covariance[index][index], 0.0))
        values.add_row(
            constant.name, f"{math.exp(result.profile.log_constants[index]):.3g}", percent(deviation), message
        )
    console.print(values)
    console.print(f"\nwrote {out}; use it with `software: {out}` in a job file", highlight=False)


def calibrate_server(runs: Path, software: str, pin: Path | None, out: Path, as_json: bool) -> None:
    """Fit an engine profile to what `craton bench serve --json` measured."""
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from craton.planning.serving import find_engine_profile, save_engine_profile
    from craton.planning.serving.engine_fitting import (
        EngineCalibrationError,
        calibrate_engine,
        load_server_measurements,
    )

    if pin is not None:
        raise EngineCalibrationError(f"--pin {pin}: microbenchmarks fix constants of training only; leave it out")
    cases = load_server_measurements(runs, software)
    result = calibrate_engine(find_engine_profile(software, cases[0].machine.gpu), cases)
    save_engine_profile(result.profile, out)
    lines = list(zip(result.cases, result.before, result.after, strict=True))
    if as_json:
        measurements = [
            {"name": case.id, "metric": case.metric, "measured": case.measured, "before": before, "after": after}
            for case, before, after in lines
        ]
        print(json.dumps({"profile": str(out), "measurements": measurements, "warnings": result.warnings}))
        return
    console = Console()
    table = Table(
        title=f"{len(cases)} measurements on {result.profile.gpu}, from the profile {software}", title_justify="left"
    )
    for name, justify in (("load", "left"), ("metric", "left"), ("measured", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for case, before, after in lines:
        shown = duration(case.measured) if case.metric.endswith("_seconds") else f"{case.measured:,.0f}"
        errors = (signed_percent(value / case.measured - 1) for value in (before, after))
        table.add_row(case.id, case.metric, shown, *errors)
    console.print(table)
    for warning in result.warnings:
        console.print(Text(f"! {warning}", style="yellow"), highlight=False)
    console.print(f"\nwrote {out}; use it with `software: {out}` in the job file of a server", highlight=False)


def _check_out(out: Path) -> None:
    """Make the folder of the profile before the fit, which takes long. CalibrationError: no file can be written."""
    import os

    from craton.planning.calibration import CalibrationError

    if out.is_dir():
        raise CalibrationError(f"--out {out}: is a folder; name a file, e.g. {out / 'profile.json'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(
            f"--out {out}: its folder cannot be made ({error.strerror}); name another path"
        ) from None
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise CalibrationError(f"--out {out}: cannot be written; name another path")
