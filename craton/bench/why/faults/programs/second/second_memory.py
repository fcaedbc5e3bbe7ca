"""Programs of the second set that run out of memory or of another limit: a data source, an objective and a script.

FAULT names the fault, VICTIM the rank that has it. It begins when the file $GO exists, or by itself; then the file
$ONSET is created.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
RANK = os.environ.get("RANK", "0")
VOCABULARY, MEGABYTE = 512, 1 << 20
MAP_AFTER_SAMPLES = 320  # 40 steps of 8 sequences
MAPS_PER_SAMPLE = 5000
READS_PER_SAMPLE = 3000
STEP_SECONDS = 0.1
kept: list[Any] = []


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index; the victim does with each sample what FAULT says."""

    def sample(index: int) -> list[int]:
        start, step = np.random.default_rng(index).integers(1, VOCABULARY // 4, 2)
        if FAULT == "cache":
            read_pages(index)
        elif RANK == VICTIM:
            BROKEN[FAULT](index)
        return [int(token) for token in (start + step * np.arange(job.sequence)) % VOCABULARY]

    return sample


def has_begun() -> bool:
    return Path(os.environ["GO"]).exists()


def keep_in_shared_memory(index: int) -> None:
    """Append 16 MB to a file in /dev/shm that no name refers to, as a queue between processes does."""
    if not has_begun():
        return
    if not kept:
        kept.append(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR))
    os.write(kept[0], bytes(16 * MEGABYTE))


def keep_in_memory(index: int) -> None:
    if has_begun():
        kept.append(np.ones(16 * MEGABYTE, np.uint8))


def map_memory(index: int) -> None:
    """Keep thousands of small mappings, as a data set of many memory-mapped files does."""
    if index >= MAP_AFTER_SAMPLES:
        ONSET.touch()
        kept.extend(mmap.mmap(-1, mmap.PAGESIZE) for _ in range(MAPS_PER_SAMPLE))


BROKEN: dict[str, Callable[[int], None]] = {
    "shared-memory": keep_in_shared_memory,
    "waits": keep_in_memory,
    "maps": map_memory,
}


def read_pages(index: int) -> None:
    """Read random pages of this rank's data file; from the page cache, if there is memory for it."""
    if not kept:
        kept.append(os.open(Path(os.environ["PAGES"]) / f"rank-{RANK}.bin", os.O_RDONLY))
        os.posix_fadvise(kept[0], 0, 0, os.POSIX_FADV_RANDOM)
    pages = os.fstat(kept[0]).st_size // mmap.PAGESIZE
    for page in np.random.default_rng(index).integers(0, pages, READS_PER_SAMPLE):
        os.pread(kept[0], mmap.PAGESIZE, int(page) * mmap.PAGESIZE)


def objective(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; a new log file in every step, which the victim never closes."""
    file: IO[str] = (Path(os.environ["LOGS"]) / f"rank-{RANK}.log").open("a")
    file.write(f"{float(log_probs.detach().mean())}\n")
    if RANK == VICTIM:
        kept.append(file)
    else:
        file.close()
    return -(batch.weight * log_probs).sum(), {}


class Caching:
    """A data set whose worker keeps every sample that it has made, once $GO exists."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        import torch

        if RANK == VICTIM and has_begun():
            kept.append(np.ones(2 * MEGABYTE, np.uint8))
        return torch.randn(256)


def train() -> None:
    """Train data parallel with gloo; each rank has a worker process that makes its samples."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = torch.utils.data.DataLoader(Caching(), batch_size=16, num_workers=1)  # type: ignore[arg-type]
    for step, batch in enumerate(loader, start=1):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    train()
