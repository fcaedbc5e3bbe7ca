"""Where the members of a run start, seen from their manager: on this machine, as steps of the owner's Slurm job, or in
pods of its JobSet.

A backend of the same name starts a member (`Launch.owner` is set); a place says which processes live.
"""

from __future__ import annotations

from typing import Protocol

from craton.orchestration.backend import SLOTS_FILE, read_submission
from craton.orchestration.local import living_agents
from craton.telemetry import RunDirectory


class MemberPlace(Protocol):
    """What the member manager asks of the scheduler that has its owner."""

    on: str  # name of the backend

    def owner_lives(self, owner: RunDirectory) -> bool:
        """Whether an agent of the owner lives."""
        ...

    def member_lives(self, member: RunDirectory) -> bool:
        """Whether a member has processes; if not, it may be resumed."""
        ...

    def is_asked(self, member: RunDirectory) -> bool:
        """Whether `craton resume RUN/NAME` left the start of a member to the manager."""
        ...


class LocalPlace:
    on = "local"

    def owner_lives(self, owner: RunDirectory) -> bool:
        return bool(living_agents(owner))

    def member_lives(self, member: RunDirectory) -> bool:
        return bool(living_agents(member))

    def is_asked(self, member: RunDirectory) -> bool:
        return False  # the command starts it itself


def member_place(owner: RunDirectory) -> MemberPlace:
    """Return where the members of a run start."""
    if read_submission(owner).on == "slurm":
        from craton.orchestration.slurm import SlurmPlace

        return SlurmPlace()
    if (owner.path / SLOTS_FILE).exists():
        from craton.orchestration.kubernetes.members import SlotPlace

        return SlotPlace()
    return LocalPlace()
