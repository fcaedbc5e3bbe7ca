"""Rows of JSONL and Parquet files, each with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.data.rows.read import read_rows
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
