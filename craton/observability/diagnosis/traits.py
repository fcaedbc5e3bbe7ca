"""Traits of a run, by which remedies are chosen: its hardware, its scheduler, its kind and where its data come from."""

from __future__ import annotations

from collections.abc import Collection

from craton.observability.diagnosis.phases import is_on_processors
from craton.observability.diagnosis.snapshot import Snapshot

HARDWARE = ("cpu", "gpu")
SCHEDULERS = ("local", "slurm", "kubernetes")
TRAINING_KINDS = ("pretrain", "sft", "dpo", "grpo")
KINDS = (*TRAINING_KINDS, "serve", "command")
DATA = ("function", "files")
STOPS = "stops"  # at the first step that is not finite (`train.on_nan`)
ADAPTERS = "adapters"  # are trained, not the whole model (`train.lora`)
TRAITS = (*HARDWARE, *SCHEDULERS, *KINDS, "training", *DATA, STOPS, ADAPTERS)


def traits_of(snapshot: Snapshot) -> frozenset[str]:
    run, training = snapshot.run, snapshot.training
    traits = {"cpu" if is_on_processors(snapshot) else "gpu", run.on, run.kind}
    if run.kind in TRAINING_KINDS:
        traits.add("training")
    if training is not None and training.source:
        traits.add("function")
    elif training is not None and training.has_files:
        traits.add("files")
    if training is not None and training.policy == "stop":
        traits.add(STOPS)
    if training is not None and training.has_adapters:
        traits.add(ADAPTERS)
    return frozenset(traits)


def holds(wanted: Collection[str], traits: Collection[str]) -> bool:
    """Return whether all these traits are there; `slurm|kubernetes` stands for either."""
    return all(any(trait in traits for trait in one.split("|")) for one in wanted)
