"""Programs of the fifth family disk: a data source over a bucket, scripts that save, and a bucket that gets slow.

`fifth_disk.py serve FOLDER` is the bucket of the third set. Once the file `far` lies beside FOLDER, each request takes
its time, as over a long distance.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANK = os.environ.get("RANK", "0")
VOCABULARY = 512
OBJECT_BYTES, SAMPLE_BYTES = 1 << 20, 4096
LOCAL_SAMPLES = 320  # that the node's own disk has room for
DISTANCE_SECONDS = 0.04
STEP_SECONDS = 0.1
SAVE_STEPS, MOVED_STEP, ROTATED_STEP = 5, 40, 40
STATE_BYTES = 512 << 10


def text(index: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(index).zipf(1.5, length) % VOCABULARY]


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def from_bucket(job: Any, split: str) -> Callable[[int], list[int]]:
    """Open and read the object of the bucket for every sample."""
    path = Path(os.environ["BUCKET"]) / "samples.bin"

    def sample(index: int) -> list[int]:
        with path.open("rb") as file:
            file.seek(index * SAMPLE_BYTES % (OBJECT_BYTES - SAMPLE_BYTES))
            file.read(SAMPLE_BYTES)
        return text(index, job.sequence + 1)

    return sample


def mapped_from_bucket(job: Any, split: str) -> Callable[[int], list[int]]:
    """Take the first samples from the node's own disk, and map the object of the bucket for all others."""
    path = Path(os.environ["BUCKET"]) / "samples.bin"

    def sample(index: int) -> list[int]:
        if index >= LOCAL_SAMPLES:
            begin()
            tokens = np.memmap(path, np.uint8, "r")
            return [int(token) for token in tokens[: job.sequence + 1]]
        return text(index, job.sequence + 1)

    return sample


def train() -> None:
    """Train alone, step by step; FAULT says how the state is saved."""
    save = {"moves": save_and_move, "rotates": save_and_rotate, "syncs": save_and_sync}[os.environ["FAULT"]]
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if step % SAVE_STEPS == 0:
            save(Path(os.environ["SAVES"]), step)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def save_and_move(folder: Path, step: int) -> None:
    """Write the state to the node's scratch folder, and rename it into the folder of the checkpoints."""
    if RANK != "0" or step < MOVED_STEP:
        return
    scratch = Path(os.environ["SCRATCH"], f"step-{step}.pt")
    scratch.write_bytes(bytes(STATE_BYTES))
    begin()
    os.rename(scratch, folder / scratch.name)


def save_and_rotate(folder: Path, step: int) -> None:
    """Save a checkpoint, and remove all but the newest; every node does so, in one shared folder."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(exist_ok=True)
    (place / f"rank-{RANK}.pt").write_bytes(bytes(SAMPLE_BYTES))
    if step < ROTATED_STEP:
        return
    old = sorted(path for path in folder.iterdir() if int(path.name.rpartition("-")[2]) < step)
    if RANK != "0":
        begin()
        time.sleep(1)  # it has found the same folders, and is a little later
    for path in old:
        shutil.rmtree(path)


def save_and_sync(folder: Path, step: int) -> None:
    """Save a checkpoint and make sure that it is on the disk."""
    if RANK != "0":
        return
    with (folder / f"step-{step}.pt").open("wb") as file:
        file.write(os.urandom(STATE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def serve(folder: str) -> None:
    """Serve the bucket of the third set, from far away once the file `far` exists."""
    path = Path(__file__).parents[1] / "third" / "third_disk.py"
    spec = importlib.util.spec_from_file_location("third_disk", path)
    assert spec is not None
    assert spec.loader is not None
    bucket: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bucket)
    far, usual = Path(folder).parent / "far", bucket.answer_to

    def answer_to(code: int, node: int, arguments: bytes, content: bytes) -> bytes | int | None:
        if code in (bucket.LOOKUP, bucket.OPEN, bucket.READ) and far.exists():
            time.sleep(DISTANCE_SECONDS)
        answer: bytes | int | None = usual(code, node, arguments, content)
        return answer

    bucket.answer_to = answer_to
    bucket.serve(folder)


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["serve"] else train()
