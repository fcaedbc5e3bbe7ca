"""The twelve families and their five sets of faults. Each set was written after the rules for the sets before it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Literal

from craton.bench.why.faults.fault import LiveFault
from craton.errors import CratonError

FaultSet = Literal["first", "second", "third", "fourth", "fifth"]

FAMILIES = (
    "data_source",
    "user_code",
    "numerics",
    "memory",
    "disk",
    "cpu",
    "network",
    "processes",
    "clocks",
    "configuration",
    "server",
    "scheduler",
)
PACKAGES: dict[FaultSet, str] = {
    "first": "families",
    "second": "second",
    "third": "third",
    "fourth": "fourth",
    "fifth": "fifth",
}


def family_faults(family: str, fault_set: FaultSet) -> tuple[LiveFault, ...]:
    """The faults of a family in one set."""
    faults: tuple[LiveFault, ...] = import_module(f"craton.bench.why.faults.{PACKAGES[fault_set]}.{family}").FAULTS
    return faults


def chosen_faults(families: str = "all", only: Sequence[str] = ()) -> list[LiveFault]:
    """The faults of `first` to `fifth`, of `all`, or of families (in all sets) separated by commas; or
    only those of these names."""
    sets: tuple[FaultSet, ...] = tuple(name for name in PACKAGES if name == families) or tuple(PACKAGES)
    names = FAMILIES if families in (*PACKAGES, "all") else tuple(families.split(","))
    if unknown := [name for name in names if name not in FAMILIES]:
        allowed = ", ".join((*PACKAGES, "all", *FAMILIES))
        raise CratonError(f"--families: {', '.join(unknown)} is not known; allowed: {allowed}")
    faults = [fault for name in names for fault_set in sets for fault in family_faults(name, fault_set)]
    if missing := set(only) - {fault.name for fault in faults}:
        raise CratonError(f"--only: no fault {', '.join(sorted(missing))} in {families}")
    return [fault for fault in faults if not only or fault.name in only]
