"""Member runs: the runs that a run owns, what it wants of them, and what each of them waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.members.member_files import (
        MEMBERS_FILE,
        MEMBERS_FOLDER,
        MemberSpec,
        MembersSpec,
        MembersStatus,
        MemberState,
        MemberStatus,
        full_name,
        member_runs,
        owner_of,
        owners_of,
        read_members,
        read_members_status,
        write_members,
        write_members_status,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
