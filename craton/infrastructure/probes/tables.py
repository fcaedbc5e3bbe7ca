"""Read the tables beside this file once: XID actions, incompatible versions, harmful environment variables, error
counters. Every entry has a source and a date.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from craton.infrastructure.probes.software import version_numbers

HealthAction = Literal["observe", "restart", "reset", "reboot", "replace"]
HEALTH_ACTIONS: tuple[HealthAction, ...] = ("observe", "restart", "reset", "reboot", "replace")  # most severe last
Gravity = Literal["note", "warn", "fail"]
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class XidFact:
    code: int
    name: str
    action: HealthAction
    advice: str
    source: str
    date: date


@dataclass(frozen=True)
class BadPair:
    """Incompatible versions, on the named GPUs or instances if any."""

    name: str
    versions: Mapping[str, str]  # "nccl" → ">=2.19,<2.20"
    gpus: tuple[str, ...]  # catalog names; empty: any
    instances: tuple[str, ...]
    severity: Gravity
    problem: str
    remedy: str
    source: str
    date: date

    def holds(self, versions: Mapping[str, str], gpu: str = "", instance: str = "") -> bool:
        """Return whether a node has this combination; an unknown version never matches."""
        if self.gpus and gpu not in self.gpus:
            return False
        if self.instances and not any(fnmatchcase(instance, pattern) for pattern in self.instances):
            return False
        return all(name in versions and is_in(versions[name], wanted) for name, wanted in self.versions.items())


@dataclass(frozen=True)
class Trap:
    """A harmful environment variable."""

    variable: str  # may contain *
    fabric: str  # "efa", "infiniband", "rdma" (either) or "any"
    values: tuple[str, ...]  # harmful patterns; empty: any value
    unset: bool  # harmful if missing
    severity: Gravity
    problem: str
    remedy: str
    source: str
    date: date

    def hits(self, environment: Mapping[str, str]) -> list[str]:
        """Return the environment variables that match; for one that should be set, its name."""
        if self.unset:
            return [] if environment.get(self.variable) else [self.variable]
        return [
            name
            for name in sorted(environment)
            if fnmatchcase(name, self.variable)
            and (not self.values or any(fnmatchcase(environment[name].lower(), value) for value in self.values))
        ]


@dataclass(frozen=True)
class CounterFact:
    """An EFA counter that indicates a problem above a value, or above a share of another counter."""

    name: str
    share_of: str  # another counter; "": compare the value itself
    above: float
    severity: Gravity
    meaning: str
    remedy: str
    source: str
    date: date


@lru_cache(maxsize=1)
def xid_facts() -> dict[int, XidFact]:
    entries = [XidFact(**entry) for entry in _table("xid.toml")["xid"]]
    return {fact.code: fact for fact in entries}


@lru_cache(maxsize=1)
def recovery_actions() -> dict[str, HealthAction]:
    """Return the action names of XID 154 and nvidia-smi → ours; names in lowercase."""
    return {name.lower(): action for name, action in _table("xid.toml")["recovery"]["actions"].items()}


def recovery_action(answer: str) -> HealthAction:
    """Return our action for the driver's text; an unknown text counts as severe."""
    return recovery_actions().get(answer.lower(), "reboot")


def xid_action(code: int, *, recovery: str = "", is_fatal: bool = False, is_switch: bool = False) -> HealthAction:
    """Return the action that an XID (or a switch's SXID) requires; `recovery` is the text of XID 154 and overrides."""
    if recovery:
        return recovery_action(recovery)
    if is_switch or 144 <= code <= 150:  # NVLink 5: the line itself says whether it is fatal
        return "reboot" if is_fatal else "observe"
    fact = xid_facts().get(code)
    return fact.action if fact else "observe"


@lru_cache(maxsize=1)
def bad_pairs() -> tuple[BadPair, ...]:
    return tuple(
        BadPair(
            **{
                **entry,
                "versions": entry.get("versions", {}),
                "gpus": tuple(entry.get("gpus", ())),
                "instances": tuple(entry.get("instances", ())),
            }
        )
        for entry in _table("known_bad.toml")["pair"]
    )


@lru_cache(maxsize=1)
def traps() -> tuple[Trap, ...]:
    return tuple(
        Trap(
            **{
                **entry,
                "fabric": entry.get("fabric", "any"),
                "values": tuple(entry.get("values", ())),
                "unset": entry.get("unset", False),
            }
        )
        for entry in _table("environment.toml")["trap"]
    )


@lru_cache(maxsize=1)
def counter_facts() -> tuple[CounterFact, ...]:
    return tuple(
        CounterFact(**{**entry, "share_of": entry.get("share_of", "")}) for entry in _table("efa.toml")["counter"]
    )


def lustre_interfaces(instance: str) -> int:
    """Return the number of EFA interfaces that the FSx setup binds to LNet on an instance; 0: unknown."""
    return int(_table("efa.toml")["lustre_interfaces"]["counts"].get(instance, 0))


def is_in(version: str, wanted: str) -> bool:
    """Return whether a version is in a range: `2.27.5` is in `>=2.19,<2.28`. Missing numbers count as 0."""
    numbers = version_numbers(version)
    if not numbers:
        return False
    for part in wanted.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*([\d.]+)\s*", part)
        assert match, f"{wanted!r} is not a range of versions"
        limit = version_numbers(match[2])
        length = max(len(numbers), len(limit))
        padded, other = ((*item, *(0,) * (length - len(item))) for item in (numbers, limit))
        if not _COMPARE[match[1]](padded, other):
            return False
    return True


@lru_cache(maxsize=8)
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("craton.infrastructure.probes").joinpath(name).read_text(encoding="utf-8"))
