"""Programs of the third family disk: data sources over files, an objective that logs, a script that resumes, a bucket.

`third_disk.py serve FOLDER` is a file system in user space (linux/fuse.h) with one file of random bytes, `samples.bin`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 512
FILE_BYTES = 1 << 20
SAMPLE_BYTES = 4096
STEP_SECONDS = 0.1
SAVE_STEPS = 3
# linux/fuse.h, protocol 7.31
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 27, 28, 29, 36, 42
ROOT, FILE = 1, 2
DIRECT_IO = 1
ENTRY, ATTRIBUTES, OPENED = struct.Struct("<QQQQII"), struct.Struct("<6Q10I"), struct.Struct("<QII")
HEADER, REPLY, VALID = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ"), struct.Struct("<QII")


def from_bucket(job: Any, split: str) -> Callable[[int], list[int]]:
    """Open and read the object of the bucket for every sample."""
    path = Path(os.environ["SAMPLES"]) / "samples.bin"

    def sample(index: int) -> list[int]:
        with path.open("rb") as file:
            file.seek(index * SAMPLE_BYTES % (FILE_BYTES - SAMPLE_BYTES))
            return [1 + byte for byte in file.read(job.sequence + 1)]

    return sample


def from_tokens(job: Any, split: str) -> Callable[[int], list[int]]:
    """Read samples from a file of 16-bit tokens that is mapped into memory."""
    tokens = np.memmap(os.environ["TOKENS"], np.uint16, "r")

    def sample(index: int) -> list[int]:
        start = index * job.sequence % (len(tokens) - job.sequence)
        return [int(token) for token in tokens[start : start + job.sequence]]

    return sample


def from_cache(job: Any, split: str) -> Callable[[int], list[int]]:
    """Read each sample from a cache under the cache's lock, as several jobs that fill one cache do."""
    lock = Path(os.environ["CACHE"]) / "cache.lock"

    def sample(index: int) -> list[int]:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return [int(token) for token in np.random.default_rng(index).zipf(1.5, job.sequence) % VOCABULARY]

    return sample


def objective(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; rank 0 writes it to a log in every step, and makes sure that it is on the disk."""
    if os.environ["RANK"] == "0":
        with (Path(os.environ["LOGS"]) / "history.jsonl").open("a") as file:
            file.write(f'{{"loss": {float(log_probs.detach().mean())}}}\n')
            file.flush()
            os.fsync(file.fileno())
    return -(batch.weight * log_probs).sum(), {}


def train() -> None:
    """Resume from the checkpoint if there is one; train, and save it from rank 0 every few steps."""
    import torch

    torch.set_num_threads(1)
    path = Path(os.environ["SAVES"]) / "last.pt"
    model = torch.nn.Linear(256, 256)
    step = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        step = state["step"]
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if os.environ["RANK"] == "0" and step % SAVE_STEPS == 0:
            torch.save({"model": model.state_dict(), "step": step}, path)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def serve(folder: str) -> None:
    """Mount a file system of one file, and answer the kernel's requests without end."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"bucket", folder.encode(), b"fuse.bucket", 0, options.encode()) < 0:
        raise OSError(ctypes.get_errno(), "mount")
    content = os.urandom(FILE_BYTES)
    while True:
        request = os.read(device, 1 << 20)
        _length, code, unique, node, *_ = HEADER.unpack_from(request)
        answer = answer_to(code, node, request[HEADER.size :], content)
        if answer is not None:
            problem, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(device, REPLY.pack(REPLY.size + len(body), problem, unique) + body)


def answer_to(code: int, node: int, arguments: bytes, content: bytes) -> bytes | int | None:
    """The body of an answer, an error number, or None where the kernel expects no answer."""
    if code in (FORGET, BATCH_FORGET, INTERRUPT):
        return None
    if code == INIT:
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 8, 8, 1 << 16, 1, 0, 0, 0)
    if code == LOOKUP:
        is_known = arguments.rstrip(b"\0") == b"samples.bin"
        return ENTRY.pack(FILE, 0, 0, 0, 0, 0) + attributes(FILE) if is_known else errno.ENOENT
    if code == GETATTR:
        return VALID.pack(0, 0, 0) + attributes(node)
    if code in (OPEN, OPENDIR):
        return OPENED.pack(0, DIRECT_IO if code == OPEN else 0, 0)
    if code == READ:
        _handle, offset, size = struct.unpack_from("<QQI", arguments)
        return content[offset : offset + size]
    if code == STATFS:
        return bytes(80)
    return b"" if code in (RELEASE, RELEASEDIR, FLUSH, READDIR) else errno.ENOSYS


def attributes(node: int) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == ROOT else (stat.S_IFREG | 0o644, FILE_BYTES)
    return ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["serve"] else train()
