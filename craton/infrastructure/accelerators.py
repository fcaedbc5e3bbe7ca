"""The NVIDIA GPUs of this machine that a process started here would see, by their names in the catalog.

They are asked for by `nvidia-smi`, so neither torch nor a driver library is needed; CUDA_VISIBLE_DEVICES is respected
as CUDA respects it, and empty it means that there are none. A GPU the catalog does not know is an error, no guess.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from craton.formatting import memory, setting
from craton.infrastructure.catalog import gpu
from craton.infrastructure.errors import CatalogError
from craton.infrastructure.hardware import Gpu

QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
ANSWER_SECONDS = 20.0  # a driver without persistence mode wakes up for seconds
SAME_MEMORY = 0.05  # how far a card's memory may be from the catalog's: less is a slice of it, more another card
MEBIBYTE = 2.0**20


@dataclass(frozen=True)
class Accelerator:
    """One line of nvidia-smi."""

    index: str
    uuid: str
    name: str  # "NVIDIA H200"
    memory_bytes: float


def visible_accelerators(
    environment: Mapping[str, str] = os.environ, ask: Callable[[], str] | None = None
) -> list[Accelerator]:
    """The GPUs a program started now would see; none without a driver, or when they are hidden."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    result = [_accelerator(line) for line in (ask or _ask)().splitlines() if line.strip()]
    if visible is None:
        return result
    chosen = []
    for wanted in (name.strip() for name in visible.split(",")):
        match = next(
            (card for card in result if card.index == wanted or (wanted and card.uuid.startswith(wanted))), None
        )
        if match is None:
            break  # CUDA stops at the first name it does not know
        chosen.append(match)
    return chosen


def catalog_gpu(cards: list[Accelerator]) -> Gpu:
    """What these cards are in the catalog; all must be alike."""
    names = sorted({card.name for card in cards})
    if len(names) > 1:
        raise CatalogError(
            f"this machine has different GPUs ({', '.join(names)}), and a job needs equal ones; choose some with "
            "CUDA_VISIBLE_DEVICES"
        )
    name = names[0].removeprefix("NVIDIA ").removeprefix("Tesla ")
    memory_bytes = min(card.memory_bytes for card in cards)
    try:
        listed = gpu(name)
    except CatalogError:
        listed = None
    if listed is None or abs(memory_bytes / listed.memory_bytes - 1.0) > SAME_MEMORY:
        raise CatalogError(
            f"the catalog does not know this machine's GPU ({names[0]}, {memory(memory_bytes)}); write a "
            "cluster file with its numbers under `hardware:` (docs/job-file.md) and name that under `cluster:`, or set "
            "CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return listed


def _ask() -> str:
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    except subprocess.TimeoutExpired:
        raise CatalogError(
            f"nvidia-smi did not answer within {setting(ANSWER_SECONDS)}; fix the driver, or set "
            "CUDA_VISIBLE_DEVICES= to use the CPU"
        ) from None
    # Without a driver or a card it says so and fails: the tool alone makes no GPU machine.
    return answer.stdout if answer.returncode == 0 else ""


def _accelerator(line: str) -> Accelerator:
    parts = [part.strip() for part in line.split(",")]
    try:
        index, uuid, name, memory = parts
        return Accelerator(index, uuid, name, float(memory) * MEBIBYTE)
    except ValueError:
        raise CatalogError(
            f"nvidia-smi answered {line!r}, which is not `index, uuid, name, MiB`; set CUDA_VISIBLE_DEVICES= to use "
            "the CPU"
        ) from None
