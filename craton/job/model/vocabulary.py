"""Whether two model folders have the same tokens, from their tokenizer.json, without a tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"


def vocabulary_mismatch(model: Path, draft: Path) -> str:
    """Return the first difference between the tokens of a model and of its draft model; "" if there is none, or if a
    folder has no tokenizer.json. One of them may have tokens that the other lacks beyond its last one."""
    if model == draft:
        return ""
    ours, theirs = _tokens(model), _tokens(draft)
    if ours is None or theirs is None:
        return ""
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            return _different(number, ours[number], theirs[number])
    alone = ours.keys() ^ theirs.keys()
    last = min(max(ours, default=-1), max(theirs, default=-1))
    if missing := sorted(number for number in alone if number <= last):
        return _different(missing[0], ours.get(missing[0]), theirs.get(missing[0]))
    return ""


def _different(number: int, ours: str | None, theirs: str | None) -> str:
    return (
        f"token {number:,} of the model is {ours!r}, of the draft model {theirs!r}; use a draft model with the same "
        "tokenizer"
    )


def _tokens(folder: Path) -> dict[int, str] | None:
    """Return the token of each number; None without a readable tokenizer.json, which loading the model reports."""
    try:
        document: dict[str, Any] = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    vocabulary = document.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [token, score]
        tokens = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    else:
        tokens = {int(number): str(token) for token, number in vocabulary.items()}
    return tokens | {int(added["id"]): str(added["content"]) for added in document.get("added_tokens", [])}
