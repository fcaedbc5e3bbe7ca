"""`craton think URL --strategy vote:16 --prompt TEXT`: answer with test-time compute, on any OpenAI endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def think(
    url: Annotated[str, typer.Argument(metavar="URL", help="Craton server or OpenAI endpoint.", show_default=False)],
    strategy: Annotated[
        str,
        typer.Option(
            help="vote:N, best_of:N:SCORE, beam:N:SCORE, tree:N:SCORE, budget:AT_LEAST-AT_MOST, or a YAML mapping with "
            "kind, e.g. '{kind: vote, n: 16, answer: boxed}'."
        ),
    ] = "vote:16",
    prompt: Annotated[str | None, typer.Option(help="Prompt.", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="File with the prompt.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    completion: Annotated[
        bool, typer.Option("--completion", help="Send the prompt as plain text, without a chat template.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model name \\[default: the first that the server lists].", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Variable with the API key.", show_default=False)
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="Verifier that scores: exact, math, regex, json_schema, code, or a YAML file with `verifiers: "
            "{NAME: {verifier: …}}`, which may have judges and functions.",
            show_default=False,
        ),
    ] = None,
    answer: Annotated[
        str | None, typer.Option(help="Reference answer that the verifier compares with.", show_default=False)
    ] = None,
    sample_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of one sample.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed; equal seeds give equal results.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of all samples together.", show_default=False)
    ] = None,
    max_seconds: Annotated[str | None, typer.Option(help="Maximum time, e.g. 30s or 2m.", show_default=False)] = None,
    max_dollars: Annotated[float | None, typer.Option(help="Maximum cost; needs --price.", show_default=False)] = None,
    price: Annotated[
        str | None,
        typer.Option(metavar="IN,OUT", help="Dollars per million prompt and completion tokens.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Answer a prompt with several samples, a search or a thinking budget; print the answer and what it cost."""
    from craton.cli.views.thinking import ThinkRequest, run_think

    run_think(
        ThinkRequest(
            url, strategy, prompt, file, system, completion, model, key, verifier, answer, sample_tokens, temperature,
            seed, max_tokens, max_seconds, max_dollars, price,
        ),
        as_json,
    )  # fmt: skip
