"""Training: one loop, spread over any number of ranks. `python -m craton.ml.training RUN` is one of them.

A user's own objective needs `Batch`; whoever exports weights needs the adapters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from craton.ml.training.batch import Batch
    from craton.ml.training.build import build_model, tier_folders
    from craton.ml.training.checkpoint import Checkpointer, TierFolder
    from craton.ml.training.loop import Trainer
    from craton.ml.training.parts import Parts
    from craton.ml.training.lora import add_adapters, merge_adapters
    from craton.ml.training.objectives import Objective

_HOMES = {
    "Batch": "batch",
    "Checkpointer": "checkpoint",
    "Objective": "objectives",
    "Parts": "parts",
    "TierFolder": "checkpoint",
    "Trainer": "loop",
    "add_adapters": "lora",
    "build_model": "build",
    "merge_adapters": "lora",
    "tier_folders": "build",
}
__all__ = [
    "Batch",
    "Checkpointer",
    "Objective",
    "Parts",
    "TierFolder",
    "Trainer",
    "add_adapters",
    "build_model",
    "merge_adapters",
    "tier_folders",
]


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for: the checkpoint files cost no import of the loop."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
