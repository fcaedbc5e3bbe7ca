"""Start, stop and resume runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.start.copies import check_copies, copy_names, first_copy, start_copies
    from craton.orchestration.start.roots import linking, root_of, sharing_doubt
    from craton.orchestration.start.runs import (
        SavedStep,
        check_name_is_free,
        check_places,
        check_server,
        draft_resume,
        find_rescue,
        kill_run,
        newest_checkpoint,
        prepare_data,
        release_run,
        resume_run,
        resumed_job,
        start_run,
        stop_run,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
