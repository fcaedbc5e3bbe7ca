"""What the member manager decides, from what it sees; without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from craton.orchestration.members import MemberView, OwnerView, decide
from craton.orchestration.members.decision import MAX_TRIES, NextMoves, StartMember, StopMember
from craton.telemetry.members import MemberSpec, MembersSpec, MembersStatus

ALIVE = MemberView("alive", has_begun=True, step=3)
SERVER = replace(ALIVE, serves=True)
OWNER = OwnerView(0)
ENDING = OwnerView(0, is_ending=True, reason="its owner run stops")


class Rehearsal:
    """Decides again and again, as time goes by."""

    def __init__(self, *members: MemberSpec, parallel: int = 0) -> None:
        self.spec = MembersSpec(list(members), parallel)
        self.status, self.now = MembersStatus(), 1000.0

    def see(self, owner: OwnerView = OWNER, busy: str = "", later: float = 1.0, **seen: MemberView) -> NextMoves:
        self.now += later
        views = {item.name: seen.get(item.name, MemberView()) for item in self.spec.members}
        places = self.spec.parallel or len(self.spec.members)
        decision = decide(self.spec, self.status, views, owner, busy, places, self.now)
        self.status = decision.status
        return decision

    def states(self) -> dict[str, str]:
        return {name: member.state for name, member in self.status.members.items()}

    def waits_for(self, name: str) -> str:
        return self.status.members[name].waits_for


def test_members_start_one_after_the_other_when_their_needs_are_met() -> None:
    manager = Rehearsal(
        MemberSpec("base"), MemberSpec("judge", {"base": "done"}), MemberSpec("probe", {"judge": "ready"})
    )
    assert manager.see().actions == [StartMember("base")]
    assert manager.see(busy="base").actions == []
    assert manager.see(base=replace(ALIVE, steps=9)).actions == []
    assert manager.waits_for("judge") == "member base: step 3 of 9"
    assert manager.see(base=MemberView("done")).actions == [StartMember("judge")]
    assert manager.see(base=MemberView("done"), judge=SERVER).actions == []
    assert manager.states() == {"base": "done", "judge": "running", "probe": "waiting"}
    ready = replace(SERVER, is_ready=True)
    assert manager.see(base=MemberView("done"), judge=ready).actions == [StartMember("probe")]
    assert manager.states()["judge"] == "ready"


def test_places_are_limited_and_each_has_a_share_of_the_machine() -> None:
    manager = Rehearsal(*(MemberSpec(name) for name in "abcd"), parallel=2)
    assert manager.see().actions == [StartMember("a")]
    assert manager.see(a=ALIVE).actions == [StartMember("b")]
    assert manager.see(a=ALIVE, b=ALIVE).actions == []
    assert manager.waits_for("c") == "a free place (2 of 2 in use)"
    assert manager.see(a=MemberView("done"), b=ALIVE).actions == [StartMember("c")]
    assert [manager.status.members[name].slot for name in "abc"] == [0, 1, 0]
    assert manager.see(a=MemberView("done"), b=MemberView("lost"), c=ALIVE, later=0.01).actions == []
    assert manager.waits_for("d") == "a free place (2 of 2 in use)", "a lost member keeps its place"
    assert manager.see(a=MemberView("done"), b=MemberView("lost"), c=ALIVE).actions == [StartMember("b")]
    assert manager.status.members["b"].slot == 1


def test_a_lost_member_is_resumed_until_it_makes_no_progress() -> None:
    manager = Rehearsal(MemberSpec("a"))
    manager.see()
    for step in range(1, 10):
        manager.see(a=replace(ALIVE, step=step))
        assert manager.see(a=MemberView("lost", step=step), later=0.01).actions == []
        assert manager.states() == {"a": "restarting"}
        assert manager.see(a=MemberView("lost", step=step), later=60.0).actions == [StartMember("a")]
    for _ in range(MAX_TRIES - 1):
        manager.see(a=replace(ALIVE, step=9))
        manager.see(a=MemberView("lost", step=9), later=0.01)
        assert manager.see(a=MemberView("lost", step=9), later=60.0).actions == [StartMember("a")]
    manager.see(a=replace(ALIVE, step=9))
    assert manager.see(a=MemberView("lost", step=9)).actions == []
    assert manager.states() == {"a": "failed"}
    assert "times in a row without a new step" in manager.status.members["a"].message
    assert manager.status.members["a"].restarts == 9 + MAX_TRIES - 1
    manager.see(a=ALIVE)
    assert manager.states() == {"a": "running"}, "a user has resumed it"


def test_a_member_that_runs_for_long_may_be_lost_again() -> None:
    manager = Rehearsal(MemberSpec("a"))
    manager.see()
    for _ in range(3 * MAX_TRIES):
        manager.see(a=ALIVE)
        manager.see(a=ALIVE, later=100.0)
        manager.see(a=MemberView("lost", step=3), later=0.01)
        assert manager.see(a=MemberView("lost", step=3), later=60.0).actions == [StartMember("a")]


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (MemberView("failed", message="no data"), "failed"),
        (MemberView("stopped", by_user=True, message="craton stop"), "stopped"),
        (MemberView("absent", refusal="no memory"), "failed"),
    ],
)
def test_what_failed_or_was_stopped_stays_so_until_the_owner_is_resumed(view: MemberView, state: str) -> None:
    manager = Rehearsal(MemberSpec("a"))
    manager.see()
    manager.see(a=ALIVE)
    for _ in range(3):
        assert manager.see(a=view, later=100.0).actions == []
        assert manager.states() == {"a": state}
    resumed = OwnerView(2)
    assert manager.see(resumed, a=replace(view, refusal="")).actions == [StartMember("a")]


def test_a_member_that_its_user_wants_again_is_started_whatever_became_of_it() -> None:
    manager = Rehearsal(MemberSpec("a"))
    manager.see()
    manager.see(a=MemberView("failed", message="no data"))
    asked = MemberView("lost", is_asked=True)
    assert manager.see(a=asked).actions == [StartMember("a")]
    assert manager.see(ENDING, a=asked).actions == []


def test_a_member_that_stopped_because_its_owner_was_away_is_resumed() -> None:
    manager = Rehearsal(MemberSpec("a"))
    manager.see()
    manager.see(a=ALIVE)
    stopped = MemberView("stopped", step=3, message="owner gone: ...")
    manager.see(a=stopped)
    assert manager.see(a=stopped, later=60.0).actions == [StartMember("a")]


def test_the_gate_opens_once_and_says_what_it_waits_for() -> None:
    manager = Rehearsal(MemberSpec("base", gate="done"), MemberSpec("judge", gate="ready"))
    manager.see()
    assert not manager.status.is_open
    manager.see(base=MemberView("done"), judge=SERVER)
    assert (manager.status.is_open, manager.status.waits_for) == (False, "waits for member judge: step 3")
    manager.see(base=MemberView("done"), judge=replace(SERVER, is_ready=True))
    assert (manager.status.is_open, manager.status.waits_for) == (True, "")
    manager.see(base=MemberView("done"), judge=MemberView("failed", message="no memory"))
    assert (manager.status.is_open, manager.status.failure) == (True, ""), "the owner goes on without it"
    manager.see(OwnerView(1), base=MemberView("done"), judge=MemberView("failed"))
    assert not manager.status.is_open, "a resumed owner waits again"


def test_a_failed_member_fails_the_gate_and_those_that_need_it() -> None:
    manager = Rehearsal(MemberSpec("base"), MemberSpec("judge", {"base": "done"}, gate="ready"), MemberSpec("side"))
    manager.see()
    manager.see(base=MemberView("failed", message="no data"), side=ALIVE)
    assert manager.status.failure == "member judge failed: member base failed"
    assert manager.states()["side"] == "running"


def test_members_stop_in_reverse_order_and_after_the_ranks_that_use_them() -> None:
    manager = Rehearsal(MemberSpec("base"), MemberSpec("judge", {"base": "ready"}, "ready"), MemberSpec("probe"))
    manager.see()
    alive = {"base": ALIVE, "judge": replace(SERVER, is_ready=True), "probe": ALIVE}
    manager.see(**alive)
    assert manager.see(ENDING, **alive).actions == [StopMember("probe", "its owner run stops")]
    alive["probe"] = MemberView("stopped")
    assert manager.see(ENDING, **alive).actions == [], "the owner's ranks may still ask the judge"
    over = replace(ENDING, is_over=True)
    assert manager.see(over, **alive).actions == [StopMember("judge", "its owner run stops")]
    alive["judge"] = replace(SERVER, is_stopping=True)
    assert not manager.see(over, **alive).actions
    alive["judge"] = MemberView("stopped")
    decision = manager.see(over, **alive)
    assert (decision.actions, decision.is_over) == ([StopMember("base", "its owner run stops")], False)
    alive["base"] = MemberView("stopped")
    assert manager.see(over, **alive).is_over
    assert not manager.see(over, busy="base", **alive).is_over


def test_without_a_readable_list_of_members_the_gate_stays_closed() -> None:
    manager = Rehearsal()
    manager.see()
    assert not manager.status.is_open
    assert manager.status.failure.startswith("its members.json is damaged")


def test_a_kept_member_is_done_and_takes_no_place() -> None:
    manager = Rehearsal(MemberSpec("base", gate="done", is_kept=True), MemberSpec("a", {"base": "done"}), parallel=1)
    assert manager.see().actions == [StartMember("a")]
    assert manager.states() == {"base": "done", "a": "starting"}
    assert manager.status.is_open
