"""Whether a run makes progress, and which rank the others wait for: the same answer for every view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.progress.assessment import (
        NOTED_SECONDS,
        UNKNOWN_PROGRESS,
        Progress,
        activities_of,
        age_of,
        assess_progress,
        usual_stays,
    )
    from craton.telemetry.progress.culprits import find_culprits, find_sleepers
    from craton.telemetry.progress.limits import (
        FIRST_SECONDS,
        MIN_STUCK_SECONDS,
        STUCK_STAYS,
        STUCK_STEPS,
        RankActivity,
        first_seconds,
        stuck_after,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
