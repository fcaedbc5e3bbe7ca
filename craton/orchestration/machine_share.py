"""The share of this machine that a member run gets: members that run at the same time divide its GPUs and cores.

A machine has as many equal shares as members may run at a time (`parallel`, else all of them). A member keeps its share
over restarts. With fewer GPUs than shares, several members share a GPU, each with its part of the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from craton.agent import Launch
from craton.infrastructure import MEMORY_FRACTION, Accelerator, CatalogError, memory_fraction, visible_accelerators
from craton.orchestration.errors import StartError
from craton.orchestration.member_nodes import num_shares
from craton.orchestration.member_places import member_place
from craton.telemetry import RunDirectory
from craton.telemetry.members import ACTIVE_STATES, owner_of, read_members, read_members_status

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class MachineShare:
    """One of `parts` equal shares of this machine."""

    parts: int = 1
    environment: tuple[tuple[str, str], ...] = ()  # variables that name its GPUs

    def divide(self, launch: Launch) -> Launch:
        """Return the launch with its part of the cores."""
        return replace(launch, threads_per_rank=max(1, launch.threads_per_rank // self.parts))


def share_of(parts: int, slot: int, cards: Sequence[Accelerator]) -> MachineShare:
    """Return share number `slot` of a machine with these GPUs."""
    if parts == 1 or not cards:
        return MachineShare(parts)
    count = len(cards) // parts
    if count:
        mine = cards[slot % parts * count :][:count]
        return MachineShare(parts, ((VISIBLE, ",".join(card.uuid for card in mine)),))
    sharers = -(-parts // len(cards))  # rounded up
    try:
        fraction = memory_fraction(list(cards), sharers)
    except CatalogError as error:
        raise StartError(f"{parts} members at a time are too many for the GPUs here: {error}; use `parallel`") from None
    chosen = cards[slot % len(cards)]
    return MachineShare(parts, ((VISIBLE, chosen.uuid), (MEMORY_FRACTION, f"{fraction:.4f}")))


@contextmanager
def machine_share(run: RunDirectory) -> Iterator[MachineShare]:
    """Let this process, and those that it starts, see only the GPUs of a member's share; all for other
    runs, and for members that have nodes or pods of their own."""
    owner = owner_of(run)
    if owner is None or member_place(owner).on != "local":
        yield MachineShare()
        return
    share = share_of(num_shares(read_members(owner)), _slot(owner, run.path.name), visible_accelerators())
    before = {name: os.environ.get(name) for name, _ in share.environment}
    os.environ.update(share.environment)
    try:
        yield share
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _slot(owner: RunDirectory, name: str) -> int:
    """Return the number of a member's share; StartError if another member has it now."""
    members = read_members_status(owner).members
    slot = max(0, members[name].slot if name in members else 0)
    for other, status in members.items():
        if other != name and status.state in ACTIVE_STATES and status.slot == slot:
            raise StartError(
                f"member {other} runs on the share of this machine that {name} had; stop it first: "
                f"`craton stop {owner.name}/{other}`"
            )
    return slot
