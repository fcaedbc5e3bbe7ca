"""A page outlives whoever writes it: its seconds sum to wall time over processes that die at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

from craton.telemetry.rank import LEDGER_KINDS, LedgerClock, RankPage
from craton.telemetry.rank.shared_memory import TrapError


def fork(work: Callable[[], None]) -> int:
    """A process that does this and nothing else."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


def reap(child: int) -> int:
    """The exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def total(page: RankPage, now: float | None = None) -> float:
    return sum(page.totals(time.monotonic() if now is None else now).values())


def test_the_seconds_of_processes_killed_at_random_sum_to_wall_time() -> None:
    page = RankPage.make()
    begin = page.since
    chance = random.Random(5)

    def train(seed: int) -> None:
        clock = LedgerClock()
        dice = random.Random(seed)
        for step in range(1_000_000):
            clock.begin_step(step)
            for kind in dice.choices(LEDGER_KINDS, k=20):
                clock.switch(kind)

    os.environ["CRATON_PAGE"] = str(page.descriptor)
    try:
        for process in range(25):
            seconds = total(page)
            child = fork(lambda: train(process))  # noqa: B023 - it is called at once
            time.sleep(chance.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
            assert reap(child) == -signal.SIGKILL
            page.break_off("detect")
            page.set_beside("saving", False)
            assert total(page) > seconds, "time never goes back"
            page.switch("regroup")
    finally:
        del os.environ["CRATON_PAGE"]
    now = time.monotonic()
    assert total(page, now) == pytest.approx(now - begin, rel=0.01)
    booked = page.totals(now)
    assert min(booked.values()) >= 0
    assert booked["redo"] > 0


def test_a_stay_that_was_booked_when_its_process_was_killed_is_not_booked_again() -> None:
    page = RankPage.make()
    begin = page.since
    page.begin("data", begin)
    page.switch("productive", begin + 2.0)
    page._fields.since = begin  # killed inside `switch`, between its two writes
    page.break_off("detect", now=begin + 3.0)
    assert total(page, begin + 4.0) == pytest.approx(4.0)


def test_two_processes_see_the_same_page() -> None:
    page = RankPage.make()
    assert (page.kind, page.generation, page.step) == ("start", -1, 0)
    seen = RankPage.make()

    def work() -> None:
        other = RankPage(os.dup(page.descriptor))
        other.generation, other.step_seconds = 7, 0.25
        other.begin_step(12)
        other.switch("data")
        other.set_beside("staging", True)
        other.beat()
        wait_until(lambda: other.write_delay("shared") == 3.5)
        seen.step = 1

    before = page.progress
    child = fork(work)
    wait_until(lambda: page.progress > before)
    assert (page.kind, page.generation, page.step, page.step_seconds) == ("data", 7, 12, 0.25)
    assert page.beside == ("staging",)
    page.slow_down("shared", 3.5)
    assert reap(child) == 0
    assert seen.step == 1


def test_a_page_is_found_only_where_an_agent_gave_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRATON_PAGE", raising=False)
    assert RankPage.from_environment() is None
    for wrong in ("", "x", "99999", str(os.open(os.devnull, os.O_RDWR))):
        monkeypatch.setenv("CRATON_PAGE", wrong)
        assert RankPage.from_environment() is None
    page = RankPage.make()
    page.switch("restore")
    monkeypatch.setenv("CRATON_PAGE", str(page.descriptor))
    clock = LedgerClock()
    assert clock.is_shared
    assert clock.current == "restore", "it goes on in the kind that the agent was booking"
    clock.switch("productive")
    assert page.kind == "productive"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["switch", "step", "break", "beside"]), st.sampled_from(LEDGER_KINDS), st.floats(0, 50)
        ),
        max_size=40,
    )
)
def test_nothing_is_booked_twice_or_lost(happenings: list[tuple[str, str, float]]) -> None:
    page, now = RankPage.make(), 1000.0
    page.begin("start", now)
    for what, kind, seconds in happenings:
        now += seconds
        if what == "switch":
            page.switch(kind, now)
        elif what == "step":
            page.begin_step(page.step + 1, now)
        elif what == "break":
            page.break_off(kind, now - seconds / 2, now)
        totals = page.totals(now + 1)
        assert sum(totals.values()) == pytest.approx(now + 1 - 1000)
        assert min(totals.values()) >= -1e-9


def test_a_step_that_is_broken_off_is_redone() -> None:
    page = RankPage.make()
    page.begin("start", 0.0)
    page.switch("productive", 10.0)
    page.begin_step(1, 12.0)
    page.begin_step(2, 20.0)
    page.switch("data", 22.0)
    page.switch("checkpoint", 23.0)
    page.switch("productive", 25.0)
    page.break_off("regroup", since=28.0, now=31.0)
    assert page.kind == "regroup"
    totals = {kind: seconds for kind, seconds in page.totals(33.0).items() if seconds}
    assert totals == {
        "start": 10.0,
        "productive": 10.0,  # the first step stays
        "checkpoint": 2.0,  # it was made all the same
        "redo": 6.0,
        "detect": 3.0,
        "regroup": 2.0,
    }


def test_what_breaks_before_the_first_step_loses_none() -> None:
    page = RankPage.make()
    page.begin("start", 0.0)
    page.switch("productive", 4.0)
    page.break_off("detect", now=10.0)
    totals = {kind: seconds for kind, seconds in page.totals(10.0).items() if seconds}
    assert totals == {"start": 4.0, "productive": 6.0}


@pytest.mark.parametrize("since", [-50.0, 5.0, 99.0])
def test_an_interruption_lies_within_the_open_interval(since: float) -> None:
    page = RankPage.make()
    page.begin("start", 0.0)
    page.switch("productive", 4.0)
    page.break_off("regroup", since, now=10.0)
    totals = page.totals(10.0)
    assert totals["detect"] == pytest.approx(10.0 - min(max(since, 4.0), 10.0))
    assert sum(totals.values()) == pytest.approx(10.0)


# -- traps --------------------------------------------------------------------------------------------------------


def test_a_trap_to_kill_and_one_to_stop() -> None:
    page = RankPage.make()

    def rank() -> None:
        page.switch("productive")
        while True:
            page.spring()
            time.sleep(0.001)

    child = fork(rank)
    page.set_trap("stop")
    wait_until(lambda: page.traps_sprung == 1)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert not page.has_trap
    os.kill(child, signal.SIGCONT)
    page.set_trap("kill")
    assert reap(child) == -signal.SIGKILL
    assert page.traps_sprung == 2


def test_a_trap_to_fail_is_raised_once_in_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    page = RankPage.make()
    monkeypatch.setenv("CRATON_PAGE", str(page.descriptor))
    clock = LedgerClock()
    clock.begin_step(7)
    page.set_trap("fail", "stepping", step=7)
    clock.switch("data")
    with pytest.raises(TrapError, match="chaos: injected failure at step 7"):
        clock.switch("productive")
    clock.switch("productive")
    assert page.traps_sprung == 1


@pytest.mark.parametrize("kind", LEDGER_KINDS)
def test_a_trap_waits_for_its_kind(kind: str) -> None:
    page = RankPage.make()
    page.set_trap("fail", kind)
    for other in LEDGER_KINDS:
        if other != kind:
            page.switch(other)
            page.spring()
    page.switch(kind)
    with pytest.raises(TrapError):
        page.spring()


def test_a_trap_waits_for_its_step_and_for_what_goes_on_beside() -> None:
    page = RankPage.make()
    page.set_trap("fail", "any", beside="saving", step=5)
    page.set_beside("saving", True)
    page.step = 4
    page.spring()
    page.step = 6
    page.set_beside("saving", False)
    page.set_beside("staging", True)
    page.spring()
    assert page.has_trap
    page.set_beside("saving", True)
    assert page.beside == ("staging", "saving")
    with pytest.raises(TrapError):
        page.spring()
    assert not page.has_trap


def test_repeated_rollouts_are_redone_work_and_no_pace_of_a_step() -> None:
    page = RankPage.make()
    page.begin("start", 0.0)
    page.begin_step(1, 1.0)
    page.switch("rollout", 1.0)
    page.switch("reward", 31.0)
    page.switch("data", 41.0)
    page.repeat_rollouts()
    page.switch("redo", 41.0)
    page.begin_step(2, 43.0)
    totals = page.totals(43.0)
    assert (totals["rollout"], totals["reward"], totals["redo"]) == (0.0, 0.0, 42.0)
    assert page.slowest_seconds == 2.0
    page.switch("rollout", 43.0)
    page.break_off("regroup", 53.0, 53.0)
    assert page.totals(53.0)["redo"] == 52.0
    assert sum(page.totals(53.0).values()) == 53.0
