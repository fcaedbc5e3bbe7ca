"""The NVIDIA GPUs of this machine that a process started here would see, by their catalog names.

`nvidia-smi` lists them, so neither torch nor a driver library is needed. CUDA_VISIBLE_DEVICES has the same meaning as
for CUDA; empty means no GPUs. A GPU that is not in the catalog is an error, never a guess.
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
ANSWER_SECONDS = 20.0  # a driver without persistence mode takes seconds to start
SAME_MEMORY = 0.05  # allowed deviation from the catalog's memory: less is a MIG slice, more is a different GPU
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
    """Return the GPUs that a process started now would see; none without a driver, or when they are hidden."""
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
    """Return the catalog entry of these GPUs; all must be identical."""
    names = sorted({card.name for card in cards})
    if len(names) > 1:
        raise CatalogError(
            f"this machine has different GPUs ({', '.join(names)}), but a job needs identical ones; select them with "
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
            f"this machine's GPU is not in the catalog ({names[0]}, {memory(memory_bytes)}); write a cluster "
            "file with its numbers under `hardware:` (docs/job-file.md) and name that file under `cluster:`, or set "
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
    # Without a driver or a GPU the tool fails: its presence alone does not mean that there are GPUs.
    return answer.stdout if answer.returncode == 0 else ""


def _accelerator(line: str) -> Accelerator:
    parts = [part.strip() for part in line.split(",")]
    try:
        index, uuid, name, memory = parts
        return Accelerator(index, uuid, name, float(memory) * MEBIBYTE)
    except ValueError:
        raise CatalogError(
            f"nvidia-smi printed {line!r}, which is not `index, uuid, name, MiB`; set CUDA_VISIBLE_DEVICES= to use "
            "the CPU"
        ) from None
