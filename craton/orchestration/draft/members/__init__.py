"""The members of a job's run: which ones its job file asks for, their checks, and what the run needs for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.draft.members.checked import (
        Members,
        check_no_member_faults,
        checked_members,
        members_problem,
        report_launch,
    )
    from craton.orchestration.draft.members.expand import is_result_of, member_jobs
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
