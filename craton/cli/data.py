"""`craton data tokenize`: convert text to token shards, with a progress bar on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from craton.formatting import amount, duration

if TYPE_CHECKING:
    from craton.ml.data import Tokenized

app = typer.Typer(help="Prepare training data: tokenize text into shards.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Prepare training data: tokenize text into shards."""


@app.command()
def tokenize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS...",
            help="Text, JSONL or Parquet files (also .gz, .zst), folders of them, or `stdlib` (Python's own sources).",
            show_default=False,
        ),
    ],
    to: Annotated[str, typer.Option(help="Folder or s3:// URL to write to; must not exist.", show_default=False)],
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder with a tokenizer.json, or a Hugging Face Hub id.", show_default=False)
    ] = None,
    train_bpe: Annotated[
        int | None,
        typer.Option(help="Train a byte-level BPE tokenizer with this vocabulary size instead.", show_default=False),
    ] = None,
    field: Annotated[str, typer.Option(help="JSONL field or Parquet column that holds the text.")] = "text",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes \\[default: one per core].", show_default=False)
    ] = None,
    validation: Annotated[
        float, typer.Option(help="Fraction of the documents to hold out in FOLDER/validation.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Tokenize text once, in parallel, into shards that training memory-maps."""
    import json

    from craton.cli.views.progress import progress
    from craton.extras import require_extra
    from craton.ml.data import tokenize as run

    require_extra("train", "`craton data tokenize`", ("tokenizers",))
    with progress("tokenize", in_bytes=True) as report:
        done = run(
            inputs,
            to,
            tokenizer=tokenizer,
            bpe_vocabulary=train_bpe,
            field=field,
            workers=workers,
            validation=validation,
            progress=report,
        )
    if as_json:
        print(json.dumps(_document(done)))
    else:
        _show(done, train_bpe)


def _document(done: Tokenized) -> dict[str, object]:
    return {
        "folder": str(done.folder),
        "documents": done.documents,
        "tokens": done.tokens,
        "validation_documents": done.validation_documents,
        "validation_tokens": done.validation_tokens,
        "vocab_size": done.vocab_size,
        "text_bytes": done.text_bytes,
        "bytes_per_token": done.bytes_per_token,
        "seconds": done.seconds,
        "tokens_per_second": done.tokens_per_second,
        "left_out": list(done.left_out),
    }


def _show(done: Tokenized, wanted_vocabulary: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_row("documents", f"{done.documents:,}")
    table.add_row("tokens", f"{done.tokens:,}")
    if done.validation_documents:
        table.add_row("held out", f"{done.validation_documents:,} documents, {done.validation_tokens:,} tokens")
    is_short = wanted_vocabulary is not None and done.vocab_size < wanted_vocabulary
    of = f" of {wanted_vocabulary:,}: this text has no more pairs that repeat" if is_short else ""
    table.add_row("vocabulary", f"{done.vocab_size:,}{of}")
    table.add_row("bytes/token", f"{done.bytes_per_token:.2f}")
    table.add_row("time", duration(done.seconds))
    table.add_row("tokens/s", amount(done.tokens_per_second))
    if done.left_out:
        table.add_row("left out", f"{len(done.left_out):,} files that are not UTF-8")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{done.folder}", soft_wrap=True, markup=False)
