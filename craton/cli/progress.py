"""A progress bar on stderr for what takes longer than a moment; nothing where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Yields a function (done, total, what) that moves the bar."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
        *((TimeRemainingColumn(),) if in_bytes else ()),
        TextColumn("{task.fields[what]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=None, what="")

        def report(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, what=what)

        yield report
