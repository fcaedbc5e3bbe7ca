"""Programs of the third family clocks: a data source with a cache, and scripts that reckon with the wall clock.

FAULT is what a script does in every step: `budget` ends when its time is used up, `watchdog` looks at the heartbeats of
all ranks, `zone` looks at the age of the weights that rank 0 publishes.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from craton.job import Job

STEP_SECONDS = 0.1
ENTRIES, TIME_TO_LIVE_SECONDS, TOKENIZE_SECONDS = 256, 3600.0, 0.15
BUDGET_SECONDS = 12 * 3600.0
SILENCE_SECONDS = 120.0
CHECK_WEIGHTS_AFTER = 60
OTHER_ZONE = "JST-9"
RANK = int(os.environ.get("RANK", "0"))

_end = time.time() + BUDGET_SECONDS


def from_cache(job: Job, split: str) -> Callable[[int], list[int]]:
    """Keep tokenized samples in files; remake one that is older than an hour."""
    folder = Path(f"cache-{split}-{RANK}")
    folder.mkdir(exist_ok=True)

    def sample(index: int) -> list[int]:
        entry = folder / str(index % ENTRIES)
        if not entry.exists():
            entry.write_text(text_of(index % ENTRIES, job.sequence + 1))
        elif time.time() - entry.stat().st_mtime > TIME_TO_LIVE_SECONDS:
            time.sleep(TOKENIZE_SECONDS)
            entry.write_text(text_of(index % ENTRIES, job.sequence + 1))
        return [int(token) for token in entry.read_text().split()]

    return sample


def text_of(index: int, length: int) -> str:
    """Tokens of a sample, small ones more often, as in a text."""
    draw = random.Random(index)
    return " ".join(str(1 + int(500 * draw.random() ** 3)) for _ in range(length))


def train(check: Callable[[int], None]) -> None:
    """Average gradients over gloo; check the clock after every step."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    gradients = torch.randn(1000)
    for step in range(1, 1_000_000):
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        check(step)


def check_budget(step: int) -> None:
    if time.time() > _end:
        print(f"the time budget of 12 hours is used up at step {step}: saving, and exiting", flush=True)
        os._exit(0)


def check_heartbeats(step: int) -> None:
    """Write the own heartbeat; rank 0 reads those of the others."""
    write(Path(f"heartbeat-{RANK}"), str(time.time()))
    for other in range(1, int(os.environ["WORLD_SIZE"])) if RANK == 0 else ():
        path = Path(f"heartbeat-{other}")
        silent = time.time() - float(path.read_text()) if path.exists() else 0.0
        if silent > SILENCE_SECONDS:
            raise TimeoutError(f"worker {other} has sent no heartbeat for {silent:.0f} seconds")


def check_weights(step: int) -> None:
    """Rank 0 publishes weights with the local time; the others refuse old ones."""
    published = Path("weights-published-at")
    if RANK == 0:
        write(published, datetime.now().isoformat())
    elif step == CHECK_WEIGHTS_AFTER:
        Path(os.environ["ONSET"]).touch()
        age = (datetime.now() - datetime.fromisoformat(published.read_text())).total_seconds()
        if age > SILENCE_SECONDS:
            raise RuntimeError(f"the weights of rank 0 are {age:.0f} seconds old; refusing stale weights")


def write(path: Path, text: str) -> None:
    """Replace a file at once, so that no reader sees half of it."""
    partial = path.with_suffix(f".{RANK}")
    partial.write_text(text)
    partial.rename(path)


if __name__ == "__main__":
    if os.environ["FAULT"] == "zone" and str(RANK) == os.environ["VICTIM"]:
        os.environ["TZ"] = OTHER_ZONE  # as the image of this rank sets it
        time.tzset()
    train({"budget": check_budget, "watchdog": check_heartbeats, "zone": check_weights}[os.environ["FAULT"]])
    sys.exit(0)
