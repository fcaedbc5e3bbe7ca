"""`craton export RUN FOLDER`: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="New folder or s3:// URL to write to.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option(help="Checkpoint step \\[default: latest].", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Weight dtype: bf16 or fp32.")] = "bf16",
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder or Hub id \\[default: the run's].", show_default=False)
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Export only the LoRA adapters, for `craton serve --adapter` or PEFT.")
    ] = False,
    copy: Annotated[bool, typer.Option(help="Also copy the export to the run's object tier, if it has one.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Export a run's model as a Hugging Face folder: weights, config and tokenizer."""
    from craton.telemetry import find_run

    find_run(run)  # report a wrong name before loading torch
    options = {"--step": step, "--dtype": dtype, "--tokenizer": tokenizer}
    flags = [*(["--adapters"] if adapters else []), *([] if copy else ["--no-copy"])]
    start_module("craton.ml.export", [run, folder, *flags], options, as_json)


def start_module(module: str, arguments: list[str], options: dict[str, Any], as_json: bool) -> None:
    """Run `python -m MODULE` on this terminal and exit with its code: torch stays out of the CLI process."""
    import subprocess
    import sys

    from craton.extras import require_extra

    require_extra("train", f"`craton {module.rpartition('.')[2]}`")
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    command = [sys.executable, "-m", module, *arguments, *words, *(["--json"] if as_json else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
