"""Collective restore: ranks agree on which steps exist, open one of them, and fill their tensors.

All ranks call all functions with the same arguments (except their own tensors) and get the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from craton.errors import CratonError
from craton.ml.training.checkpoint.checksums import CheckpointError, DifferentModelError, Seal
from craton.ml.training.checkpoint.find import (
    GONE,
    FoundStep,
    different,
    joined_parts,
    metadata_bytes,
    open_tier,
    some,
    steps_in_order,
)
from craton.ml.training.checkpoint.metadata import parse_metadata
from craton.ml.training.checkpoint.read import CheckedReader
from craton.ml.training.checkpoint.staging import SavingRanks
from craton.ml.training.checkpoint.tiers import JoinedFiles, StepFiles, Tier, TierFolder
from craton.ml.training.checkpoint.writer import ignore_single_process_warning


def find_together(ranks: SavingRanks, rank: int, tiers: Sequence[Tier]) -> tuple[list[tuple[int, int]], list[str]]:
    """Return (step, index of the tier) of everything that any node holds, newest first, then the fastest tier; and the
    errors of unreadable tiers. Rank 0 lists shared tiers, every rank its node's own disk."""
    readable = [index for index, tier in enumerate(tiers) if rank == 0 or tier.folder.node is not None]
    steps, problems = steps_in_order([tiers[index] for index in readable])
    answers = ranks.gather(([(-step, readable[index]) for step, index in steps], problems))
    everything = sorted({entry for entries, _ in answers for entry in entries})
    messages = list(dict.fromkeys(line for _, lines in answers for line in lines))
    return [(-negative, index) for negative, index in everything], messages


def open_together(ranks: SavingRanks, rank: int, tier: Tier, step: int) -> tuple[FoundStep | None, list[str]]:
    """Return the step if its seal is good and every file is on some node; otherwise what is wrong with it."""
    is_local = tier.folder.node is not None
    parts, problems = joined_parts(tier, step) if rank == 0 or is_local else ([], [])
    mine = {seal.save: (files, seal) for files, seal in parts}
    answers = ranks.gather((list(mine), problems))
    problems = list(dict.fromkeys(line for _, lines in answers for line in lines))
    for save in dict.fromkeys(save for saves, _ in answers for save in saves):
        source = next(index for index, (saves, _) in enumerate(answers) if save in saves)
        seal, metadata, problem = ranks.of_rank(source, _contents(*mine[save]) if rank == source else None)
        files = mine[save][0] if save in mine else _seen(tier, step)
        if problem is None and is_local:
            here = {name for name, file in seal.files.items() if files.size(name) == file.bytes}
            missing = set(seal.files).difference(*ranks.gather(here))
            problem = some([f"{name} is not on any node" for name in sorted(missing)]) or None
        if problem is None:
            try:
                return FoundStep(step, tier.folder.name, files, seal, parse_metadata(metadata, seal.files)), []
            except CheckpointError as error:  # the same on all ranks: they have the same bytes
                problem = str(error)
        problems.append(problem)
    return None, problems or [GONE]


def read_together(
    folders: Sequence[TierFolder], tensors: Mapping[str, Tensor], rank: int, world: int, wanted: int
) -> FoundStep:
    """Fill the tensors of all ranks, resharded to their layout, from a step of another run, which may hold more than
    these. CheckpointError if no tier has it whole: an older step would be another model."""
    ranks = SavingRanks(world)
    tiers = [open_tier(folder) for folder in folders]
    steps, passed_over = find_together(ranks, rank, tiers)
    for step, index in steps:
        if step != wanted:
            continue
        saved, problems = open_together(ranks, rank, tiers[index], step)
        if saved is not None:
            shapes = {name: shape for name, (shape, _) in saved.shapes.items()}
            wrong = list(dict.fromkeys(line for lines in ranks.gather(different(shapes, tensors)) for line in lines))
            if wrong:
                raise DifferentModelError(f"{saved} belongs to another model: {some(wrong)}")
            problems = load_together(ranks, tiers[index], saved, tensors)
            if not problems:
                return saved
        passed_over.append(f"tier {tiers[index].folder.name}: step {step} cannot be used: {some(problems)}")
    places = ", ".join(str(folder.path) for folder in folders)
    raise CheckpointError("; ".join(passed_over) or f"there is no checkpoint of step {wanted} in {places}")


def check_names(ranks: SavingRanks, saved: FoundStep, tensors: Mapping[str, Tensor]) -> None:
    """DifferentModelError unless the names and shapes of all ranks together match the checkpoint. With pipeline
    parallelism no single rank has them all."""
    shapes = {name: shape for name, (shape, _) in saved.shapes.items()}
    answers = ranks.gather((different(shapes, tensors), set(shapes) - set(tensors)))
    everywhere = list(dict.fromkeys(line for lines, _ in answers for line in lines))
    unasked = set.intersection(*(names for _, names in answers))
    everywhere += [f"{name} is only in the checkpoint" for name in sorted(unasked)]
    if everywhere:
        raise DifferentModelError(
            f"{saved} belongs to another model or optimizer: {some(everywhere)}; "
            f"resume with the job that saved it, or start a run with another name"
        )


def load_together(ranks: SavingRanks, tier: Tier, saved: FoundStep, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill the tensors, resharded to their current layout; return the errors, if any."""
    lenders = ranks if tier.folder.node is not None else None
    return load_with(ranks, CheckedReader(saved.files, saved.metadata, saved.seal.files, lenders), tensors)


def load_with(ranks: SavingRanks, reader: CheckedReader, tensors: Mapping[str, Tensor]) -> list[str]:
    """Run DCP's load with this reader on all ranks; return the errors of any rank."""
    ignore_single_process_warning()
    try:
        dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as failure:
        messages = {
            str(error) if isinstance(error, CheckpointError) else f"rank {rank}: {type(error).__name__}: {error}"
            for rank, (error, _) in failure.failures.items()
        }
        return sorted(messages)
    return []


def _seen(tier: Tier, step: int) -> StepFiles:
    """Return what this rank sees of a step that another one opened; missing files are detected on reading, on all
    ranks."""
    with suppress(OSError, CratonError):
        if tier.folder.node is None:
            return JoinedFiles(tier.open(step))
    return JoinedFiles([])


def _contents(files: StepFiles, seal: Seal) -> tuple[Seal | None, bytes, str | None]:
    try:
        return seal, metadata_bytes(files, seal), None
    except CheckpointError as error:
        return None, b"", str(error)
