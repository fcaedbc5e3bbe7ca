"""The state that a run ends, stops or is resized with exists only in memory: no rank goes before some disk has it.

It goes to the job's tiers, then to the run directory (`checkpoints/rescue`). When nothing takes it, all ranks stay up
with it, say what to do, and try again: at once when there is room, and every RETRY_SECONDS for whatever else was wrong.
Until then the rank's page says `unsaved`: the agent does not end such a rank, and `ps` and `stop` say what to do. It
goes on to say so when a rank dies meanwhile, until the next generation has restored a copy and saved it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from craton.formatting import setting
from craton.job.sections import RESCUE
from craton.ml.training.checkpoint import CheckpointError
from craton.ml.training.saves import Saves

RETRY_SECONDS = 10.0
LOOK_SECONDS = 0.5  # between two looks for room, which are signs of life too
REMIND_SECONDS = 600.0  # between two reports of the same failure


def save_for_good(saves: Saves, counters: Mapping[str, int], check: Callable[[], None]) -> None:
    """Returns when a tier or the run directory has the state. `check` raises when this generation is over."""
    page = saves.parts.clock.page
    problem = _save(saves, counters)
    if problem is not None:
        # A rank that dies from here on takes nothing with it where the nodes' memory is used.
        saves.parts.checkpointer.keep(counters["step"], saves.tensors(), counters, ())
        problem = _rescue(saves, counters, problem)
    if problem is not None:
        page.set_beside("unsaved", True)
        page.spring()
        _hold(saves, counters, problem, check)
    page.set_beside("unsaved", False)


def _hold(saves: Saves, counters: Mapping[str, int], problem: str | None, check: Callable[[], None]) -> None:
    """Keeps the state in memory until a disk takes it."""
    step, told_at = counters["step"], -REMIND_SECONDS
    while problem is not None:
        if time.monotonic() - told_at >= REMIND_SECONDS:
            told_at = time.monotonic()
            saves.event("state_unsaved", step, reason=problem, retry_seconds=RETRY_SECONDS)
            saves.say(
                f"step {step}: the state is only in memory, and the ranks stay up with it until a disk takes it; it is "
                f"tried again every {setting(RETRY_SECONDS)}, and at once when there is room. {problem}"
            )
        _wait_for_room(saves, check)
        problem = _save(saves, counters, is_quiet=True)
        if problem is not None:
            problem = _rescue(saves, counters, problem, is_quiet=True)
    saves.say(f"step {step}: the state is saved")


def _save(saves: Saves, counters: Mapping[str, int], is_quiet: bool = False) -> str | None:
    """To the job's tiers; what went wrong, if no lasting one has it then."""
    try:
        with saves.parts.clock.kind("checkpoint"):
            saves.parts.checkpointer.save(counters["step"], saves.tensors(), counters, wait=True)
    except CheckpointError as error:
        return "; ".join(str(error).splitlines())
    finally:
        saves.report(is_quiet)
    return None


def _rescue(saves: Saves, counters: Mapping[str, int], reason: str, is_quiet: bool = False) -> str | None:
    """To the run directory, because of this reason; that and what went wrong here too, if it did."""
    try:
        with saves.parts.clock.kind("checkpoint"):
            saves.parts.checkpointer.rescue(counters["step"], saves.tensors(), counters)
    except CheckpointError as error:
        return "; ".join([reason, *str(error).splitlines()])
    finally:
        saves.report(is_quiet)
    saves.say(f"step {counters['step']}: saved in the run directory instead (checkpoints/{RESCUE}): {reason}")
    return None


def _wait_for_room(saves: Saves, check: Callable[[], None]) -> None:
    """Until rank 0 finds that it is time to try again."""
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
