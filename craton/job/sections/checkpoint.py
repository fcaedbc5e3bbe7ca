"""The `checkpoint:` section: where checkpoints are saved, and how often."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import PlainValidator, model_validator

from craton.job.cluster import Storage
from craton.job.document import KeyConflictError, Location, Seconds, Section, Size, parse_seconds
from craton.job.errors import JobError
from craton.nearest import did_you_mean
from craton.remote import is_url
from craton.telemetry import RunDirectory

RESCUE = "rescue"  # fallback for the last state if no persistent tier accepts it; not a tier of a job


class CheckpointTier(Section):
    """A checkpoint tier; without `every` and `every_steps` it is written only at the end and at a stop."""

    to: str
    every: Seconds | None = None
    every_steps: Size | None = None
    keep: Size | None = None  # number of newest checkpoints to keep; default: all

    @model_validator(mode="after")
    def _place_is_known(self) -> Self:
        if self.to not in ("nvme", "shared", "object") and not self.to.startswith(("s3://", "/")):
            raise KeyConflictError(
                f"checkpoint: {self.to!r} is not a tier; allowed: nvme, shared, object, an s3:// prefix or an "
                f"absolute path{did_you_mean(self.to, ('nvme', 'shared', 'object'))}",
                ("to",),
            )
        if self.to.startswith("s3://") and not self.to.removeprefix("s3://").partition("/")[0]:
            raise KeyConflictError(f"checkpoint: {self.to!r} has no bucket; write s3://bucket/prefix", ("to",))
        if self.every is not None and self.every_steps is not None:
            raise KeyConflictError(
                "checkpoint: every and every_steps are both given; keep one", ("every",), ("every_steps",)
            )
        return self


def _parse_peer(value: object) -> object:
    if value in ("auto", "off"):
        return value
    if isinstance(value, str) and (steps := re.fullmatch(r"([1-9][0-9]*) *steps?", value.strip())):
        return f"{steps[1]} steps"
    try:
        return parse_seconds(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is not allowed; write auto, off, a duration such as 2m, or a number of steps such as 5 steps"
            f"{did_you_mean(str(value), ('auto', 'off'))}"
        ) from None


class Checkpoint(Section):
    """Where and how often state is saved. `peer`: a copy in another node's memory; `auto`: as often as costs under 2%
    of the time, else an interval in seconds, or in steps if written as `5 steps`."""

    peer: Annotated[str | float, PlainValidator(_parse_peer)] = "auto"
    tiers: tuple[CheckpointTier, ...] = ()

    @model_validator(mode="after")
    def _places_differ(self) -> Self:
        places = [tier.to for tier in self.tiers]
        for index, place in enumerate(places):
            if place in places[:index]:
                first: Location = ("tiers", places.index(place), "to")
                second: Location = ("tiers", index, "to")
                raise KeyConflictError(f"checkpoint: tier {place!r} is given twice; keep one", first, second)
        return self

    @property
    def peer_steps(self) -> int | None:
        """Interval of peer copies in steps; None if the job does not give one."""
        return int(self.peer.split()[0]) if isinstance(self.peer, str) and self.peer.endswith("steps") else None

    @property
    def peer_seconds(self) -> float | None:
        """Interval of peer copies in seconds; None if the job does not give one."""
        return None if isinstance(self.peer, str) else float(self.peer)

    @property
    def places(self) -> tuple[CheckpointTier, ...]:
        """The tiers to write to: those of the job, else `shared` at the end and at a stop."""
        return self.tiers or (CheckpointTier(to="shared"),)

    @property
    def end_only_warning(self) -> str:
        """A warning that the job saves no periodic checkpoints; empty if a tier has an interval."""
        if any(tier.every or tier.every_steps for tier in self.tiers):
            return ""
        reason = "no checkpoint tier has an interval" if self.tiers else "the job has no checkpoint tier"
        return f"{reason}: checkpoints are saved only at the end and at a stop"


@dataclass(frozen=True)
class TierPlace:
    """The location of a run's checkpoints in a tier."""

    place: str  # a folder or an s3:// prefix
    is_node_local: bool  # each node has its own folder in it, named after the node
    is_inside_run: bool  # inside the run directory: no other run writes there

    @property
    def is_url(self) -> bool:
        return is_url(self.place)


def rescue_place(run: Path) -> TierPlace:
    """Return the fallback location in the run directory, which all ranks see."""
    return TierPlace(str(run / "checkpoints" / RESCUE), False, True)


def place_of(tier: CheckpointTier, storage: Storage | None, run: Path) -> TierPlace:
    """Return the location of a tier of this run. The cluster file sets the paths of `nvme`, `shared` and `object`;
    without a path the first two are in the run directory."""
    is_local = tier.to == "nvme"
    named = {"nvme": storage.nvme, "shared": storage.shared, "object": storage.object} if storage else {}
    numbers = named.get(tier.to)
    base = (numbers.path if numbers else None) if tier.to in ("nvme", "shared", "object") else tier.to
    if base is not None:
        return TierPlace(f"{base.rstrip('/')}/{RunDirectory(run).name}", is_local, False)
    if tier.to == "object":
        raise JobError(
            "checkpoint tier object has no path: set storage.object.path to an s3:// prefix in the cluster file, or "
            "write the prefix itself, such as to: s3://bucket/checkpoints"
        )
    return TierPlace(str(run / "checkpoints" / tier.to), is_local, True)
