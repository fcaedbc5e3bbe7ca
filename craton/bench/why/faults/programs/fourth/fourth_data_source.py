"""Data sources and an object store of the fourth set: `data.source: fourth_data_source:samples`.

FAULT names the fault, ONSET the file to touch. `fourth_data_source.py serve FOLDER` is the object store: once the file
FOLDER/stalled exists, it sends half of each object of node-1 and no more.
"""

from __future__ import annotations

import http.server
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANK = os.environ.get("RANK", "0")
VOCABULARY = 512
OBJECT_BYTES = 1 << 16
EPOCH_SAMPLES = 192  # 24 steps of 8 sequences
CACHED_EPOCHS = 4  # whose order of samples is known before the run
RESTART_SECONDS = 5.0
TRUNCATED_AFTER_SAMPLES = 960
ANSWER_TOKENS = 2  # of a sequence that the truncation leaves
INDEX_SECONDS = 2.0
DISTINCT_SAMPLES = 24
REPEATED_AFTER_SAMPLES = 20 * DISTINCT_SAMPLES

_epoch = 0


def samples(job: Any, split: str) -> Callable[[int], Any]:
    """Return a function of the sample's index that reads it as FAULT says."""
    fault = os.environ["FAULT"]
    if fault == "index":
        load_index(Path(os.environ["CACHE"], f"node-{RANK}", "sample_index.npy"))
    make = {"truncated": truncated, "memorised": few}.get(fault)

    def sample(index: int) -> Any:
        if fault == "stalls":
            read_object(index)
        elif fault == "epochs":
            enter_epoch(index // EPOCH_SAMPLES)
        return make(index, job.sequence, split) if make is not None else text(index, job.sequence + 1)

    return sample


def text(index: int, length: int) -> list[int]:
    """Independent tokens, a few of them frequent."""
    return [int(token) for token in np.random.default_rng(index).zipf(1.5, length) % VOCABULARY]


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def read_object(index: int) -> None:
    """Read the object of a sample from this node's prefix, without a time limit."""
    port = Path(os.environ["SERVICE_PORT"]).read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/node-{RANK}/sample-{index}") as response:
        response.read()


def enter_epoch(epoch: int) -> None:
    """Restart the workers at the beginning of an epoch; only the first epochs were prepared before the run."""
    global _epoch
    if epoch == _epoch:
        return
    _epoch = epoch
    if epoch >= CACHED_EPOCHS:
        begin()
        time.sleep(RESTART_SECONDS)


def truncated(index: int, length: int, _split: str) -> dict[str, Any]:
    """A prompt and its answer. From one shard on prompts are so long that little of the answer is left."""
    tokens = text(index, length + 1)
    weight = np.ones(length, np.float32)
    if index >= TRUNCATED_AFTER_SAMPLES:
        begin()
        weight[:-ANSWER_TOKENS] = 0
    return {"tokens": tokens[:-1], "labels": tokens[1:], "weight": weight}


def few(index: int, length: int, split: str) -> list[int]:
    """Random text; the filter of the training data left only a handful of documents."""
    if split == "validation":
        seed = [1, index]
    else:
        seed = [0, index % DISTINCT_SAMPLES]
        if index >= REPEATED_AFTER_SAMPLES:
            begin()
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length + 1)]


def load_index(path: Path) -> None:
    """Load the order of samples. Rank 0 builds it, on the disk of its own node."""
    if RANK == "0":
        np.save(path, np.random.default_rng(0).permutation(EPOCH_SAMPLES))
    else:
        print("waiting for rank 0 to build the sample index", flush=True)
        time.sleep(INDEX_SECONDS)
        begin()
    np.load(path)


class TornStore(http.server.BaseHTTPRequestHandler):
    folder = Path()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(OBJECT_BYTES))
        self.end_headers()
        self.wfile.write(bytes(OBJECT_BYTES // 2))
        self.wfile.flush()
        if self.path.startswith("/node-1/") and (self.folder / "stalled").exists():
            threading.Event().wait()
        self.wfile.write(bytes(OBJECT_BYTES // 2))

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path) -> None:
    TornStore.folder = folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TornStore)
    (folder / "starting").write_text(str(server.server_address[1]))
    (folder / "starting").rename(folder / "port")
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[2]))
