"""Ranks on nodes whose keepers a test has started, and what they save to and restore from the nodes' memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nodes import Nodes
from states import parallel_state, rank_and_world, state, whole
from torch import Tensor

from craton.ml.training.checkpoint import Checkpointer, TierFolder


def make_state(seed: int, layout: str) -> dict[str, Tensor]:
    """As a rank of this layout holds it."""
    if layout in ("fsdp", "plain"):
        return state(seed, layout == "fsdp")
    return parallel_state(seed, layout)


def tiers_in(folder: Path | None) -> list[TierFolder]:
    return [TierFolder("shared", folder)] if folder else []


@dataclass
class Saved:
    """What ranks leave behind."""

    states: dict[int, dict[str, Tensor]]  # step → the whole state
    notes: list[tuple[str, dict[str, Any]]]


def save_steps(
    nodes: Nodes, steps: list[int], layout: str = "fsdp", folder: Path | None = None, on_disk: tuple[int, ...] = ()
) -> Saved:
    """Takes a snapshot of every step, as a training would."""
    tensors = make_state(0, layout)
    checkpointer = Checkpointer(tiers_in(folder), *rank_and_world(), nodes.setup())
    checkpointer.reserve(tensors, steps[0] - 1)
    states = {}
    for step in steps:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.add_(step)
        states[step] = whole(tensors) if layout != "pp" else {}
        if step in on_disk:
            checkpointer.save(step, tensors, {"samples": step * 8}, wait=True)
        assert checkpointer.due(step)
        checkpointer.save(step, tensors, {"samples": step * 8})
    checkpointer.close()
    return Saved(states, [(note.event, note.fields) for note in checkpointer.notes()])


@dataclass
class Restored:
    """What ranks find."""

    counters: dict[str, Any] | None
    tier: str
    passed_over: tuple[str, ...]
    state: dict[str, Tensor]
    warnings: list[str]


def restore(
    nodes: Nodes | None, layout: str = "fsdp", folder: Path | None = None, before: int | None = None
) -> Restored:
    tensors = make_state(12345, layout)
    checkpointer = Checkpointer(tiers_in(folder), *rank_and_world(), nodes.setup() if nodes else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counters = checkpointer.restore(tensors, before)
    checkpointer.close()
    report = checkpointer.restored
    told = [str(warning.message) for warning in caught]
    found = whole(tensors) if layout != "pp" else {}
    return Restored(counters, report.tier if report else "", report.passed_over if report else (), found, told)
