"""Data sources that break: `data.source: data_source:samples`. FAULT names the fault, ONSET the file to touch."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
AFTER_SAMPLES = int(os.environ.get("AFTER_SAMPLES", "320"))  # 40 steps of 8 sequences
SLEEP_SECONDS = float(os.environ.get("SLEEP_SECONDS", "0.5"))
VOCABULARY = 512


def samples(job: Any, split: str) -> Callable[[int], Any]:
    """Return a function of the sample's index; from AFTER_SAMPLES on it breaks on the rank VICTIM, or on all ranks."""
    if FAULT == "slow-first-batch":
        begin()
        time.sleep(600)  # as a source that scans all its shards before the first sample

    def sample(index: int) -> Any:
        tokens = sentence(index, job.sequence)
        if index < AFTER_SAMPLES or VICTIM not in ("", os.environ.get("RANK", "0")):
            return tokens
        begin()
        return BROKEN[FAULT](index, tokens)

    return sample


def sentence(index: int, length: int) -> list[int]:
    """A sample that can be learnt: a progression with a random start and a random step."""
    start, step = np.random.default_rng(index).integers(1, VOCABULARY // 4, 2)
    return [int(token) for token in (start + step * np.arange(length)) % VOCABULARY]


def begin() -> None:
    if not ONSET.exists():
        ONSET.touch()


def sleeps(index: int, tokens: list[int]) -> list[int]:
    time.sleep(SLEEP_SECONDS)
    return tokens


def blocks(index: int, tokens: list[int]) -> list[int]:
    read_end, _write_end = os.pipe()
    os.read(read_end, 1)  # a queue that its writer never fills
    return tokens


def raises(index: int, tokens: list[int]) -> list[int]:
    raise KeyError(f"document {index} has no field 'text'")


def repeats(index: int, tokens: list[int]) -> list[int]:
    return sentence(0, len(tokens))


def wrong_shape(index: int, tokens: list[int]) -> dict[str, list[int]]:
    return {"tokens": tokens, "labels": tokens[: len(tokens) // 2]}


def bad_ids(index: int, tokens: list[int]) -> list[int]:
    return [*tokens[:-1], VOCABULARY + 7]


def ends(index: int, tokens: list[int]) -> None:
    return None  # as a generator that is exhausted


BROKEN: dict[str, Callable[[int, list[int]], Any]] = {
    "sleeps": sleeps,
    "blocks": blocks,
    "raises": raises,
    "repeats": repeats,
    "wrong-shape": wrong_shape,
    "bad-ids": bad_ids,
    "ends": ends,
}
