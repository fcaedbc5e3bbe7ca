"""The steps of a run as files of a tier: on a file system that all ranks see, on each node's own disk, or in S3.

TIER/step-00000200 holds DCP's shards and `.metadata`, `checksums.json` and, written last, COMPLETE. On a file system a
step is written as `step-N.partial`, synced, and renamed when it is whole; it leaves by a rename to `step-N.removed`. So
whatever ends in .partial or .removed was cut off and can go. S3 has no rename: there a step without COMPLETE was cut
off, and COMPLETE is the first thing to go. Steps are ordered by their number, never by a clock.

Others may write to the same file system: no link is followed inside a tier's folder, nor on the way to it from the run
directory where it lies in there. A tier's folder elsewhere may be a link itself.
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

OWNER = "OWNER"  # the run that a tier's folder belongs to, where it lies outside the run directory
_STEP = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True)
class TierFolder:
    """A place for checkpoints, and how often it is written; with neither interval, only when there is a reason to save
    (a stop, the end). `keep` None keeps every checkpoint."""

    name: str
    path: Path | str  # a folder, or an s3:// prefix
    every_seconds: float | None = None
    every_steps: int | None = None
    keep: int | None = None
    node: str | None = None  # this rank's node, where the folder is that node's own; None: all ranks see it
    owner: str | None = None  # who may write there; None: anyone
    run: Path | None = None  # the run directory, where the folder lies in it


class StepFiles(Protocol):
    """The files of one step as this rank sees them."""

    where: str

    def size(self, name: str) -> int | None:
        """None: it is not here."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        """Bytes; CheckpointError when they cannot be had."""


class StepWriter(Protocol):
    """One step on its way to a tier."""

    where: str

    def begin(self, leads: bool) -> None:
        """Makes the place; one of the ranks that share it leads."""

    def create(self, name: str) -> Any:
        """A context manager that gives something with `write`; the file is durable when it is left."""

    def free_bytes(self) -> int | None:
        """None: there is no limit that could be known."""

    def finish(self, seal: Seal) -> None:
        """From here on the step exists."""

    def abandon(self) -> None:
        """Removes what was written; never raises."""


class Tier(Protocol):
    """All steps of a run in one place."""

    folder: TierFolder

    def prepare(self) -> None:
        """Makes the place, and finds out whether it can be written."""

    def steps(self) -> list[int]:
        """The steps that are under their final names, newest first; whether each is whole is for its seal to say."""

    def complete_steps(self) -> list[int]: ...

    def open(self, step: int) -> list[StepFiles]:
        """The parts of a step that can be seen here: one, or on a node's own disk those of each node."""

    def write(self, step: int) -> StepWriter: ...

    def remove(self, step: int) -> None: ...

    def remove_leftovers(self) -> list[str]:
        """Removes what a killed save or removal left behind, and names it."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """None where it is not the name of a step, as `step_name` writes it."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step <= MAX_STEP and step_name(step) == name else None


def read_seal(files: StepFiles, step: int) -> Seal:
    """What the step says of itself; CheckpointError when it was never finished, is not ours or is another step."""
    texts = {}
    for name in (COMPLETE, CHECKSUMS):
        if (size := files.size(name)) is not None:
            if size > MAX_SEAL_BYTES[name]:
                raise CheckpointError(f"{name} has {size:,} bytes; at most {MAX_SEAL_BYTES[name]:,} are read")
            texts[name] = bytes(files.read(name, 0, size))
    return Seal.parse(texts, step)


def check_owner(folder: TierFolder, there: str | None) -> bool:
    """Whether nobody owns the place yet; CheckpointError when another run does, whose steps would be lost or taken."""
    if there is not None and there.strip() != folder.owner:
        raise CheckpointError(
            f"{folder.path} holds the checkpoints of another run of this name ({OWNER} says {there.strip()}, this run "
            f"is {folder.owner}); give this run another name, the tier another place, or remove what is there"
        )
    return there is None


def retain(tier: Tier, newest: int) -> None:
    """Leaves the `keep` newest COMPLETE steps up to the one just written, and for someone to look at: incomplete steps,
    and later ones, which could not be restored."""
    if tier.folder.keep is not None:
        for step in [step for step in tier.complete_steps() if step <= newest][max(tier.folder.keep, 1) :]:
            tier.remove(step)


def make_room(tier: Tier, newest: int, missing_bytes: int) -> list[str]:
    """Removes what killed saves left, then the steps that `keep` does not ask for once `newest` is written; their
    names. The last step before `newest` stays, for it is all there is until `newest` is whole. No step is removed where
    all of them together would not make up for the missing bytes."""
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
    return 0  # its seal is damaged: what it would free is not known


class JoinedFiles:
    """The parts of one step on the disks of several nodes, as far as they are seen here."""

    def __init__(self, parts: Sequence[StepFiles]) -> None:
        self._parts = list(parts)
        self.where = ", ".join(part.where for part in parts)

    def size(self, name: str) -> int | None:
        return next((size for part in self._parts if (size := part.size(name)) is not None), None)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        part = next(part for part in self._parts if part.size(name) is not None)
        return part.read(name, begin, end)
