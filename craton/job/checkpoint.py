"""The `checkpoint:` section: where state goes, and how often."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import PlainValidator, model_validator

from craton.job.document import Location
from craton.job.section import ConflictError, Section
from craton.job.units import Seconds, Size, parse_seconds


class CheckpointTier(Section):
    """One place checkpoints go to; without `every` and `every_steps` only at the end and at a stop."""

    to: str
    every: Seconds | None = None
    every_steps: Size | None = None
    keep: Size | None = None  # newest ones kept; default: all

    @model_validator(mode="after")
    def _place_is_known(self) -> Self:
        if self.to not in ("nvme", "shared", "object") and not self.to.startswith(("s3://", "/")):
            raise ConflictError(
                f"checkpoint: {self.to!r} is not a tier; allowed: nvme, shared, object, an s3:// prefix or an "
                "absolute path",
                ("to",),
            )
        if self.every is not None and self.every_steps is not None:
            raise ConflictError(
                "checkpoint: every and every_steps are both given; keep one", ("every",), ("every_steps",)
            )
        return self


def _parse_peer(value: object) -> object:
    if value in ("auto", "off"):
        return value
    try:
        return parse_seconds(value)
    except ValueError:
        raise ValueError(f"{value!r} is not allowed; write auto, off, or a duration such as 2m") from None


class Checkpoint(Section):
    """How state survives. `peer`: a copy in another node's memory, `auto` as often as costs under 2 %."""

    peer: Annotated[Literal["auto", "off"] | float, PlainValidator(_parse_peer)] = "auto"
    tiers: tuple[CheckpointTier, ...] = ()

    @model_validator(mode="after")
    def _places_differ(self) -> Self:
        places = [tier.to for tier in self.tiers]
        for index, place in enumerate(places):
            if place in places[:index]:
                first: Location = ("tiers", places.index(place), "to")
                second: Location = ("tiers", index, "to")
                raise ConflictError(f"checkpoint: tier {place!r} is given twice; keep one", first, second)
        return self

    @property
    def places(self) -> tuple[CheckpointTier, ...]:
        """The tiers written to: those of the job, else `shared` at the end and at a stop."""
        return self.tiers or (CheckpointTier(to="shared"),)
