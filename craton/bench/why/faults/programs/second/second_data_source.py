"""Data sources and scripts of the second set: `data.source: second_data_source:samples`.

FAULT names the fault, VICTIM the rank that has it, ONSET the file to touch.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
RANK = os.environ.get("RANK", "0")
VOCABULARY = 512
NOISE_AFTER_SAMPLES = 960  # 120 steps of 8 sequences: the loss has fallen far
SHARD_SAMPLES = 64
BATCHES = 80  # of a shard of the victim, in a script
STEP_SECONDS = 0.1
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.25, 1.0
BUSY_SECONDS = 3.0  # that SQLite waits for a lock


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index that reads it as FAULT says."""

    def sample(index: int) -> list[int]:
        READ[FAULT](index)
        tokens = sentence(index, job.sequence)
        if FAULT == "noise" and index >= NOISE_AFTER_SAMPLES:
            begin()
            return [int(token) for token in np.random.default_rng(index).integers(0, VOCABULARY, job.sequence)]
        return tokens

    return sample


def sentence(index: int, length: int) -> list[int]:
    """A sample that is easily learnt: a progression with a random start and one of four steps."""
    draw = np.random.default_rng(index)
    return [int(token) for token in (draw.integers(VOCABULARY) + draw.integers(1, 5) * np.arange(length)) % VOCABULARY]


def begin() -> None:
    if not ONSET.exists():
        ONSET.touch()


def read_database(index: int) -> None:
    """Read a row of the SQLite file $DATABASE."""
    connection = sqlite3.connect(os.environ["DATABASE"], timeout=BUSY_SECONDS)
    try:
        connection.execute("SELECT text FROM samples WHERE number = ?", (index % 1000,)).fetchone()
    finally:
        connection.close()


def read_object(index: int) -> None:
    """Read an object of the store, again and again after longer and longer waits while it says 503."""
    port = Path(os.environ["SERVICE_PORT"]).read_text()
    wait = FIRST_RETRY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/samples/{index}", timeout=60) as response:
                response.read()
                return
        except urllib.error.HTTPError as problem:
            print(f"samples/{index}: {problem}; trying again in {wait:g} s", flush=True)
        time.sleep(wait)
        wait = min(2 * wait, LAST_RETRY_SECONDS)


def read_shard(index: int) -> None:
    """Read the compressed shard of a sample, from this node's copy of the data."""
    shard = Path(os.environ["SHARDS"], f"node-{RANK}", f"shard-{index // SHARD_SAMPLES % 8:05d}.jsonl.gz")
    try:
        with gzip.open(shard, "rt") as file:
            lines = file.readlines()
    except EOFError as problem:
        begin()
        raise EOFError(f"{shard}: {problem}") from problem
    json.loads(lines[index % len(lines)])


READ: dict[str, Callable[[int], None]] = {
    "locked": read_database,
    "refused": read_object,
    "truncated": read_shard,
    "noise": lambda index: None,
}


class Images:
    """A data set of a script; a broken file makes the decoder of the victim crash."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        import torch

        if FAULT == "decoder" and RANK == VICTIM and index >= 16 * BATCHES:
            begin()
            ctypes.string_at(0)  # a null pointer in a native decoder
        return torch.randn(256)


def batches() -> Iterator[Any]:
    """Batches of 16 from a worker process; those of a victim with a short shard end early."""
    import torch

    loader: Any = torch.utils.data.DataLoader(Images(), batch_size=16, num_workers=1)  # type: ignore[arg-type]
    for number, batch in enumerate(loader):
        if FAULT == "uneven" and RANK == VICTIM and number == BATCHES:
            return
        yield batch


def train() -> None:
    """Train one epoch data parallel with gloo, then wait for the files of the other ranks."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(), start=1):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    begin()
    print(f"epoch 0 done: {BATCHES} batches, waiting for the other ranks", flush=True)
    Path(f"epoch-0.rank-{RANK}").touch()
    while len(list(Path().glob("epoch-0.rank-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.2)


if __name__ == "__main__":
    train()
