"""When the coordinator begins a generation, blames a rank, gives up or finishes; no process, no waiting."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from coordinated import EPOCH, Agents, two_at_work

from craton.agent.coordination import Fail, Finish, RankProgress, StartGeneration
from craton.agent.coordination.coordinator import ECHO_SECONDS
from craton.agent.coordination.hangs import HANG_SECONDS, LIMITS


@pytest.fixture
def two() -> Agents:
    return two_at_work()


def test_a_run_begins_when_all_nodes_are_ready() -> None:
    agents = Agents(ranks_per_node=2)
    agents.join("a")
    assert agents.pass_time(5) == []
    agents.join("b", ready=False)
    assert agents.pass_time(5) == []
    agents.join("b")
    generation = agents.started().generation
    assert (generation.number, generation.nodes, generation.world) == (1, ["a", "b"], 4)
    assert (generation.reason, generation.is_planned, generation.reached, generation.broke_at) == ("start", False, 0, 0)
    assert generation.store == "a:1"
    assert generation.keepers == {"a": "a:2", "b": "b:2"}
    assert agents.pass_time(20) == []


def test_nodes_that_never_come_end_a_run_with_their_names() -> None:
    agents = Agents(give_up_seconds=60.0)
    agents.join("b")
    (fail,) = agents.pass_time(61)
    assert isinstance(fail, Fail)
    assert fail.text.startswith("a did not come back within 1m, and the job needs 2 nodes")
    assert agents.pass_time(100) == [], "a run fails once"


def test_a_rank_that_failed_begins_a_new_generation_with_the_same_nodes(two: Agents) -> None:
    two.fail("rank 1 on b exited with code 1", generation=1)
    moment = EPOCH + two.now
    start = two.started()
    assert (start.generation.number, start.generation.nodes) == (2, ["a", "b"])
    assert start.generation.reason == "rank 1 on b exited with code 1"
    assert start.generation.reached == 9, "the tenth step was under way"
    assert start.generation.broke_at == moment
    assert not start.generation.is_planned
    assert two.pass_time(20) == []


def test_faults_of_an_earlier_generation_are_old_news(two: Agents) -> None:
    two.fail(generation=1)
    two.started()
    two.fail(generation=1)
    two.fail(generation=0)
    assert two.pass_time(3) == []
    two.fail(generation=2)
    assert two.started().generation.number == 3


def test_two_ranks_that_fail_at_once_are_one_failure(two: Agents) -> None:
    two.fail("rank 0 exited")
    two.fail("rank 1 exited")
    two.fail("rank 1 exited")
    assert two.started().generation.reason == "rank 0 exited; rank 1 exited"


def test_a_broken_connection_waits_for_its_cause(two: Agents) -> None:
    two.fail("rank 0 broke off", is_echo=True)
    assert two.tick(ECHO_SECONDS / 2) == []
    two.fail("rank 1 was killed")
    assert two.started().generation.reason == "rank 1 was killed"
    two.fail("rank 0 broke off", is_echo=True)
    assert two.tick(ECHO_SECONDS / 2) == []
    assert two.started().generation.reason == "rank 0 broke off", "a cause that nobody tells is not waited for"


def test_a_fault_of_the_job_itself_ends_the_run(two: Agents) -> None:
    two.fail("rank 0 on a exited with code 3", is_final=True)
    two.fail("rank 1 on b was killed")
    assert two.tick() == [Fail("rank 0 on a exited with code 3")]


def test_who_hangs_is_the_laggard_by_its_own_limit(two: Agents) -> None:
    two.work(10, age=HANG_SECONDS + 1)
    two.rank_does(0, "checkpoint", 20.0)  # rank 1 waits for it, and it may take its time
    assert two.pass_time(1) == []
    two.rank_does(0, "checkpoint", LIMITS["checkpoint"] + 1)
    start = two.started()
    assert start.end == (0,)
    assert start.generation.reason == "rank 0 hangs in checkpoint at step 10: no progress for 15m 1s"
    assert start.generation.broke_at == pytest.approx(EPOCH + two.now - 901)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((8, 8), "all 2 ranks hang in productive at step 10: no progress for 5.00 s (a.py:8 in synchronize)"),
        ((8, 9), "rank 1 hangs in productive at step 10: no progress for 5.00 s (a.py:9 in synchronize)"),
    ],
)
def test_no_rank_is_blamed_if_all_wait_in_the_same_line(two: Agents, lines: tuple[int, int], reason: str) -> None:
    for node, rank, line in zip("ab", (0, 1), lines, strict=True):
        age, frame = HANG_SECONDS + 1 if rank else HANG_SECONDS + 0.9, f"a.py:{line} in synchronize"
        status = RankProgress("productive", 10, age, 0.1, generation=two.current.number, is_waiting=True, frame=frame)
        two.there[node]["ranks"] = {rank: astuple(status)}
    start = two.started()
    assert start.generation.reason == reason
    assert start.end == (1,), "one of them is ended"


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, HANG_SECONDS), (10.0, 25.0)])
def test_a_step_hangs_when_it_takes_much_longer_than_others(two: Agents, step_seconds: float, limit: float) -> None:
    two.work(10, age=limit - 0.02, seconds=step_seconds)
    two.rank_does(1, "productive", limit - 0.01)
    assert two.tick() == []
    two.work(10, age=limit + 0.01, seconds=step_seconds)
    two.rank_does(1, "productive", limit + 0.02)
    assert two.started().end == (1,)


def test_a_first_step_whose_length_is_unknown_has_time(two: Agents) -> None:
    two.work(1, age=100.0, seconds=0.0)
    assert two.tick() == []


@pytest.mark.parametrize(("patience", "limit"), [(60.0, 60.0), (1.0, 1.0), (0.0, HANG_SECONDS)])
def test_a_rank_may_say_how_long_a_step_may_take(two: Agents, patience: float, limit: float) -> None:
    for age, hangs in ((limit - 0.01, False), (limit + 0.01, True)):
        two.work(10, age=age)
        for status in two.there.values():
            status["ranks"] = {rank: (*values, patience) for rank, values in status["ranks"].items()}
        assert bool(two.tick()) is hangs


def test_a_stopped_rank_hangs_whatever_it_said_before(two: Agents) -> None:
    two.work(10, age=0.1)
    two.rank_does(1, "productive", HANG_SECONDS + 0.1, is_stopped=True)
    two.there["b"]["ranks"][1] += (60.0,)
    assert two.started().end == (1,)


def test_a_rank_stopped_by_a_signal_is_the_one_that_hangs(two: Agents) -> None:
    two.work(10, age=9.0)
    two.rank_does(1, "checkpoint", HANG_SECONDS - 0.1, is_stopped=True)
    assert two.tick() == [], "neither may be blamed yet"
    two.rank_does(1, "checkpoint", HANG_SECONDS + 0.1, is_stopped=True)
    start = two.started()
    assert start.end == (1,)
    assert "rank 1 is stopped by a signal at step 10" in start.generation.reason


def test_nobody_hangs_while_a_rank_is_on_its_way(two: Agents) -> None:
    two.fail()
    two.started()  # the ranks are still those of generation 1
    for status in two.there.values():
        status["ranks"] = {rank: (*values[:2], 1e4, *values[3:]) for rank, values in status["ranks"].items()}
    assert two.pass_time(10) == []


def test_failures_at_one_step_end_the_run() -> None:
    agents = Agents(tries=2)
    agents.join("a", "b")
    agents.started()
    agents.work(10)
    agents.tick()
    for number in (2, 3):
        agents.fail(f"it broke in {number - 1}")
        assert agents.started().generation.number == number
        agents.work(10)
        agents.tick()
    agents.fail("it broke in 3")
    (fail,) = agents.tick()
    assert isinstance(fail, Fail)
    assert fail.text == "it broke in 3\nthis was failure 3 in a row at step 10 without a new step; not retried again"


def test_a_new_step_forgives_failures() -> None:
    agents = Agents(tries=1)
    agents.join("a", "b")
    agents.started()
    for step in range(10, 20):
        agents.work(step)
        agents.tick()
        agents.fail()
        assert agents.started().generation.reached == step - 1
    agents.work(15)  # back behind where it was: no progress
    agents.tick()
    agents.fail()
    assert isinstance(agents.tick()[0], Fail)


def test_without_tries_the_first_failure_ends_the_run() -> None:
    agents = Agents(tries=0)
    agents.join("a", "b")
    agents.started()
    agents.fail("rank 0 on a exited with code 1 (generation 1)")
    assert agents.tick() == [Fail("rank 0 on a exited with code 1 (generation 1)")]


def test_a_run_is_done_when_every_node_is(two: Agents) -> None:
    two.there["a"] |= {"done_with": 1, "ranks": {}}
    assert two.pass_time(20) == []
    two.there["b"] |= {"done_with": 0, "ranks": {}}
    assert two.tick() == [], "done with an earlier generation"
    two.there["b"] |= {"done_with": 1}
    assert two.tick() == [Finish()]
    assert two.pass_time(20) == []


def test_a_node_to_be_avoided_is_left_for_a_spare_without_a_fault() -> None:
    agents = Agents(nodes=["a", "b", "c"], num_nodes=2)
    agents.join("a", "b", "c")
    agents.started()
    agents.work(10)
    agents.coordinator.avoid(frozenset({"b"}))
    generation = agents.started().generation
    assert generation.nodes == ["a", "c"]
    assert (generation.is_planned, generation.broke_at, generation.failures) == (True, 0.0, 0)
    assert generation.reason == "b replaced by a spare"
    agents.work(11)
    assert agents.pass_time(20) == [], "and not taken back"
    agents.coordinator.avoid(frozenset())
    assert agents.pass_time(20) == [], "it is a spare again, and nobody moves for that"


def test_a_node_to_be_avoided_is_kept_where_nobody_can_take_its_place() -> None:
    agents = Agents(nodes=["a", "b", "c"], num_nodes=2)
    agents.join("a", "b")
    agents.pass_time(61)
    agents.work(10)
    agents.coordinator.avoid(frozenset({"b"}))
    assert agents.pass_time(20) == []
    agents.join("c")
    assert agents.started().generation.nodes == ["a", "c"]
    agents.work(12)
    agents.lose("c")
    agents.pass_time(1.0)
    assert agents.current.nodes == ["a", "b"], "better a doubtful node than none"


def moving(**launch: Any) -> Agents:
    """Node b leaves for the spare c: nobody has left generation 1 yet, and c has entered generation 2."""
    agents = Agents(**{"nodes": ["a", "b", "c"], "num_nodes": 2, "nursery": ["x"], **launch})
    agents.join("a", "b", "c")
    agents.started()
    agents.work(10)
    agents.coordinator.avoid(frozenset({"b"}))
    assert agents.started().generation.nodes == ["a", "c"]
    agents.there["a"] |= {"generation": 2, "ranks": {0: ("productive", 10, 0.1, 0.1, False, 1)}}
    agents.there["b"] |= {"generation": 2, "ranks": {}, "leaving": {1: ("productive", 10, 0.1, 0.1, False, 1)}}
    agents.there["c"] |= {"generation": 2, "ranks": {1: ("start", 0, 1e4, 0.0, False, 2)}}
    assert agents.pass_time(2) == [], "the spare waits for them"
    return agents


@pytest.mark.parametrize(
    ("node", "name", "end"), [("a", "rank 0", (0,)), ("b", "rank 1, which leaves b,", ())]
)  # rank 1 of the next generation is on c, and not to be ended
def test_a_rank_that_hangs_before_it_leaves_as_planned_is_seen(node: str, name: str, end: tuple[int, ...]) -> None:
    agents = moving()
    (ranks,) = (ranks for key in ("ranks", "leaving") if (ranks := agents.there[node].get(key)))
    (rank,) = ranks
    ranks[rank] = ("checkpoint", 10, LIMITS["checkpoint"] - 1, 0.1, False, 1)
    assert agents.pass_time(2) == [], "a save may take its time"
    agents.there["a"]["ranks"] = {0: ("productive", 10, HANG_SECONDS + 0.5, 0.1, False, 1)}
    agents.there["b"]["leaving"] = {1: ("productive", 10, HANG_SECONDS + 0.5, 0.1, False, 1)}
    agents.there[node]["ranks" if node == "a" else "leaving"][rank] = (
        "productive",
        10,
        HANG_SECONDS + 1,
        0.1,
        False,
        1,
    )
    start = agents.started()
    assert start.generation.reason == f"{name} hangs in productive at step 10: no progress for 5.00 s"
    assert (start.generation.is_planned, start.generation.nodes, start.end) == (False, ["a", "c"], end)


def test_a_rank_that_hangs_when_nobody_waits_for_it_any_more_is_let_be() -> None:
    agents = moving()
    agents.there["a"]["ranks"] = {0: ("regroup", 10, 0.1, 0.0, False, 2)}
    agents.there["b"]["leaving"] = {1: ("regroup", 10, 1e4, 0.0, False, 1)}
    agents.there["c"]["ranks"] = {1: ("start", 0, 0.1, 0.0, False, 2)}
    assert agents.pass_time(10) == []
    agents.lose("b")
    assert agents.pass_time(10) == []


def test_a_command_that_was_told_to_end_for_a_planned_generation_has_its_grace() -> None:
    agents = moving(nursery=[])
    agents.there["a"]["ranks"] = {0: ("regroup", 10, 1e4, 0.1, False, 1)}
    assert agents.pass_time(10) == []


def test_a_fault_of_a_rank_that_leaves_as_planned_is_heard_until_all_have_left() -> None:
    agents = moving()
    agents.fail("rank 0 broke off", generation=0)
    assert agents.tick() == []
    agents.fail("rank 0 broke off", generation=1)
    start = agents.started()
    assert (start.generation.reason, start.generation.is_planned) == ("rank 0 broke off", False)
    agents = moving()
    agents.work(11)
    agents.tick()
    agents.fail("rank 0 broke off", generation=1)
    assert agents.pass_time(2) == []


def test_a_node_that_is_lost_while_it_leaves_as_planned_is_a_fault() -> None:
    agents = moving()
    agents.lose("b")
    (start,) = agents.pass_time(1)
    assert isinstance(start, StartGeneration)
    assert start.generation.reason == "b is lost: its agent is gone"
    assert not start.generation.is_planned


def test_one_planned_generation_is_entered_before_the_next_begins() -> None:
    agents = moving(nodes=["a", "b", "c", "d"])
    agents.join("d")
    agents.coordinator.avoid(frozenset({"b", "c"}))
    assert agents.pass_time(10) == [], "c sits in the rendezvous of generation 2, where a must come first"
    agents.work(11)
    generation = agents.started().generation
    assert (generation.number, generation.nodes, generation.is_planned) == (3, ["a", "d"], True)
    agents.fail("rank 0 exited")
    assert agents.started().generation.number == 4, "a fault waits for nobody"


def test_a_coordinator_that_did_not_run_blames_nobody_for_its_silence(two: Agents) -> None:
    """As after a machine was frozen: all that the others said meanwhile is still to be read."""
    two.now += 60.0
    two.coordinator.heard("a", two.there["a"], two.now)
    assert two.coordinator.tick(two.now, EPOCH + two.now) == []
    del two.there["b"]
    assert [start.generation.reason for start in two.pass_time(30) if isinstance(start, StartGeneration)] == []
    assert "no heartbeat" in two.others[0].text  # type: ignore[union-attr]
