"""Data sources and a script of the third set: `data.source: third_data_source:samples`.

FAULT names the fault, VICTIM the rank that has it, ONSET the file to touch.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
RANK = os.environ.get("RANK", "0")
VOCABULARY = 512
FILES = 64  # of the scratch folder of each node
LONG_AFTER_SAMPLES = 480  # 60 steps of 8 sequences
WORD_CHARACTERS = 1200
UNSHIFTED_AFTER_SAMPLES = 960
RETRY_SECONDS = 0.02
BATCHES = 80  # that the prefetch thread of a script makes before it meets a bad record
STEP_SECONDS = 0.1


def samples(job: Any, split: str) -> Callable[[int], Any]:
    """Return a function of the sample's index that reads it as FAULT says."""

    def sample(index: int) -> Any:
        READ[FAULT](index)
        tokens = text(index, job.sequence + 1)
        if FAULT != "labels":
            return tokens[:-1]
        if index < UNSHIFTED_AFTER_SAMPLES:
            return {"tokens": tokens[:-1], "labels": tokens[1:]}
        begin()
        return {"tokens": tokens[:-1], "labels": tokens[:-1]}

    return sample


def text(index: int, length: int) -> list[int]:
    """Independent tokens, a few of them frequent: a model can learn their frequencies and no more."""
    return [int(token) for token in np.random.default_rng(index).zipf(1.5, length) % VOCABULARY]


def begin() -> None:
    if not ONSET.exists():
        ONSET.touch()


def read_object(index: int) -> None:
    """Read an object of the store with the credentials of the start of the run."""
    port = Path(os.environ["SERVICE_PORT"]).read_text()
    url = f"http://127.0.0.1:{port}/bucket/sample-{index}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            response.read()
    except urllib.error.HTTPError as problem:
        raise RuntimeError(f"GET {url}: {problem}: {problem.read().decode()}") from problem


def read_any_file(index: int) -> None:
    """Read the file of a sample from this node's scratch disk; where it cannot be read, try the next one."""
    while True:
        path = Path(os.environ["SCRATCH"], f"node-{RANK}", f"{index % FILES}.txt")
        try:
            path.read_bytes()
            return
        except OSError as problem:
            print(f"cannot load sample {index}, trying the next one: {problem}", flush=True)
        time.sleep(RETRY_SECONDS)
        index += 1


def tokenize(index: int) -> None:
    """Merge the characters of a document's words; from one shard on a document is one long word, as base64 data is."""
    words = ["word"] * 40
    if index >= LONG_AFTER_SAMPLES:
        begin()
        letters = np.random.default_rng(index).integers(ord("a"), ord("z") + 1, WORD_CHARACTERS)
        words = ["".join(map(chr, letters))]
    for word in words:
        merge(list(word))


def merge(pieces: list[str]) -> None:
    """Merge the smallest pair again and again, with a scan of all pairs each time: quadratic in the word's length."""
    while len(pieces) > 1:
        best = min(range(len(pieces) - 1), key=lambda place: (len(pieces[place]), pieces[place]))
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]


READ: dict[str, Callable[[int], None]] = {
    "expired": read_object,
    "skips": read_any_file,
    "tokenizer": tokenize,
    "labels": lambda index: None,
}


def prefetch(batches: queue.Queue[np.ndarray]) -> None:
    """Make batches in a thread; a bad record ends the thread, and no other thread learns of it."""
    number = 0
    while True:
        number += 1
        record = np.random.default_rng(number).normal(size=16 * 256).astype(np.float32)
        if RANK == VICTIM and number > BATCHES:
            begin()
            record = record[:-100]
        batches.put(record.reshape(16, 256))


def train() -> None:
    """Train data parallel with gloo on batches of a prefetch thread."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches: queue.Queue[np.ndarray] = queue.Queue(maxsize=4)
    threading.Thread(target=prefetch, args=(batches,), name="prefetch", daemon=True).start()
    step = 0
    while True:
        step += 1
        loss = model(torch.from_numpy(batches.get())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    train()
