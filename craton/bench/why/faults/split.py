"""The twelve families, and the split drawn before any rule was changed: half for development, half held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import import_module

from craton.bench.why.faults.fault import LiveFault
from craton.errors import CratonError

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
SPLIT_SEED = 20261117


def development() -> tuple[str, ...]:
    """The families that the rules may be developed against."""
    drawn = random.Random(SPLIT_SEED).sample(FAMILIES, len(FAMILIES) // 2)
    return tuple(family for family in FAMILIES if family in drawn)


def held_out() -> tuple[str, ...]:
    """The families that are run once, at the end."""
    return tuple(family for family in FAMILIES if family not in development())


def family_faults(family: str) -> tuple[LiveFault, ...]:
    """The faults of a family."""
    faults: tuple[LiveFault, ...] = import_module(f"craton.bench.why.faults.families.{family}").FAULTS
    return faults


def chosen_faults(families: str = "all", only: Sequence[str] = ()) -> list[LiveFault]:
    """The faults of `development`, `held-out`, `all` or families separated by commas; or only those of these names."""
    sets = {"all": FAMILIES, "development": development(), "held-out": held_out()}
    names = sets.get(families) or tuple(families.split(","))
    if unknown := [name for name in names if name not in FAMILIES]:
        raise CratonError(f"--families: {', '.join(unknown)} is not known; allowed: {', '.join((*sets, *FAMILIES))}")
    faults = [fault for name in names for fault in family_faults(name)]
    if missing := set(only) - {fault.name for fault in faults}:
        raise CratonError(f"--only: no fault {', '.join(sorted(missing))} in {families}")
    return [fault for fault in faults if not only or fault.name in only]
