"""Files in the directory of a run whose members run in slots of pods.

    slots.json           which slots the JobSet of the run has, and which members each may run; written with the run
    slots/slot0-1.json   the member that slot 1 of the group `slot0` runs now; written whenever a member starts

A slot is a set of pods that runs one member at a time. A hand counts only for the submission of the run that it names:
pods of a later submission wait for a new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from craton.orchestration.backend import SLOTS_FILE
from craton.orchestration.kubernetes.podfile import write_whole
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.members import owner_of

HANDS_FOLDER = "slots"


@dataclass(frozen=True)
class SlotGroup:
    """Equal slots: one replicated job of the JobSet."""

    name: str  # of the replicated job
    num_slots: int
    num_pods: int  # of each slot
    members: tuple[str, ...]  # that may run in them


@dataclass(frozen=True)
class MemberSlots:
    """All slots of a run."""

    jobset: str = ""
    groups: tuple[SlotGroup, ...] = ()
    metrics_port: int = 0
    give_up_seconds: float = 0.0

    def group_of(self, member: str) -> SlotGroup | None:
        return next((group for group in self.groups if member in group.members), None)


@dataclass(frozen=True)
class Hand:
    """The member that a slot runs; "" for none: its pods kill what they run."""

    member: str = ""
    generation: int = 0  # of the member's launch
    submission: str = ""  # of the owner
    token: str = ""  # another one for every start


@dataclass(frozen=True)
class SlotName:
    """One slot of a group."""

    group: str
    number: int

    def __str__(self) -> str:
        return f"{self.group}-{self.number}"


@dataclass(frozen=True)
class Handed:
    """A slot with what it was handed last."""

    slot: SlotName
    hand: Hand = field(default_factory=Hand)


def slots_text(slots: MemberSlots) -> str:
    return json.dumps(asdict(slots), indent=1) + "\n"


def read_slots(run: RunDirectory) -> MemberSlots | None:
    """Return the slots of a run; None for a run whose members are elsewhere."""
    document = read_json(run.path / SLOTS_FILE)
    if not document:
        return None
    groups = document.get("groups")
    return MemberSlots(
        str(document.get("jobset") or ""),
        tuple(_group(entry) for entry in (groups if isinstance(groups, list) else ()) if isinstance(entry, dict)),
        int(document.get("metrics_port") or 0),
        float(document.get("give_up_seconds") or 0.0),
    )


def owner_with_slots(run: RunDirectory) -> RunDirectory | None:
    """Return the owner of a member that runs in a slot; None for any other run."""
    owner = owner_of(run)
    return owner if owner is not None and (owner.path / SLOTS_FILE).exists() else None


def read_hand(owner: RunDirectory, slot: SlotName) -> Hand:
    """Return what a slot was handed last; an empty hand if nothing."""
    document = read_json(_hand_path(owner, slot))
    generation = document.get("generation")
    return Hand(
        str(document.get("member") or ""),
        generation if isinstance(generation, int) else 0,
        str(document.get("submission") or ""),
        str(document.get("token") or ""),
    )


def write_hand(owner: RunDirectory, slot: SlotName, hand: Hand) -> None:
    """Replace the hand of a slot: its pods see the old one or the new one."""
    write_whole(_hand_path(owner, slot), json.dumps(asdict(hand)) + "\n")


def handed_in(owner: RunDirectory, group: SlotGroup) -> list[Handed]:
    """Return every slot of a group with its hand."""
    names = [SlotName(group.name, number) for number in range(group.num_slots)]
    return [Handed(name, read_hand(owner, name)) for name in names]


def _hand_path(owner: RunDirectory, slot: SlotName) -> Path:
    return owner.path / HANDS_FOLDER / f"{slot}.json"


def _group(entry: Mapping[str, Any]) -> SlotGroup:
    members = entry.get("members")
    return SlotGroup(
        str(entry.get("name") or ""),
        int(entry.get("num_slots") or 0),
        int(entry.get("num_pods") or 0),
        tuple(str(name) for name in members) if isinstance(members, list) else (),
    )
