"""The final save: the state at the end, stop or resize of a run exists only in memory, so no rank exits before a disk
has it.

The state goes to the job's tiers, then to the run directory (`checkpoints/rescue`). If both fail, all ranks stay up
with it, report what to do, and retry: at once when there is free space, otherwise every RETRY_SECONDS. Until then the
rank's shared-memory page is marked `unsaved`: the agent does not end such a rank, and `ps` and `stop` report it. The
mark survives the death of a rank, until the next generation has restored a copy and saved it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from craton.formatting import bandwidth, percent, setting, stored, whole_duration
from craton.job.sections import RESCUE
from craton.ml.training.checkpoint import CheckpointError
from craton.ml.training.saves import Saves

PROGRESS_SECONDS = 2.0  # between two reports of a save in progress; longer in long saves
FREQUENT_REPORTS = 15
RETRY_SECONDS = 10.0
LOOK_SECONDS = 0.5  # between two checks for free space, which also count as heartbeats
REMIND_SECONDS = 600.0  # between two reports of the same failure


def save_for_good(saves: Saves, counters: Mapping[str, int], check: Callable[[], None]) -> None:
    """Return when a tier or the run directory has the state. `check` raises when this generation is over."""
    page = saves.parts.clock.page
    problem = _save(saves, counters)
    if problem is not None:
        # From here on the state survives the death of a rank if peer memory is in use.
        saves.parts.checkpointer.keep(counters["step"], saves.tensors(), counters, ())
        problem = _rescue(saves, counters, problem)
    if problem is not None:
        page.set_beside("unsaved", True)
        page.spring()
        _hold(saves, counters, problem, check)
    page.set_beside("unsaved", False)


def _hold(saves: Saves, counters: Mapping[str, int], problem: str | None, check: Callable[[], None]) -> None:
    """Keep the state in memory until a disk takes it."""
    step, reported_at = counters["step"], -REMIND_SECONDS
    while problem is not None:
        if time.monotonic() - reported_at >= REMIND_SECONDS:
            reported_at = time.monotonic()
            saves.event("state_unsaved", step, reason=problem, retry_seconds=RETRY_SECONDS)
            saves.say(
                f"step {step}: the state is only in memory, and the ranks stay up until a disk takes it; the save is "
                f"retried every {setting(RETRY_SECONDS)}, and at once when space is free. {problem}"
            )
        _wait_for_room(saves, check)
        problem = _save(saves, counters, is_quiet=True)
        if problem is not None:
            problem = _rescue(saves, counters, problem, is_quiet=True)
    saves.say(f"step {step}: the state is saved")


def _save(saves: Saves, counters: Mapping[str, int], is_quiet: bool = False) -> str | None:
    """Save to the job's tiers. Return the error if no lasting tier has the state afterwards."""
    try:
        with saves.parts.clock.kind("checkpoint"), _progress_shown(saves, counters["step"]):
            saves.parts.checkpointer.save(counters["step"], saves.tensors(), counters, wait=True)
    except CheckpointError as error:
        return "; ".join(str(error).splitlines())
    finally:
        saves.report(is_quiet)
    return None


def _rescue(saves: Saves, counters: Mapping[str, int], reason: str, is_quiet: bool = False) -> str | None:
    """Save to the run directory, for the given reason. Return the reason and the error if this fails too."""
    try:
        with saves.parts.clock.kind("checkpoint"), _progress_shown(saves, counters["step"]):
            saves.parts.checkpointer.rescue(counters["step"], saves.tensors(), counters)
    except CheckpointError as error:
        return "; ".join([reason, *str(error).splitlines()])
    finally:
        saves.report(is_quiet)
    saves.say(f"step {counters['step']}: saved in the run directory instead (checkpoints/{RESCUE}): {reason}")
    return None


@contextmanager
def _progress_shown(saves: Saves, step: int) -> Iterator[None]:
    """On rank 0, report how far its part of a long save is: as an event, which `craton run` shows, and in the log."""
    if saves.parts.ranks.rank != 0:
        yield
        return
    done = threading.Event()

    def report() -> None:
        began, reports = time.monotonic(), 0
        while not done.wait(PROGRESS_SECONDS * max(1, reports // FREQUENT_REPORTS)):
            reports += 1
            for tier, written, total in saves.parts.checkpointer.progress():
                text = progress_text(written, total, time.monotonic() - began)
                saves.event("checkpoint_progress", step, tier=tier, reason=text)
                saves.say(f"step {step}: saving to {tier}: {text}")

    thread = threading.Thread(target=report, name="save-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def progress_text(written: int, total: int, seconds: float) -> str:
    """6.21 GB of 14.8 GB (42%), 1.19 GB/s, 7 s left."""
    share = min(1.0, written / total)
    left = f", {whole_duration((1 - share) / share * seconds)} left" if share else ""
    return f"{stored(written)} of {stored(total)} ({percent(share)}), {bandwidth(written / seconds)}{left}"


def _wait_for_room(saves: Saves, check: Callable[[], None]) -> None:
    """Wait until rank 0 decides to retry."""
    checkpointer, clock = saves.parts.checkpointer, saves.parts.clock
    before = checkpointer.places_with_room()
    deadline = time.monotonic() + RETRY_SECONDS
    with clock.kind("checkpoint"):
        is_time = False
        while not is_time:
            time.sleep(LOOK_SECONDS)
            clock.page.beat()
            check()
            has_room = bool(checkpointer.places_with_room() - before)
            is_time = checkpointer.agree(has_room or time.monotonic() >= deadline)
