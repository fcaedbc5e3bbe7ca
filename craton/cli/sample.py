"""`craton sample RUN_OR_FOLDER --prompt TEXT`: what a trained model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_FOLDER", help="A run (its newest checkpoint) or a Hugging Face folder.", show_default=False
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="How the text begins; may be given again.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 80,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the likeliest so many; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    step: Annotated[int | None, typer.Option(help="Another checkpoint than the newest.", show_default=False)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id \\[default: the model's].", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: apply the chat template, print the answer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the texts as JSON.")] = False,
) -> None:
    """Let a trained model write."""
    from craton.cli.export import start_module
    from craton.remote import is_url
    from craton.telemetry import find_run

    if not is_url(model) and not (Path(model) / "config.json").is_file():
        find_run(model)  # a wrong name is said before torch is loaded

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
