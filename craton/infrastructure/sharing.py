"""Nodes of this machine that share its GPUs: how many share each, and how much memory every rank may use.

Ranks that share a GPU get equal parts of it. A part that cannot hold the CUDA context of a rank and a small model is an
error, before anything starts.
"""

from __future__ import annotations

from craton.formatting import counted, memory
from craton.infrastructure.accelerators import Accelerator
from craton.infrastructure.errors import CatalogError

MEMORY_FRACTION = "CRATON_GPU_MEMORY_FRACTION"  # variable: of a GPU's memory, the part that a rank's tensors may take
# Of a rank, outside torch's allocator: CUDA context and NCCL's buffers; 1.06 GB on H100 (NVIDIA/nccl#1685).
RUNTIME_BYTES = 2.0**30
MIN_TENSOR_BYTES = 2.0**30  # less holds no model whose layout is worth a try


def nodes_per_gpu(cards: list[Accelerator], num_nodes: int) -> int:
    """Return how many nodes share each GPU; 1 if every node has at least one GPU of its own."""
    if not cards:
        raise CatalogError(
            f"local x {num_nodes} with share_gpus needs a GPU, and this machine shows none (nvidia-smi, "
            "CUDA_VISIBLE_DEVICES); remove share_gpus to use the CPU"
        )
    if num_nodes <= len(cards):
        return 1
    if num_nodes % len(cards):
        below = num_nodes // len(cards) * len(cards)
        raise CatalogError(
            f"local x {num_nodes} with share_gpus cannot divide its ranks among {counted(len(cards), 'GPU')} equally; "
            f"use local x {below} or local x {below + len(cards)}"
        )
    result = num_nodes // len(cards)
    check_room(cards, result)
    return result


def memory_fraction(cards: list[Accelerator], ranks_per_gpu: int) -> float:
    """Return the fraction of a GPU's memory that the tensors of each of its ranks may take."""
    check_room(cards, ranks_per_gpu)
    return 1.0 / ranks_per_gpu - RUNTIME_BYTES / min(card.memory_bytes for card in cards)


def check_room(cards: list[Accelerator], ranks_per_gpu: int) -> None:
    """Refuse more ranks on a GPU than its memory allows."""
    total = min(card.memory_bytes for card in cards)
    if total / ranks_per_gpu < RUNTIME_BYTES + MIN_TENSOR_BYTES:
        most = int(total // (RUNTIME_BYTES + MIN_TENSOR_BYTES))
        advice = f"use at most {most} per GPU, here local x {most * len(cards)}" if most > 1 else "remove share_gpus"
        raise CatalogError(
            f"{ranks_per_gpu} ranks cannot share a GPU of {memory(total)}: {memory(total / ranks_per_gpu)} each, where "
            f"CUDA and NCCL alone take {memory(RUNTIME_BYTES)}; {advice}"
        )
