"""Members of a run on Kubernetes: slots of pods in the JobSet of their owner, and the files that hand them a member.

`slot_targets` makes slots of jobs. `slot_files` are the files between the member manager and the pods. `slot_pod` is
the program in a pod of a slot. `member_handover` starts, watches and kills members in slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.kubernetes.members.member_handover import (
        SlotPlace,
        hand_member,
        is_in_slot,
        kill_member,
        lives_in_pods,
        member_standing,
        share_cache,
    )
    from craton.orchestration.kubernetes.members.slot_files import owner_with_slots, read_slots, slots_text
    from craton.orchestration.kubernetes.members.slot_targets import (
        SlotTarget,
        check_owner,
        owner_target,
        slots_layout,
        slots_of,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
