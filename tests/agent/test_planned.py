"""What a node does when its ranks leave for a planned generation: who is told of, when they must be gone, the books."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craton.agent import Generation, Launch
from craton.agent.coordination import Coordinator, LeaderElection, Link, Message, RankFailure
from craton.agent.generation import create_generation
from craton.agent.lock import NodeLock
from craton.agent.membership import Membership
from craton.agent.node import FORK_SERVER_SECONDS, PLANNED_SECONDS, NodeProcesses
from craton.agent.processes import RankProcess
from craton.agent.records import NodeRecords
from craton.agent.slot import RankSlot
from craton.agent.supervisor import Supervisor
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.node import MetricsEndpoint
from craton.telemetry.rank import RankPage

TRAINS = Launch(1, ["a", "b", "c"], 1, ["x"], num_nodes=2, nursery=["x"], failure_grace_seconds=5.0)
COMMAND = Launch(1, ["a", "b", "c"], 1, ["x"], num_nodes=2, failure_grace_seconds=5.0, stop_grace_seconds=120.0)


class Rank(RankProcess):
    """A process that only notes which signals it is sent."""

    def send(self, number: signal.Signals) -> None:
        self.sent.add(number)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def add_rank(node: NodeProcesses, rank: int, generation: int) -> Rank:
    """A rank that has entered this generation, in a place of its own."""
    records, writing = os.pipe2(os.O_NONBLOCK)
    os.close(writing)
    orders = os.open(os.devnull, os.O_WRONLY)
    name, log = f"rank {rank}", Path(os.devnull)
    process = Rank(name, os.getpid(), log, 0, time.time(), rank=rank, records=records, orders=orders)
    page = RankPage.make()
    page.generation = generation
    node.places.append(RankSlot(page, process))
    return process


def at_work(run: RunDirectory, launch: Launch = TRAINS) -> tuple[NodeProcesses, Rank]:
    """Node b, whose rank 1 works in generation 1."""
    records = NodeRecords(run, "b", 1, MetricsEndpoint("run", "b", ""), lambda rank, line: None)
    node = NodeProcesses(run, launch, "b", "127.0.0.1", records, selectors.DefaultSelector())
    node.generation = Generation(1, ["a", "b"], 1, "")
    return node, add_rank(node, 1, 1)


def planned(number: int, *nodes: str) -> Generation:
    return Generation(number, [*nodes], 1, "", is_planned=True)


def test_a_rank_that_leaves_is_told_of_until_it_is_gone(run: RunDirectory) -> None:
    node, rank = at_work(run)
    assert node.status()["leaving"] == {}
    node.enter(planned(2, "a", "c"), ())
    status = node.status()
    assert (status["ranks"], list(status["leaving"])) == ({}, [1])
    assert status["leaving"][1][5] == 1, "the generation that it is still in"
    rank.ended = time.time()
    assert node.status()["leaving"] == {}


@pytest.mark.parametrize("nodes", [("a", "b"), ("a", "c")])
def test_a_rank_leaves_as_planned_in_its_own_time_while_it_moves(run: RunDirectory, nodes: tuple[str, ...]) -> None:
    node, rank = at_work(run)
    began = time.monotonic()
    node.enter(planned(2, *nodes), ())
    node.places[0].page.begin("checkpoint", began + 900)
    node.watch(began + 1800)
    assert not rank.sent, "longer than the grace, but it moved meanwhile"
    node.watch(began + 900 + PLANNED_SECONDS + 1)
    assert rank.sent == {signal.SIGKILL}


def test_a_rank_that_never_entered_a_generation_has_a_deadline(run: RunDirectory) -> None:
    node, rank = at_work(run)
    node.places[0].page.generation = -1
    began = time.monotonic()
    node.enter(planned(2, "a", "c"), ())
    node.watch(began + FORK_SERVER_SECONDS - 1)
    assert not rank.sent
    node.watch(began + FORK_SERVER_SECONDS + 1)
    assert rank.sent == {signal.SIGKILL}


@pytest.mark.parametrize(
    ("generation", "grace"),
    [
        (planned(2, "a", "b"), COMMAND.stop_grace_seconds),
        (planned(2, "a", "c"), COMMAND.stop_grace_seconds),
        (Generation(2, ["a", "b"], 1, ""), COMMAND.failure_grace_seconds),
    ],
)
def test_a_command_has_as_long_to_leave_as_planned_as_to_stop(
    run: RunDirectory, generation: Generation, grace: float
) -> None:
    node, rank = at_work(run, COMMAND)
    began = time.monotonic()
    node.enter(generation, ())
    node.watch(began + grace - 1)
    assert rank.sent == {signal.SIGTERM}
    node.watch(began + grace + 1)
    assert rank.sent == {signal.SIGTERM, signal.SIGKILL}


@pytest.fixture
def end_of(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RankFailure]]:
    """The faults that node b's agent reports when its rank ends on the way into a generation."""

    def end(
        generation: Generation, code: int, entered: int = 1, sent: tuple[signal.Signals, ...] = ()
    ) -> list[RankFailure]:
        supervisor = Supervisor(run, TRAINS, 1, NodeLock(run, "b"))
        faults: list[RankFailure] = []
        monkeypatch.setattr(supervisor, "_report", faults.append)
        node = supervisor._processes
        node.generation = Generation(1, ["a", "b"], 1, "")
        rank = add_rank(node, 1, entered)
        node.enter(generation, ())
        rank.code, rank.ended = code, time.time()
        rank.sent |= set(sent)
        supervisor._on_rank_end(rank)
        return faults

    return end


@pytest.mark.parametrize("nodes", [("a", "b"), ("a", "c")])
def test_a_rank_that_dies_before_it_has_left_as_planned_is_a_fault(
    end_of: Callable[..., list[RankFailure]], nodes: tuple[str, ...]
) -> None:
    for code, sent in ((-signal.SIGKILL, ()), (1, ()), (-signal.SIGKILL, (signal.SIGKILL,))):
        (fault,) = end_of(planned(2, *nodes), code, sent=sent)
        assert fault.generation == 2, "otherwise it would be old news"
    assert end_of(planned(2, *nodes), 0) == [], "it has done what it had to"
    assert end_of(planned(2, *nodes), -signal.SIGTERM, sent=(signal.SIGTERM,)) == []
    assert end_of(planned(2, *nodes), 1, entered=-1) == [], "nobody waits for it"
    assert end_of(Generation(2, [*nodes], 1, ""), -signal.SIGKILL) == [], "the others have heard that it is over"


def booked(run: RunDirectory) -> list[dict[str, Any]]:
    return read_lines(run.ledger_path("b"))[0]


def test_the_books_of_a_node_without_a_part_are_closed_until_it_has_one_again(run: RunDirectory) -> None:
    node, rank = at_work(run)
    node._records.generation = 2  # as it is where the agent coordinates
    node.enter(planned(2, "a", "c"), ())
    (line,) = booked(run)
    assert (line["rank"], line["generation"], line["ended"]) == (1, 1, "released")
    assert node._records.last_booked(1) == {}, "an agent that is started here later has nothing to go on with"
    rank.ended = time.time()
    page = node.places[0].page
    page.begin("checkpoint", time.monotonic() - 7200)
    page.switch("idle", time.monotonic() - 3600)
    node.book()
    assert len(booked(run)) == 1
    node.enter(planned(3, "a", "b"), ())
    node.book()
    line = booked(run)[1]
    assert (line["rank"], line["generation"]) == (1, 3)
    assert sum(line["seconds"].values()) < 60, "neither its last save nor its absence is booked"
    assert line["seconds"].keys() <= {"start"}


def test_a_node_that_returns_for_a_lost_one_books_since_then(run: RunDirectory) -> None:
    node, rank = at_work(run)
    node.enter(planned(2, "a", "c"), ())
    rank.ended = time.time()
    node.places[0].page.begin("idle", time.monotonic() - 3600)
    node.enter(Generation(3, ["a", "b"], 1, "", broke_at=1000.0, time=1020.0), ())
    node.book()
    assert sum(booked(run)[-1]["seconds"].values()) == pytest.approx(20.0, abs=1.0)


def test_a_rank_that_dies_when_its_books_are_closed_is_not_booked(
    run: RunDirectory, end_of: Callable[..., list[RankFailure]]
) -> None:
    end_of(Generation(2, ["a", "c"], 1, ""), -signal.SIGKILL)
    assert ["ended" in line for line in booked(run)] == [True]


@pytest.mark.parametrize(("nodes", "opened"), [(None, range(1, 2)), (["b", "a"], range(1)), (["a", "c"], range(0))])
def test_an_agent_that_is_started_again_books_for_the_ranks_it_has(
    run: RunDirectory, nodes: list[str] | None, opened: range
) -> None:
    if nodes is not None:
        create_generation(run, Generation(4, nodes, 1, ""))
    assert Supervisor(run, TRAINS, 1, NodeLock(run, "b"))._first_ranks == opened


def test_an_agent_that_is_started_again_where_others_work_hears_of_their_generation(run: RunDirectory) -> None:
    current = Generation(4, ["a", "c"], 1, "")
    create_generation(run, current)
    supervisor = Supervisor(run, TRAINS, 1, NodeLock(run, "b"))
    council = LeaderElection(run, TRAINS, 1, b"secret", "127.0.0.1", lambda: None)
    member = supervisor._membership = Membership(run, TRAINS, "b", council, supervisor._records, supervisor)
    member._coordinate(time.monotonic())  # it may coordinate all the same
    assert supervisor.generation == current
    heard: list[Message] = []

    class Wire(Link):
        def __init__(self, node: str) -> None:
            self.node = node

        def send(self, message: Message) -> bool:
            heard.append(message)
            return True

    member._coordinator = Coordinator(TRAINS, "b", current, 5, time.monotonic())
    for node, number, told in (("b", -1, True), ("c", -1, False), ("c", 3, True), ("b", 4, False)):
        heard.clear()
        member._hear_member(Wire(node), {"is": "status", "generation": number}, time.monotonic())
        assert any(message["is"] == "generation" for message in heard) is told, (node, number)
    member.close()
