"""The steps of a start, for who follows them: plan and check it, approve it, prepare its data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from craton.job import Job
from craton.orchestration.draft import Progress
from craton.orchestration.start import RunStart, check_start, prepare_start

Stage = Literal["planning", "data"]


class StartWatch(Protocol):
    """Follows a start. Whatever a method raises ends the start before a rank or a run directory exists."""

    def stage(self, name: Stage) -> AbstractContextManager[Progress | None]:
        """Around the planning and around the preparation of the data, which report their progress to what it yields."""

    def planned(self, start: RunStart) -> None:
        """The job is planned and checked. Data is prepared next: the moment to ask about money."""

    def prepared(self, start: RunStart, tokens: dict[str, int]) -> None:
        """The data is ready, with the tokens behind each path. The ranks are started next."""


class Unwatched:
    """A start without questions, with one function for all of its progress."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def stage(self, name: Stage) -> AbstractContextManager[Progress | None]:
        return nullcontext(self._progress)

    def planned(self, start: RunStart) -> None:
        pass

    def prepared(self, start: RunStart, tokens: dict[str, int]) -> None:
        pass


def ready_start(
    draft: Callable[[Progress | None], RunStart], watch: StartWatch, check_job: Callable[[Job], None] | None = None
) -> RunStart:
    """A start that was drafted, checked, approved and given its data: all but its submission. `check_job` refuses
    beside the checks of every start."""
    with watch.stage("planning") as progress:
        start = draft(progress)
    check_start(start)
    if check_job is not None:
        check_job(start.draft.job)
    watch.planned(start)
    with watch.stage("data") as progress:
        start, tokens = prepare_start(start, progress)
    watch.prepared(start, tokens)
    return start
