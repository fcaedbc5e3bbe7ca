"""Progress of slow operations on stderr: a bar in a terminal, elsewhere a line after PLAIN_SECONDS and one at the end.
stdout is for results."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from craton import formatting

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_SECONDS = 2.0


@contextmanager
def progress(title: str, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function (done, total, label) that updates the bar."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bar(title, in_bytes, console) if console.is_terminal else _lines(title, in_bytes) as report:
        yield report


@contextmanager
def _bar(title: str, in_bytes: bool, console: Console) -> Iterator[Callable[..., None]]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
        *((TimeRemainingColumn(),) if in_bytes else ()),
        TextColumn("{task.fields[what]}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=None, what="")

        def report(done: int, total: int, label: str = "") -> None:
            bar.update(task, completed=done, total=total, what=label)

        yield report


@contextmanager
def _lines(title: str, in_bytes: bool) -> Iterator[Callable[..., None]]:
    """Progress for a log: nothing for quick operations, and at most two lines."""
    began = time.monotonic()
    newest = ""
    has_printed = False

    def report(done: int, total: int, label: str = "") -> None:
        nonlocal newest
        counts = (formatting.stored(done), formatting.stored(total)) if in_bytes else (f"{done:,}", f"{total:,}")
        newest = f": {counts[0]} of {counts[1]} {label}".rstrip()

    def print_slow() -> None:
        nonlocal has_printed
        has_printed = True
        print(f"{title} takes a while{newest}", file=sys.stderr, flush=True)

    timer = threading.Timer(PLAIN_SECONDS, print_slow)
    timer.daemon = True
    timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        timer.join()
    if has_printed:
        print(f"{title} took {formatting.duration(time.monotonic() - began)}", file=sys.stderr, flush=True)
