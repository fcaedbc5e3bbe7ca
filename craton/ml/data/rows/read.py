"""Read rows for readers that keep them as they are, such as the problems of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from craton.ml.data.documents import find_files, rows_of


def read_rows(inputs: Sequence[str | Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, row) of every row of JSONL and Parquet files; DataError for text."""
    yield from rows_of(find_files(inputs))
