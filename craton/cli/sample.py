"""`craton sample RUN_OR_FOLDER --prompt TEXT`: generate text with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_FOLDER",
            help="Run (its newest checkpoint is used) or Hugging Face folder.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Prompt; repeatable \\[default: the beginning of a document].", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 80,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K most likely tokens; 0 means all.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    step: Annotated[int | None, typer.Option(help="Checkpoint step \\[default: latest].", show_default=False)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder or Hub id \\[default: the model's].", show_default=False)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Treat each prompt as a user message: apply the chat template and print the reply."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the texts as JSON.")] = False,
) -> None:
    """Generate text with a trained model."""
    from craton.cli.export import start_module
    from craton.remote import is_url
    from craton.telemetry import find_run

    if not is_url(model) and not (Path(model) / "config.json").is_file():
        find_run(model)  # report a wrong name before loading torch

    prompts = [word for text in prompt or [] for word in ("--prompt", text)]
    options = {
        "--max-tokens": max_tokens,
        "--temperature": temperature,
        "--top-k": top_k,
        "--seed": seed,
        "--step": step,
        "--tokenizer": tokenizer,
    }
    start_module("craton.ml.sample", [model, *prompts, *(["--chat"] if chat else [])], options, as_json)
