"""The `sweep:` section: the same job several times, with other values of some keys.

A mapping of dotted keys to lists of values is a grid; `list:` names the combinations one by one. The section checks its
form and the number of members; `craton.job.loader` checks keys and values as it checks those of any job file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import Field, model_serializer, model_validator

from craton.job.document import KeyConflictError, Location, Section, Size, shown_value

MAX_SWEEP_MEMBERS = 1000
MEMBER_NAME = "name"  # in an entry of `list:`: the name of the member
_HOW = "write a mapping such as {train.learning_rate: [1e-3, 3e-3]}, or {list: [{train.learning_rate: 1e-3}]}"


@dataclass(frozen=True)
class SweepEntry:
    """One combination of values, as written."""

    name: str | None  # None: made from the values
    values: dict[str, Any]
    places: dict[str, Location]  # where each value stands in the section

    def with_name(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return an entry of `list:` with this name and other values."""
        return values if self.name is None else {MEMBER_NAME: self.name, **values}


class SweepSection(Section):
    """The values of each member: the product of `grid`, or each of `entries` by itself."""

    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    entries: tuple[dict[str, Any], ...] = ()
    parallel: Size | None = None  # members that run at the same time; None: one, which takes all of the job's cluster

    @model_validator(mode="before")
    @classmethod
    def _form(cls, value: Any) -> Any:
        if isinstance(value, SweepSection):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{shown_value(value)} is not a sweep; {_HOW}")
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"key {shown_value(key)} is not a text; {_HOW}")
        parallel = {"parallel": value["parallel"]} if value.get("parallel") is not None else {}
        rest = {key: values for key, values in value.items() if key != "parallel"}
        if not rest:
            raise ValueError(f"has no keys; {_HOW}")
        if "list" in rest:
            others = [key for key in rest if key != "list"]
            if others:
                raise KeyConflictError(
                    f"sweep: {shown_value(others[0])} stands beside list; write it into the entries of list, or "
                    "write a grid without list",
                    (others[0],),
                )
            return {"entries": _checked_entries(rest["list"]), **parallel}
        return {"grid": _checked_grid(rest), **parallel}

    @model_serializer
    def _written(self) -> dict[str, Any]:
        """Return the section as a user writes it."""
        parallel = {} if self.parallel is None else {"parallel": self.parallel}
        if self.entries:
            return {"list": [dict(entry) for entry in self.entries], **parallel}
        return {**{key: list(values) for key, values in self.grid.items()}, **parallel}

    @property
    def keys(self) -> list[str]:
        """The keys that differ between members, in the order of the file."""
        return list(self.grid or dict.fromkeys(key for entry in self.combinations() for key in entry.values))

    @property
    def num_members(self) -> int:
        return len(self.entries) or math.prod(map(len, self.grid.values()))

    def combinations(self) -> Iterator[SweepEntry]:
        """Yield the values of each member; the last key of a grid changes fastest."""
        for number, entry in enumerate(self.entries):
            values = {key: value for key, value in entry.items() if key != MEMBER_NAME}
            yield SweepEntry(entry.get(MEMBER_NAME), values, {key: ("list", number, key) for key in values})
        for chosen in product(*(range(len(values)) for values in self.grid.values())) if self.grid else ():
            places = dict(zip(self.grid, chosen, strict=True))
            values = {key: self.grid[key][place] for key, place in places.items()}
            yield SweepEntry(None, values, {key: (key, place) for key, place in places.items()})


def _checked_grid(grid: Mapping[str, Any]) -> dict[str, Any]:
    for key, values in grid.items():
        if not isinstance(values, list | tuple):
            raise KeyConflictError(
                f"sweep: {shown_value(key)}: {shown_value(values)} is not a list of values; write e.g. "
                f"{key[:60]}: [A, B]",
                (key,),
            )
        if not values:
            raise KeyConflictError(f"sweep: {shown_value(key)}: the list is empty; give at least one value", (key,))
    _check_number(math.prod(len(values) for values in grid.values()), next(iter(grid)))
    return dict(grid)


def _checked_entries(entries: object) -> object:
    if not isinstance(entries, list | tuple):
        raise KeyConflictError(
            f"sweep.list: {shown_value(entries)} is not a list; write e.g. list: [{{train.learning_rate: 1e-3}}]",
            ("list",),
        )
    if not entries:
        raise KeyConflictError("sweep.list: the list is empty; give at least one entry", ("list",))
    _check_number(len(entries), "list")
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            raise KeyConflictError(
                f"sweep.list[{number}]: {shown_value(entry)} is not a mapping of keys to values", ("list", number)
            )
        if not set(entry) - {MEMBER_NAME}:
            raise KeyConflictError(f"sweep.list[{number}]: has no keys; give at least one", ("list", number))
    return entries


def _check_number(number: int, key: str) -> None:
    if number > MAX_SWEEP_MEMBERS:
        many = f"{number:,}" if number < 10**15 else "more than 10^15"
        raise KeyConflictError(
            f"sweep: has {many} combinations; at most {MAX_SWEEP_MEMBERS:,} are allowed; remove values or keys", (key,)
        )
