"""The steps of a run as files of a tier: on a shared file system, on each node's own disk, or in S3.

TIER/step-00000200 holds DCP's shards and `.metadata`, `checksums.json` and, written last, COMPLETE. On a file system a
step is written as `step-N.partial`, synced, and renamed when it is complete; it is removed through a rename to
`step-N.removed`. So whatever ends in .partial or .removed is unfinished and can be deleted. S3 has no rename: there a
step without COMPLETE is unfinished, and COMPLETE is deleted first. Steps are ordered by number, never by a clock.

Others may write to the same file system: no link is followed inside a tier's folder, nor on the path to it from the run
directory that contains it. A tier's folder outside the run directory may itself be a link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from craton.ml.training.checkpoint.about import MAX_STEP
from craton.ml.training.checkpoint.checksums import CHECKSUMS, COMPLETE, MAX_SEAL_BYTES, CheckpointError, Seal

OWNER = "OWNER"  # the run that owns a tier's folder outside the run directory
_STEP = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True)
class TierFolder:
    """A place for checkpoints, and how often it is written; with neither interval, only at a stop or the end. `keep`
    None keeps every checkpoint."""

    name: str
    path: Path | str  # a folder, or an s3:// prefix
    every_seconds: float | None = None
    every_steps: int | None = None
    keep: int | None = None
    node: str | None = None  # this rank's node, if the folder is local to it; None: all ranks see it
    owner: str | None = None  # id of the run that may write there; None: any
    run: Path | None = None  # the run directory, if it contains the folder


class StepFiles(Protocol):
    """The files of one step as this rank sees them."""

    where: str

    def size(self, name: str) -> int | None:
        """Return the file size; None if it is not here."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        """Return bytes; CheckpointError if they cannot be read."""


class StepWriter(Protocol):
    """One step being written to a tier."""

    where: str

    def begin(self, leads: bool) -> None:
        """Create the place; one of the ranks that share it leads."""

    def create(self, name: str) -> Any:
        """Return a context manager with a `write` method; the file is durable on exit."""

    def free_bytes(self) -> int | None:
        """Return the free space; None if it is unlimited or unknown."""

    def finish(self, seal: Seal) -> None:
        """Seal the step; it exists from here on."""

    def abandon(self) -> None:
        """Remove what was written; never raises."""


class Tier(Protocol):
    """All steps of a run in one place."""

    folder: TierFolder

    def prepare(self) -> None:
        """Create the place, and check that it is writable."""

    def steps(self) -> list[int]:
        """Return the steps under their final names, newest first; only its seal shows whether a step is complete."""

    def complete_steps(self) -> list[int]: ...

    def open(self, step: int) -> list[StepFiles]:
        """Return the parts of a step that are visible here: one, or on a node's own disk those of each node."""

    def write(self, step: int) -> StepWriter: ...

    def remove(self, step: int) -> None: ...

    def remove_leftovers(self) -> list[str]:
        """Remove what a killed save or removal left behind; return the names."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return None if it is not a step name as `step_name` writes it."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step <= MAX_STEP and step_name(step) == name else None


def read_seal(files: StepFiles, step: int) -> Seal:
    """Read the seal of a step; CheckpointError if it was never finished, is not ours or belongs to another step."""
    texts = {}
    for name in (COMPLETE, CHECKSUMS):
        if (size := files.size(name)) is not None:
            if size > MAX_SEAL_BYTES[name]:
                raise CheckpointError(f"{name} has {size:,} bytes; at most {MAX_SEAL_BYTES[name]:,} are read")
            texts[name] = bytes(files.read(name, 0, size))
    return Seal.parse(texts, step)


def check_owner(folder: TierFolder, there: str | None) -> bool:
    """Return whether the place has no owner yet; CheckpointError if another run owns it, whose steps would be mixed
    up."""
    if there is not None and there.strip() != folder.owner:
        raise CheckpointError(
            f"{folder.path} holds the checkpoints of another run of this name ({OWNER} says {there.strip()}, this run "
            f"is {folder.owner}); use another run name or tier path, or remove what is there"
        )
    return there is None


def retain(tier: Tier, newest: int) -> None:
    """Keep the `keep` newest COMPLETE steps up to the one just written. Incomplete and later steps, which could not be
    restored, stay for inspection."""
    if tier.folder.keep is not None:
        for step in [step for step in tier.complete_steps() if step <= newest][max(tier.folder.keep, 1) :]:
            tier.remove(step)


def make_room(tier: Tier, newest: int, missing_bytes: int) -> list[str]:
    """Remove leftovers of killed saves, then steps beyond `keep` once `newest` is written; return their names. The last
    step before `newest` stays, because it is the only one until `newest` is complete. No step is removed if all of them
    together would not free the missing bytes."""
    removed = tier.remove_leftovers()
    if tier.folder.keep is None:
        return removed
    spare = [step for step in tier.complete_steps() if step < newest][max(tier.folder.keep - 1, 1) :]
    if sum(_step_bytes(tier, step) for step in spare) < missing_bytes:
        return removed
    for step in spare:
        tier.remove(step)
    return removed + [step_name(step) for step in spare]


def _step_bytes(tier: Tier, step: int) -> int:
    with suppress(CheckpointError):
        return sum(file.bytes for files in tier.open(step)[:1] for file in read_seal(files, step).files.values())
    return 0  # its seal is damaged: its size is unknown


class JoinedFiles:
    """The parts of one step on the disks of several nodes, as far as they are visible here."""

    def __init__(self, parts: Sequence[StepFiles]) -> None:
        self._parts = list(parts)
        self.where = ", ".join(part.where for part in parts)

    def size(self, name: str) -> int | None:
        return next((size for part in self._parts if (size := part.size(name)) is not None), None)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        part = next(part for part in self._parts if part.size(name) is not None)
        return part.read(name, begin, end)
