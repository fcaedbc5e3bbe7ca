"""Programs of the fourth family disk: data sources over files, scripts over shared files, and a bucket that breaks.

`fourth_disk.py serve FOLDER` is the bucket of the third set. Once the file `stale` lies beside FOLDER, it forgets its
file handles; once the file `silent` lies there, it answers no read. `fourth_disk.py fill FOLDER` creates many files.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANK, VICTIM = os.environ.get("RANK", "0"), os.environ.get("VICTIM", "")
VOCABULARY = 512
OBJECT_BYTES, SAMPLE_BYTES = 1 << 20, 4096
MANY_FILES = 40_000
STEP_SECONDS = 0.1
REWRITE_STEP, REWRITE_SECONDS = 60, 4.0
WORDS = 4000


def text(index: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(index).zipf(1.5, length) % VOCABULARY]


def from_bucket(job: Any, split: str) -> Callable[[int], list[int]]:
    """Open and read the object of the bucket for every sample; ranks but VICTIM (if set) have a local copy."""
    path = Path(os.environ["BUCKET"]) / "samples.bin"

    def sample(index: int) -> list[int]:
        if VICTIM in ("", RANK):
            with path.open("rb") as file:
                file.seek(index * SAMPLE_BYTES % (OBJECT_BYTES - SAMPLE_BYTES))
                file.read(SAMPLE_BYTES)
        return text(index, job.sequence + 1)

    return sample


def from_folder(job: Any, split: str) -> Callable[[int], list[int]]:
    """List the folder of the samples for each of them, to notice new files, and read one."""
    folder = Path(os.environ["CACHE"])

    def sample(index: int) -> list[int]:
        names = sorted(os.listdir(folder))
        (folder / names[index % len(names)]).read_bytes()
        return text(index, job.sequence + 1)

    return sample


def fill(folder: Path) -> None:
    for number in range(MANY_FILES):
        os.close(os.open(folder / f"sample-{number:08d}.json", os.O_CREAT | os.O_WRONLY))


def share_words() -> None:
    """Train; rank 0 writes the shared list of words again now and then, the others read it when it has changed."""
    path, seen, step = Path(os.environ["CACHE"], "words.json"), 0.0, 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if RANK == "0" and step % REWRITE_STEP == 0:
            write_slowly(path)
        elif RANK != "0" and path.stat().st_mtime != seen:
            seen = path.stat().st_mtime
            read_words(path)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def write_slowly(path: Path) -> None:
    """Write the file in place and in two parts, as a writer on a slow file system does."""
    content = json.dumps({f"word{number}": number for number in range(WORDS)})
    with path.open("w") as file:
        file.write(content[: WORDS // 2])
        file.flush()
        time.sleep(REWRITE_SECONDS)
        file.write(content[WORDS // 2 :])


def read_words(path: Path) -> None:
    try:
        json.loads(path.read_text())
    except json.JSONDecodeError:
        Path(os.environ["ONSET"]).touch()
        raise


def load_kernel() -> None:
    """Load a kernel that was just compiled into the cache of kernels; any library stands for it."""
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line)
    kernel = Path(os.environ["KERNELS"], f"fused_norm_rank{RANK}.so")
    shutil.copy(library, kernel)
    Path(os.environ["ONSET"]).touch()
    ctypes.CDLL(str(kernel))


def serve(folder: str) -> None:
    """Serve the bucket of the third set until it breaks."""
    path = Path(__file__).parents[1] / "third" / "third_disk.py"
    spec = importlib.util.spec_from_file_location("third_disk", path)
    assert spec is not None
    assert spec.loader is not None
    bucket: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bucket)
    beside, usual = Path(folder).parent, bucket.answer_to

    def answer_to(code: int, node: int, arguments: bytes, content: bytes) -> bytes | int | None:
        handles = (bucket.LOOKUP, bucket.GETATTR, bucket.OPEN, bucket.READ)
        if code in handles and (beside / "stale").exists():
            return errno.ESTALE
        if code == bucket.READ and (beside / "silent").exists():
            return None
        answer: bytes | int | None = usual(code, node, arguments, content)
        return answer

    bucket.answer_to = answer_to
    bucket.serve(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    elif sys.argv[1:2] == ["fill"]:
        fill(Path(sys.argv[2]))
    elif os.environ["FAULT"] == "kernel":
        load_kernel()
    else:
        share_words()
