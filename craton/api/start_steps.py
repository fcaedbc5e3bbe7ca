"""The steps of a start and their observer: plan and check, approve, prepare the data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from craton.job import Job
from craton.orchestration.draft import Progress
from craton.orchestration.start import RunStart, check_start, prepare_start

Stage = Literal["planning", "data"]


class StartWatch(Protocol):
    """Observes a start. An exception from a method ends the start before a rank or a run directory exists."""

    def stage(self, name: Stage) -> AbstractContextManager[Progress | None]:
        """Wrap planning and data preparation; they report progress to the yielded function."""

    def planned(self, start: RunStart) -> None:
        """Called when the job is planned and checked, before data is prepared: the place to confirm the cost."""

    def prepared(self, start: RunStart, tokens: dict[str, int]) -> None:
        """Called when the data is ready, with the tokens per path, before the ranks are started."""


class Unwatched:
    """A start without confirmation, with one function for all progress."""

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
    """Draft, check and approve a start and prepare its data: everything but the submission. `check_job` adds a check
    to those of every start."""
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
