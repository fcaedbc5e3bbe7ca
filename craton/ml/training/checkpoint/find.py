"""Which steps exist and what one of them holds, for ranks that restore together and for a single reader."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from craton.errors import CratonError
from craton.ml.training.checkpoint.checksums import METADATA, CheckpointError, DifferentModelError, Seal
from craton.ml.training.checkpoint.folder_tier import FolderTier
from craton.ml.training.checkpoint.metadata import parse_metadata
from craton.ml.training.checkpoint.pickle_data import MAX_BYTES
from craton.ml.training.checkpoint.read import CheckedReader, checked_read, damage, shapes_of
from craton.ml.training.checkpoint.tiers import JoinedFiles, StepFiles, Tier, TierFolder, read_seal
from craton.ml.training.checkpoint.writer import ignore_single_process_warning
from craton.remote import is_url

LISTED_NAMES = 8  # names of a different model to list; the rest are counted
GONE = "it is gone"  # removed since the steps were listed


@dataclass(frozen=True)
class FoundStep:
    """A finished step that can be read."""

    step: int
    tier: str
    files: StepFiles
    seal: Seal
    metadata: Metadata

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The names, shapes and dtypes of its tensors."""
        return shapes_of(self.metadata)

    def __str__(self) -> str:
        return self.files.where


def find_checkpoint(tiers: Sequence[TierFolder], step: int | None = None) -> FoundStep:
    """Return the newest step with all files intact, or the given one, for a reader without ranks. Skips bad ones like
    `Checkpointer.restore`."""
    opened = [open_tier(folder) for folder in tiers]
    there, passed_over = steps_in_order(opened)
    result = None
    for entry, index in there:
        if step not in (None, entry):
            continue
        parts, problems = joined_parts(opened[index], entry)
        for files, seal in parts:
            try:
                damaged = damage(files, seal.files)
                if not damaged:
                    result = FoundStep(entry, tiers[index].name, files, seal, read_metadata(files, seal))
                    break
                problems += damaged
            except CheckpointError as error:
                problems.append(str(error))
        if result is not None:
            break
        passed_over.append(f"tier {tiers[index].name}: step {entry} cannot be used: {some(problems or [GONE])}")
    if result is not None:
        for problem in passed_over:
            warnings.warn(f"{problem}; reading step {result.step} of tier {result.tier} instead", stacklevel=2)
        return result
    if passed_over:
        separator = "\n  " if len(passed_over) > 1 else " "
        raise CheckpointError(f"no checkpoint is usable:{separator}{separator.join(passed_over)}; restore a good copy")
    if step is not None and there:
        steps = sorted({item for item, _ in there})
        raise CheckpointError(f"there is no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    raise CheckpointError(f"there is no checkpoint yet in {', '.join(str(tier.path) for tier in tiers)}")


def saved_steps(tiers: Sequence[TierFolder]) -> list[int]:
    """Return the steps of all checkpoints, in order, whether or not they are intact."""
    there, problems = steps_in_order([open_tier(folder) for folder in tiers])
    if problems and not there:
        raise CheckpointError("; ".join(problems))
    return sorted({step for step, _ in there})


def read_tensors(saved: FoundStep, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from a checkpoint without ranks; the checkpoint may hold more than these."""
    shapes = saved.shapes
    if absent := [name for name in tensors if name not in shapes]:
        raise DifferentModelError(f"{saved} does not contain {some(absent)}; it belongs to another model")
    wrong = [
        f"{name} is {list(tensor.shape)} here and {list(shapes[name][0])} there"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) != shapes[name][0]
    ]
    if wrong:
        raise DifferentModelError(f"{saved} belongs to another model: {some(wrong)}")
    ignore_single_process_warning()
    reader = CheckedReader(saved.files, saved.metadata, saved.seal.files)
    try:
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as failure:
        raise CheckpointError(f"{saved} cannot be read: {next(iter(failure.failures.values()))[0]}") from None


def open_tier(folder: TierFolder) -> Tier:
    """Return the tier for a path: a folder or S3."""
    if is_url(folder.path):
        from craton.ml.training.checkpoint.objects import ObjectTier

        return ObjectTier(folder)
    return FolderTier(folder)


def steps_in_order(tiers: Sequence[Tier]) -> tuple[list[tuple[int, int]], list[str]]:
    """Return (step, index of the tier), newest first, for equal steps the first (fastest) tier first; and the errors of
    unreadable tiers."""
    steps, problems = [], []
    for index, tier in enumerate(tiers):
        try:
            steps += [(-step, index) for step in tier.steps()]
        except (OSError, CratonError) as error:
            problems.append(f"tier {tier.folder.name} cannot be read: {error}")
    return [(-negative, index) for negative, index in sorted(steps)], problems


def joined_parts(tier: Tier, step: int) -> tuple[list[tuple[StepFiles, Seal]], list[str]]:
    """Return what is visible here of a step: parts of the same save joined, with their seal; and the problems of the
    rest."""
    by_save: dict[str, tuple[list[StepFiles], Seal]] = {}
    problems = []
    try:
        for part in tier.open(step):
            try:
                seal = read_seal(part, step)
                by_save.setdefault(seal.save, ([], seal))[0].append(part)
            except CheckpointError as error:
                problems.append(str(error))
    except (OSError, CratonError) as error:
        problems.append(str(error))
    return [(parts[0] if len(parts) == 1 else JoinedFiles(parts), seal) for parts, seal in by_save.values()], problems


def read_metadata(files: StepFiles, seal: Seal) -> Metadata:
    """Read the metadata; CheckpointError if it is missing or changed."""
    return parse_metadata(metadata_bytes(files, seal), seal.files)


def metadata_bytes(files: StepFiles, seal: Seal) -> bytes:
    if METADATA not in seal.files:
        raise CheckpointError(f"{METADATA} is not in checksums.json")
    if (size := seal.files[METADATA].bytes) > MAX_BYTES:
        raise CheckpointError(f"{METADATA} has {size:,} bytes; at most {MAX_BYTES:,} are read")
    return bytes(checked_read(files, METADATA, seal.files[METADATA]))


def different(saved: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return how these tensors differ from the saved ones, as far as one rank can see."""
    wrong = [
        f"{name} is {list(tensor.shape)} here and {list(saved[name])} in the checkpoint"
        for name, tensor in tensors.items()
        if name in saved and tuple(tensor.shape) != saved[name]
    ]
    return wrong + [f"{name} is not in the checkpoint" for name in tensors if name not in saved]


def some(lines: Sequence[str]) -> str:
    more = len(lines) - LISTED_NAMES
    return "; ".join(lines[:LISTED_NAMES]) + (f"; and {more} more" if more > 0 else "")
