"""Start, stop and resume runs from a draft; a live run is never started twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.saved_steps import SavedStep, find_rescue, newest_checkpoint
    from craton.orchestration.start.checks import check_server
    from craton.orchestration.start.copies import first_copy
    from craton.orchestration.start.path import (
        RunStart,
        check_start,
        draft_resumption,
        draft_start,
        prepare_start,
        resume_start,
        submit_start,
    )
    from craton.orchestration.start.roots import sharing_doubt
    from craton.orchestration.start.runs import kill_run, release_run, stop_run
    from craton.orchestration.start.submit import start_run
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
