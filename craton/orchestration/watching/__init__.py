"""Follow a run: state, summary, logs, recoveries, and the comparison of predicted and measured values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.watching.comparison import compare
    from craton.orchestration.watching.logs import LogLine, log_files, log_lines
    from craton.orchestration.watching.member_list import (
        MemberRow,
        SeenRun,
        account_lines,
        flat,
        member_rows,
        with_members_sum,
    )
    from craton.orchestration.watching.recoveries import Recovery, read_recoveries
    from craton.orchestration.watching.state import (
        GOES_ON,
        MOVING,
        NO_ANSWER,
        check_is_seen,
        check_not_running,
        check_running,
        is_server,
        launching,
        living_members,
        settled,
        settled_summaries,
        standing_of,
        standings_of,
        wait_for_agents,
        wait_for_members,
    )
    from craton.orchestration.watching.summary_cache import glance, glance_at_members
    from craton.orchestration.watching.watch import Follower, View, until_stopped
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
