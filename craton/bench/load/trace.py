"""Reads a recorded workload: a file of JSON lines, one request each.

    {"prompt": "text or [token ids]", "output_tokens": 128, "at": 0.75}

`at` is in seconds after the start, in every line or in none. A missing `output_tokens` is drawn from `--output`. All
errors are reported together, with line numbers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from craton.bench.load.errors import WorkloadError
from craton.bench.load.lengths import Lengths
from craton.bench.load.requests import Request

_KEYS = ("prompt", "output_tokens", "at")
_SHOWN_PROBLEMS = 5


def load_trace(path: Path, output: Lengths, seed: int) -> list[Request]:
    """Return the requests of a file in order of their times, or of its lines if it has no times."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: not a UTF-8 text file; a trace has one JSON object per line") from None
    requests, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        request = _read(line, output, np.random.default_rng([seed, number]))
        if isinstance(request, str):
            problems.append(f"{path}:{number}: {request}")
        else:
            requests.append(request)
    times = [request.at_seconds for request in requests if request.at_seconds is not None]
    if not problems and not requests:
        problems.append(f"{path}: no requests; a trace has one JSON object per line")
    if not problems and times and len(times) < len(requests):
        problems.append(f"{path}: {len(times)} of {len(requests)} lines have `at`; give it in every line or in none")
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        raise WorkloadError("; ".join(problems[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else ""))
    return sorted(requests, key=lambda request: request.at_seconds or 0.0)


def _read(line: str, output: Lengths, generator: np.random.Generator) -> Request | str:
    """Return the request of a line, or its error."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(entry, dict):
        return 'not an object; write {"prompt": …, "output_tokens": …}'
    if unknown := sorted(set(entry) - set(_KEYS)):
        return f"unknown key {unknown[0]!r}; allowed: {', '.join(_KEYS)}"
    prompt, tokens, at = entry.get("prompt"), entry.get("output_tokens"), entry.get("at")
    if not (prompt and (isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_count, prompt))))):
        return "`prompt` must be a text or a list of token ids, not empty"
    if tokens is not None and not (_is_count(tokens) and tokens >= 1):
        return f"`output_tokens` is {tokens!r}; it must be an integer of 1 or more"
    if at is not None and not (isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < math.inf):
        return f"`at` is {at!r}; it must be seconds, 0 or more"
    return Request(prompt, output.draw(generator) if tokens is None else tokens, at)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
