"""Which nodes the coordinator takes when nodes are lost, join, are resized, or it takes over from another."""

from __future__ import annotations

from typing import Any

import pytest
from coordinated import EPOCH, Agents, two_at_work
from hypothesis import example, given, settings
from hypothesis import strategies as st

from craton.agent import Generation, Launch
from craton.agent.coordination import SILENT_SECONDS, Fail, Notice, Release, StartGeneration
from craton.agent.coordination.coordinator import COME_OVER_SECONDS, RELEASE_SECONDS, RETURN_SECONDS, SETTLE_SECONDS


@pytest.fixture
def two() -> Agents:
    return two_at_work()


def elastic(*nodes: str, **settings: Any) -> Agents:
    """A run of four nodes that goes on with three or two."""
    defaults = {"nodes": [*"abcd"], "min_nodes": 2, "layouts": {"2": {"fsdp": 2}, "3": {"fsdp": 3}}}
    agents = Agents(**{**defaults, "spare_seconds": 5.0, **settings})
    agents.join(*nodes)
    return agents


def test_an_agent_that_dials_again_at_once_costs_nothing() -> None:
    agents = Agents(nodes=["a", "b", "c"], num_nodes=2)  # not even with a spare at hand
    agents.join("a", "b", "c")
    agents.started()
    agents.work(10)
    agents.tick()
    status = agents.there["b"]
    agents.lose("b")
    assert agents.tick(RETURN_SECONDS * 0.9) == []
    agents.there["b"] = status
    assert agents.pass_time(10) == []


def test_an_agent_that_was_started_anew_has_lost_its_ranks(two: Agents) -> None:
    two.lose("b")
    two.tick(RETURN_SECONDS * 1.1)
    two.join("b")
    start = two.started()
    assert start.generation.nodes == ["a", "b"]
    assert "b is lost: its agent is gone" in start.generation.reason


def test_a_silent_agent_is_gone(two: Agents) -> None:
    del two.there["b"]
    assert two.pass_time(SILENT_SECONDS - 0.1) == []
    (notice,) = two.pass_time(0.5)
    assert isinstance(notice, Notice)
    assert notice.event == "waiting_for_nodes"
    assert "b is lost: no heartbeat for 5 s; waiting" in notice.text


def test_a_spare_takes_the_seat_of_a_lost_node() -> None:
    agents = Agents(nodes=["a", "b", "c", "d"], num_nodes=3)
    agents.join("a", "b", "c", "d")
    assert agents.started().generation.nodes == ["a", "b", "c"]
    agents.work(10)
    agents.tick()
    agents.lose("b")
    assert agents.tick(RETURN_SECONDS / 2) == []
    lost_at = EPOCH + agents.now - RETURN_SECONDS / 2
    start = agents.started()
    assert start.generation.nodes == ["a", "d", "c"], "the others keep their ranks"
    assert start.generation.broke_at == pytest.approx(lost_at)
    agents.work(11)
    agents.join("b")
    assert agents.pass_time(10) == [], "who returns is the next spare"


def test_without_a_spare_the_node_is_waited_for(two: Agents) -> None:
    two.lose("b")
    two.pass_time(100)
    assert len(two.starts) == 1
    assert [type(action) for action in two.others] == [Notice], "said once"
    two.join("b")
    assert two.started().generation.nodes == ["a", "b"]


def test_a_node_that_stays_away_ends_the_run() -> None:
    agents = Agents(give_up_seconds=60.0)
    agents.join("a", "b")
    agents.started()
    agents.lose("b")
    (notice, fail) = agents.pass_time(62)
    assert isinstance(notice, Notice)
    assert isinstance(fail, Fail)
    assert "b did not come back within 1m" in fail.text
    assert "allow fewer nodes with `cluster: NAME x 1..2`" in fail.text


def test_an_elastic_run_goes_on_with_fewer_after_a_while() -> None:
    agents = elastic(*"abcd")
    agents.started()
    agents.work(10)
    agents.tick()
    agents.lose("b")
    agents.pass_time(5.0)
    assert len(agents.starts) == 1
    (start,) = agents.pass_time(1.0)
    assert isinstance(start, StartGeneration)
    assert start.generation.nodes == ["a", "c", "d"]
    assert start.generation.layout == {"fsdp": 3}
    assert not start.generation.is_planned


def test_an_elastic_run_shrinks_to_a_size_it_has_a_layout_for() -> None:
    agents = elastic(*"abcd", layouts={"2": {"fsdp": 2}})
    agents.started()
    agents.lose("b")
    agents.pass_time(7.0)
    assert agents.current.nodes == ["a", "c"]


def test_below_its_smallest_size_an_elastic_run_waits_and_gives_up() -> None:
    agents = elastic(*"abcd", give_up_seconds=30.0, layouts={"1": {}, "2": {"fsdp": 2}})
    agents.started()
    for node in "bcd":
        agents.lose(node)
    agents.pass_time(29)
    assert len(agents.starts) == 1
    assert isinstance(agents.pass_time(3)[-1], Fail)


def test_a_run_that_shrank_grows_when_nodes_have_settled() -> None:
    agents = elastic(*"abcd")
    agents.started()
    agents.lose("c")
    agents.lose("d")
    agents.pass_time(7)
    assert agents.current.nodes == ["a", "b"]
    agents.work(10)
    agents.join("d")
    assert agents.pass_time(SETTLE_SECONDS - 0.1) == []
    (start,) = agents.pass_time(0.5)
    assert isinstance(start, StartGeneration)
    assert (start.generation.nodes, start.generation.layout) == (["a", "b", "d"], {"fsdp": 3})
    assert start.generation.is_planned
    assert start.generation.reason == "grown from 2 to 3 nodes"
    agents.work(20)
    agents.join("c")
    agents.pass_time(SETTLE_SECONDS + 0.5)
    assert agents.current.nodes == ["a", "b", "d", "c"], "whoever works keeps its rank"
    assert agents.current.layout is None, "the plan's own"


def test_a_resize_down_releases_nodes_when_the_others_move() -> None:
    agents = elastic(*"abcd")
    agents.started()
    agents.work(10)
    agents.coordinator.resize(2, {"tp": 2})
    start = agents.started()
    assert (start.generation.nodes, start.generation.layout) == (["a", "b"], {"tp": 2})
    assert start.generation.is_planned
    assert start.generation.reason == "shrunk from 4 to 2 nodes"
    agents.work(10, kind="restore")
    assert agents.pass_time(RELEASE_SECONDS + 1) == []
    agents.work(11)
    assert agents.pass_time(RELEASE_SECONDS - 0.5) == []
    assert Release(("c", "d")) in agents.pass_time(1.0)
    for node in "cd":
        agents.lose(node)
    assert agents.pass_time(20) == []


@pytest.mark.parametrize("kind", ["data", "checkpoint", "evaluate", "compile"])
def test_nodes_are_released_whatever_a_rank_does_between_two_steps(kind: str) -> None:
    agents = elastic(*"abcd")
    agents.started()
    agents.work(10)
    agents.coordinator.resize(2, None)
    agents.started()
    agents.work(10)
    assert agents.pass_time(RELEASE_SECONDS + 1) == [], "no new step"
    agents.work(11, kind=kind)
    assert Release(("c", "d")) in agents.pass_time(RELEASE_SECONDS + 0.5)


def test_of_the_nodes_that_are_left_over_those_to_be_avoided_are_released() -> None:
    agents = elastic(*"abcde", nodes=[*"abcde"], num_nodes=4)
    agents.started()
    agents.work(10)
    agents.coordinator.avoid(frozenset({"c"}))
    agents.started()
    agents.work(11)
    agents.coordinator.resize(2, None)
    agents.started()
    agents.work(12)
    agents.tick()
    agents.work(13)
    assert agents.pass_time(RELEASE_SECONDS + 0.5) == [Release(("e", "c"))]
    agents.coordinator.avoid(frozenset({"d"}))
    assert agents.pass_time(2) == [], "the last spare is kept"


def test_a_resize_up_waits_for_the_new_nodes() -> None:
    agents = Agents(nodes=["a"], min_nodes=1)
    agents.join("a")
    agents.started()
    agents.work(10)
    agents.coordinator.launch = Launch(
        1, ["a", "b", "c"], 1, ["x"], num_nodes=1, min_nodes=1, layouts={"2": {"fsdp": 2}, "3": {"fsdp": 3}}
    )
    agents.coordinator.resize(3, {"pp": 3})
    assert agents.pass_time(5) == []
    agents.join("b", "c")
    (start,) = agents.pass_time(SETTLE_SECONDS + 0.5)
    assert isinstance(start, StartGeneration)
    assert (start.generation.nodes, start.generation.layout) == (["a", "b", "c"], {"pp": 3})
    agents.work(12)
    assert not [action for action in agents.pass_time(RELEASE_SECONDS + 2) if isinstance(action, Release)]


def taken_over() -> Agents:
    """Node b takes over generation 4, in which step 19 was reached."""
    current = Generation(4, ["a", "b"], 1, "a:1", reached=19, by="a")
    agents = Agents(current, me="b")
    agents.join("b", generation=4)
    return agents


def test_a_generation_under_way_is_taken_over_as_it_is() -> None:
    agents = taken_over()
    agents.join("a", generation=4)
    agents.work(25)
    assert agents.pass_time(20) == []
    agents.fail(generation=4)
    generation = agents.started().generation
    assert (generation.number, generation.reached, generation.by) == (5, 24, "b")


def test_a_node_that_does_not_come_over_is_lost() -> None:
    agents = taken_over()
    agents.work(25)
    assert agents.pass_time(SILENT_SECONDS - 0.1) == []
    (notice,) = agents.pass_time(0.5)
    assert isinstance(notice, Notice)
    assert "a is lost: its agent is gone" in notice.text


def test_a_node_that_comes_over_without_its_ranks_has_lost_them() -> None:
    agents = taken_over()
    agents.work(25)
    agents.tick()
    agents.join("a")
    start = agents.started()
    assert (start.generation.number, start.generation.nodes, start.generation.reached) == (5, ["a", "b"], 24)
    assert start.generation.reason == "a is lost: its agent was restarted"


def test_nodes_that_are_coming_over_are_not_replaced() -> None:
    current = Generation(4, ["a", "b", "c"], 1, "a:1", reached=19, by="a")
    agents = Agents(current, me="b", nodes=["a", "b", "c", "d", "e"], num_nodes=3)
    agents.join("b", "d", "e", generation=4)
    agents.work(25)
    agents.fail("rank 1 broke off", generation=4)
    assert agents.tick() == []
    agents.join("c", generation=4)
    agents.work(25)
    (start,) = agents.pass_time(COME_OVER_SECONDS)
    assert isinstance(start, StartGeneration)
    assert start.generation.nodes == ["d", "b", "c"]


NODES = [*"abcd"]
happening = st.one_of(
    st.tuples(st.sampled_from(["join", "lose"]), st.sets(st.sampled_from(NODES), min_size=1)),
    st.tuples(st.just("fault"), st.integers(-2, 0)),  # counted from the present generation
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.5, 4.0])),
)


@settings(max_examples=300)
@given(
    num_nodes=st.integers(2, 4),
    min_nodes=st.integers(0, 3),
    sizes=st.sets(st.integers(1, 3)),
    tries=st.integers(0, 3),
    happenings=st.lists(happening, max_size=25),
)
@example(  # three failures at step 1, a step, a planned generation, and the first failure at step 2
    num_nodes=2,
    min_nodes=1,
    sizes={1},
    tries=3,
    happenings=[
        ("lose", {"a"}),
        ("lose", {"b", "c"}),
        ("join", {"a"}),
        ("fault", 0),
        ("fault", -1),
        ("step", 1),
        ("join", {"a"}),
        ("fault", 0),
    ],
)
def test_whatever_happens(
    num_nodes: int, min_nodes: int, sizes: set[int], tries: int, happenings: list[tuple[str, Any]]
) -> None:
    allowed = {num_nodes, *(size for size in sizes if 0 < min_nodes <= size <= num_nodes)}
    agents = Agents(
        nodes=NODES,
        num_nodes=num_nodes,
        tries=tries,
        min_nodes=min_nodes,
        spare_seconds=2.0,
        layouts={str(size): {"fsdp": size} for size in sizes},
    )
    agents.join(*NODES)
    agents.tick()
    step, failures, failed_at = 1, 0, -1
    for what, value in happenings:
        if what == "join":
            agents.join(*(node for node in sorted(value) if node not in agents.there))
        elif what == "lose":
            for node in sorted(value & agents.there.keys()):
                agents.lose(node)
        elif what == "fault":
            agents.fail(generation=agents.current.number + value)
        elif what == "step":
            step += value
        if agents.coordinator.members.keys() >= set(agents.current.nodes) <= agents.there.keys():
            agents.work(step)
        before = len(agents.starts)
        agents.pass_time(value if what == "wait" else 3.0 if what == "lose" else 0.25)
        for start in agents.starts[before:]:
            generation = start.generation
            assert generation.number == agents.starts[agents.starts.index(start) - 1].generation.number + 1
            assert len(set(generation.nodes)) == len(generation.nodes) in allowed
            assert generation.layout == agents.launch.layouts.get(str(len(generation.nodes)))
            assert set(generation.nodes) <= agents.there.keys(), "all of them are there"
            if not generation.is_planned:  # progress made before a planned generation counts as progress, too
                failures = failures + 1 if generation.reached == failed_at else 1
                failed_at = generation.reached
                assert failures <= tries, "a generation is begun after as many failures at a step as are allowed"
    agents.join(*(node for node in NODES if node not in agents.there))
    agents.pass_time(6)
    agents.work(step)  # all are in the present generation, so that it may grow
    agents.pass_time(2)
    if any(isinstance(action, Fail) for action in agents.others):
        return
    assert len(agents.current.nodes) == num_nodes
    calm = len(agents.starts)
    agents.work(step + 1)
    agents.pass_time(8)
    assert len(agents.starts) == calm, "a run that is whole and without faults goes on as it is"
