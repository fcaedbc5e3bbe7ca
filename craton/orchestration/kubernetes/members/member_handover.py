"""Start, watch and kill members that run in slots, by files of the shared run directory alone.

The member manager has no access to the cluster, and needs none: the pods of all slots are there as long as the run is.
A member goes back into its own slot after a restart, else into a free one of its group.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from craton.agent import Launch, write_launch
from craton.orchestration.backend import SLOTS_FILE, Standing, Submission, read_submission
from craton.orchestration.errors import RunStateError
from craton.orchestration.kubernetes.members.slot_files import (
    Hand,
    MemberSlots,
    SlotGroup,
    SlotName,
    handed_in,
    owner_with_slots,
    read_slots,
    write_hand,
)
from craton.orchestration.kubernetes.podfile import submission_of
from craton.orchestration.local import living_agents
from craton.telemetry import MARKERS, RunDirectory, read_json
from craton.telemetry.files import UnsafeFileError
from craton.telemetry.members import MemberState, read_members_status
from craton.telemetry.node import read_heartbeat

if TYPE_CHECKING:
    from craton.orchestration.draft import Draft

CACHE_FOLDER = "cache"  # in the run directory
IN_USE: tuple[MemberState, ...] = ("starting", "running", "ready", "restarting")


def share_cache(owner: RunDirectory) -> None:
    """Let this process, which starts members, tokenize their text where the pods of slots see it; unchanged for members
    elsewhere, and where CRATON_CACHE is set."""
    if (owner.path / SLOTS_FILE).exists():
        os.environ.setdefault("CRATON_CACHE", str(owner.path / CACHE_FOLDER))


class SlotPlace:
    """Members in slots of pods. `craton resume RUN/NAME` hands a member over itself."""

    on = "kubernetes"

    def owner_lives(self, owner: RunDirectory) -> bool:
        return bool(living_agents(owner)) or lives_in_pods(owner)

    def member_lives(self, member: RunDirectory) -> bool:
        return bool(living_agents(member)) or is_in_slot(member)

    def is_asked(self, member: RunDirectory) -> bool:
        return False


def hand_member(draft: Draft, run: RunDirectory) -> Submission:
    """Hand a member, whose files are written, to the pods of a slot; RunStateError if none is free."""
    owner, slots, group = _group_of(run)
    slot = _free_slot(owner, group, run.path.name)
    launch = slot_launch(draft.launch, slots, slot)
    write_launch(run, launch)
    hand = Hand(run.path.name, launch.generation, submission_of(owner) or "", secrets.token_hex(8))
    write_hand(owner, slot, hand)
    details = {**read_submission(owner).details, "directory": str(run.path), "slot": str(slot)}
    return Submission("kubernetes", f"JobSet/{slots.jobset}", details)


def kill_member(run: RunDirectory) -> None:
    """Take the member from its slot: the pods there kill its agents."""
    owner, _, group = _group_of(run)
    for handed in handed_in(owner, group):
        if handed.hand.member == run.path.name:
            write_hand(owner, handed.slot, replace(handed.hand, member="", token=secrets.token_hex(8)))


def is_in_slot(run: RunDirectory) -> bool:
    """Whether the pods of a slot run this member, or are about to; False for runs elsewhere."""
    return owner_with_slots(run) is not None and (bool(_slot_of(run)) or bool(_living_nodes(run)))


def lives_in_pods(owner: RunDirectory) -> bool:
    """Whether an agent of a run with slots lives in any pod; False for runs elsewhere."""
    return (owner.path / SLOTS_FILE).exists() and bool(_living_nodes(owner))


def member_standing(run: RunDirectory) -> Standing:
    """Return the state of a member in a slot, from its files."""
    job = read_submission(run).job
    if nodes := _living_nodes(run):
        return Standing("running", job, nodes)
    if slot := _slot_of(run):
        return Standing("waiting", job, sentence=f"the pods of {slot} to start it")
    return Standing("ended", job)


def slot_launch(launch: Launch, slots: MemberSlots, slot: SlotName) -> Launch:
    """Return a member's launch for the pods of a slot. Ranks of a single node need no name of the cluster's DNS."""
    first = f"{slots.jobset}-{slot}-0.{slots.jobset}"
    return replace(
        launch,
        agent_command=[],  # Kubernetes restarts a dead agent
        master_address=first if len(launch.nodes) > 1 else "127.0.0.1",
        metrics_port=slots.metrics_port,
        cards={},
        give_up_seconds=slots.give_up_seconds,
        owner_seconds=slots.give_up_seconds,  # the first pod of the run may be recreated on another node
    )


def _group_of(run: RunDirectory) -> tuple[RunDirectory, MemberSlots, SlotGroup]:
    owner = owner_with_slots(run)
    slots = read_slots(owner) if owner is not None else None
    group = slots.group_of(run.path.name) if slots is not None else None
    if owner is None or slots is None or group is None:
        raise RunStateError(f"{run.name} has no slot in the JobSet of its owner; start the owner again")
    return owner, slots, group


def _free_slot(owner: RunDirectory, group: SlotGroup, member: str) -> SlotName:
    submission, states = submission_of(owner), read_members_status(owner).members
    free = []
    for handed in handed_in(owner, group):
        other = states.get(handed.hand.member)
        if handed.hand.submission == submission and handed.hand.member == member:
            return handed.slot
        if handed.hand.submission != submission or other is None or other.state not in IN_USE:
            free.append(handed.slot)
    if not free:
        raise RunStateError(
            f"all {group.num_slots} slots for members like {member} are in use; `craton ps {owner.name}` shows by which"
        )
    return free[0]


def _slot_of(run: RunDirectory) -> str:
    """Return the slot that was handed a member which has not ended; "" if none, as for a member that is kept."""
    owner = owner_with_slots(run)
    slots = read_slots(owner) if owner is not None else None
    group = slots.group_of(run.path.name) if slots is not None else None
    if owner is None or group is None or any(run.has(marker) or owner.has(marker) for marker in MARKERS):
        return ""
    submission = submission_of(owner)
    return next(
        (
            str(handed.slot)
            for handed in handed_in(owner, group)
            if handed.hand.member == run.path.name and handed.hand.submission == submission
        ),
        "",
    )


def _living_nodes(run: RunDirectory) -> tuple[str, ...]:
    """Return the nodes whose agents have a recent heartbeat."""
    nodes = read_json(run.launch_path).get("nodes")
    alive = []
    for node in nodes if isinstance(nodes, list) else ():
        try:
            beat = read_heartbeat(run, str(node))
        except UnsafeFileError:  # a name that leads out of the directory
            continue
        if beat is not None and beat.state in ("running", "spare") and not beat.is_lost() and not beat.is_gone_here:
            alive.append(str(node))
    return tuple(alive)
