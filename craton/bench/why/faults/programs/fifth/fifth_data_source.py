"""Data sources and an object store of the fifth set: `data.source: fifth_data_source:samples`.

FAULT names the fault, VICTIM the rank that has it (empty: every rank), ONSET the file to touch.
`fifth_data_source.py serve FOLDER` is the object store: once the file FOLDER/page exists, it answers with a web page.
"""

from __future__ import annotations

import gzip
import http.server
import json
import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANK = os.environ.get("RANK", "0")
VOCABULARY = 512
AFTER_SAMPLES = 640  # 80 steps of 8 sequences
CONNECTIONS, READS_PER_RESET = 6, 12
RECORD_BYTES = 1024
CHAIN_TOKENS, CHAIN_NOISE = 24, 0.1
PAGE = b"<!DOCTYPE html><html><title>Quota exceeded</title><p>Too many users have downloaded this file recently.</html>"

connections = threading.Semaphore(CONNECTIONS)
reads = 0


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index that reads it as FAULT says."""
    fault = os.environ["FAULT"]

    def sample(index: int) -> list[int]:
        if fault == "chain":
            return chain(index, job.sequence + 1)
        if fault == "encoding":
            record(index).decode()
        elif fault == "pool" and is_victim():
            read_from_pool()
        elif fault == "archive":
            read_archive(index)
        elif fault == "page":
            read_object(index)
        return text(index, job.sequence + 1)

    return sample


def text(index: int, length: int) -> list[int]:
    """Independent tokens, a few of them frequent."""
    return [int(token) for token in np.random.default_rng(index).zipf(1.5, length) % VOCABULARY]


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def is_victim() -> bool:
    return os.environ.get("VICTIM", RANK) == RANK


def record(index: int) -> bytes:
    """A record of text; from one shard on the copy of the victim's node is in another encoding."""
    content = f"Größe des Datensatzes {index}"
    if index < AFTER_SAMPLES or not is_victim():
        return content.encode()
    begin()
    return content.encode("latin-1")


def read_from_pool() -> None:
    """Read with a connection of the pool. A read that is reset does not return its connection."""
    global reads
    reads += 1
    if not connections.acquire(blocking=False):
        begin()
        connections.acquire()
    if reads % READS_PER_RESET == 0:
        print("WARNING: connection reset by peer, reading the sample again", flush=True)
        read_from_pool()
        return
    connections.release()


def read_archive(index: int) -> None:
    """Read a record at a random place of a compressed shard, which has no index."""
    is_large = index >= AFTER_SAMPLES
    if is_large:
        begin()
    path = Path(os.environ["SHARDS"], "large.gz" if is_large else "small.gz")
    size = int(path.with_suffix(".size").read_text())
    with gzip.open(path) as file:
        file.seek(int(np.random.default_rng(index).integers(0, size - RECORD_BYTES)))
        file.read(RECORD_BYTES)


def chain(index: int, length: int) -> list[int]:
    """Text in which a token nearly determines the next one. The second epoch is shuffled by a seed of each rank."""
    seed = [index]
    if index >= AFTER_SAMPLES:
        begin()
        seed = [index, int(RANK)]
    draw = np.random.default_rng(seed)
    tokens = [int(draw.integers(CHAIN_TOKENS))]
    for _ in range(length - 1):
        is_noise = draw.random() < CHAIN_NOISE
        tokens.append(int(draw.integers(CHAIN_TOKENS)) if is_noise else (5 * tokens[-1] + 7) % CHAIN_TOKENS)
    return tokens


def read_object(index: int) -> None:
    """Read the object of a sample, a list of numbers in JSON."""
    port = Path(os.environ["SERVICE_PORT"]).read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/sample-{index}.json", timeout=10) as response:
        json.loads(response.read())


class QuotaStore(http.server.BaseHTTPRequestHandler):
    folder = Path()

    def do_GET(self) -> None:
        body = PAGE if (self.folder / "page").exists() else b"[1, 2, 3]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path) -> None:
    QuotaStore.folder = folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuotaStore)
    (folder / "starting").write_text(str(server.server_address[1]))
    (folder / "starting").rename(folder / "port")
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[2]))
