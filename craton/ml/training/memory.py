"""When memory runs out: which phase it was, what was predicted, and what to change."""

from __future__ import annotations

import torch

from craton.errors import CratonError
from craton.formatting import memory
from craton.job.sections import Train
from craton.ml.training.measure import PlannedStep, peak_memory_bytes
from craton.ml.training.parallel import Ranks

GIB = 2**30


class OutOfMemoryError(CratonError):
    """The layout needs more memory than a rank has."""


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an error of its own; the CPU's allocator raises a RuntimeError that only its text tells apart."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def describe_out_of_memory(phase: str, ranks: Ranks, train: Train, prediction: PlannedStep | None) -> OutOfMemoryError:
    """One error that says where it happened and how to make it fit, the cheapest change first."""
    layout = ranks.layout
    changes = []
    if phase in ("forward", "backward", "evaluation"):
        if layout.micro_batch > 1:
            changes.append(f"layout.micro_batch below {layout.micro_batch}")
        if layout.recompute != "full":
            changes.append(f"layout.recompute {'selective or full' if layout.recompute == 'none' else 'full'}")
    changes.append(f"layout.fsdp above {layout.fsdp} (more ranks)")
    if train.weights == "fp32" and layout.precision != "fp32":
        changes.append("train.weights bf16")
    if layout.micro_batch == 1 and phase in ("forward", "backward", "evaluation"):
        changes.append("a shorter data.sequence")
    used = peak_memory_bytes(ranks.device)
    text = f"rank {ranks.rank} ran out of memory in the {phase} phase after using {memory(used)} with {layout}"
    if prediction is not None:
        text += f"; predicted were {memory(prediction.memory_bytes)} of {memory(prediction.memory_limit_bytes)}"
    return OutOfMemoryError(f"{text}. Change one of: {'; '.join(changes)}")
