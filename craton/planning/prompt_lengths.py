"""How long the prompts of a job's data are, from the first rows of its local JSONL files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from craton.job import Job

ROWS = 256  # of each file
MAX_LINE_BYTES = 1 << 20
BYTES_PER_TOKEN = 4.0  # of English text in vocabularies with merges
SMALL_VOCABULARY = 512  # below this a token is about a byte
TURN_TOKENS = 4  # that a chat template adds to each message


def mean_prompt_tokens(job: Job) -> float | None:
    """Return the mean tokens of a prompt, weighted as the mixture; None where no row can be read."""
    column = job.data.columns.get("prompt", "prompt")
    found = [
        (mean, weight)
        for path, weight in job.data.mixture
        if (mean := _mean_bytes(path, column, _changed(path))) is not None
    ]
    if not found:
        return None
    text, turns = (sum(mean[part] * weight for mean, weight in found) for part in (0, 1))
    shape = job.model_shape
    bytes_per_token = 1.0 if shape is not None and shape.vocab <= SMALL_VOCABULARY else BYTES_PER_TOKEN
    return (text / bytes_per_token + turns * TURN_TOKENS) / sum(weight for _, weight in found)


def _changed(path: str) -> float:
    """Return when a file was changed, which tells the cache that it is another one."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


@lru_cache(maxsize=64)
def _mean_bytes(path: str, column: str, changed: float) -> tuple[float, float] | None:
    """Return the mean bytes and chat turns of the prompts of a file; None if it has none that can be read."""
    if not path.endswith((".jsonl", ".json")) or not changed:
        return None
    try:
        lengths = list(islice(_lengths(Path(path), column), ROWS))
    except (OSError, ValueError):
        return None
    if not lengths:
        return None
    return sum(length for length, _ in lengths) / len(lengths), sum(turns for _, turns in lengths) / len(lengths)


def _lengths(path: Path, column: str) -> Iterator[tuple[int, int]]:
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            row = json.loads(line)
            prompt: Any = row.get(column) if isinstance(row, dict) else None
            if isinstance(prompt, str):
                yield len(prompt.encode()), 0
            elif isinstance(prompt, list):
                texts = [str(turn.get("content", "")) for turn in prompt if isinstance(turn, dict)]
                if texts:
                    yield sum(len(text.encode()) for text in texts), len(texts)
