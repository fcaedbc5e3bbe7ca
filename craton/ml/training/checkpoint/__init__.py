"""Checkpoints: staged in CPU memory, written to tiers, restored and resharded to any world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.training.checkpoint.checkpointer import Checkpointer
    from craton.ml.training.checkpoint.checksums import CheckpointError
    from craton.ml.training.checkpoint.find import FoundStep, find_checkpoint, read_tensors, saved_steps
    from craton.ml.training.checkpoint.restore import read_together
    from craton.ml.training.checkpoint.tiers import OWNER, TierFolder
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
