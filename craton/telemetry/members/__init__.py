"""Member runs: the runs that a run owns, what it wants of them, and what each of them waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.members.address_file import MemberAddress, member_addresses, write_member_addresses
    from craton.telemetry.members.manager_life import ManagerProcess, living_manager, touch_manager_lock
    from craton.telemetry.members.member_files import (
        ACTIVE_STATES,
        JOBS_FOLDER,
        LOCK_FILE,
        MAX_DEPTH,
        MAX_MEMBERS,
        MEMBERS_FILE,
        MEMBERS_FOLDER,
        RESERVED_NAMES,
        MemberSpec,
        MembersSpec,
        MembersStatus,
        MemberState,
        MemberStatus,
        Need,
        member_names,
        member_runs,
        members_text,
        owner_of,
        read_members,
        read_members_status,
        with_members,
        write_members,
        write_members_status,
    )
    from craton.telemetry.members.member_sums import MembersSum, members_sum_of
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
