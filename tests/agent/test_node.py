"""What an agent says of the ranks of a plain command, and that no word of a fault is lost."""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Generation, Launch
from craton.agent.coordination import LeaderElection, Link, RankFailure
from craton.agent.coordination.wire import Listener, dial
from craton.agent.generation import create_generation
from craton.agent.lock import NodeLock
from craton.agent.membership import Membership
from craton.agent.node import NodeProcesses
from craton.agent.processes import reap
from craton.agent.records import NodePublisher, NodeRecords
from craton.agent.supervisor import Supervisor
from craton.telemetry import RunDirectory
from craton.telemetry.node import MetricsEndpoint
from craton.telemetry.rank import RankPage

IDLER = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def make_node(run: RunDirectory, launch: Launch, host: str = "127.0.0.1") -> NodeProcesses:
    records = NodeRecords(run, "a", 1, MetricsEndpoint("run", "a", ""), lambda rank, line: None)
    return NodeProcesses(run, launch, "a", host, records, selectors.DefaultSelector())


@pytest.fixture
def node(run: RunDirectory) -> Iterator[NodeProcesses]:
    """A node whose rank does nothing, in generation 1, an hour after its agent began."""
    made = make_node(run, Launch(1, ["a"], 1, IDLER))
    made.open_books(range(1))
    made.places[0].page.begin("start", time.monotonic() - 3600)
    made.enter(Generation(1, ["a"], 1, ""), ())
    yield made
    end(made)


def end(node: NodeProcesses) -> None:
    for child in node.children:
        child.send(signal.SIGKILL)

    def is_over() -> bool:
        reap(node.children)
        return not any(child.is_running for child in node.children)

    wait_until(is_over, "the rank has ended")


def age(node: NodeProcesses) -> float:
    """Seconds since the rank showed progress, as the coordinator is told."""
    return float(node.status()["ranks"][0][2])


def test_a_command_that_never_shows_progress_does_not_hang(node: NodeProcesses) -> None:
    assert node.status()["ranks"][0][0] == "productive"
    assert age(node) == 0.0
    rank = RankPage(node.places[0].page.descriptor)
    rank.beat()
    wait_until(lambda: age(node) > 0.05, "who has shown progress is watched from then on")


def test_a_command_that_never_shows_progress_is_watched_while_a_signal_stops_it(node: NodeProcesses) -> None:
    process = node.places[0].process
    assert process is not None
    process.send(signal.SIGSTOP)
    wait_until(lambda: age(node) > 0.05)
    assert node.rank_status()[0].is_stopped
    process.send(signal.SIGCONT)
    wait_until(lambda: age(node) == 0.0)


def test_every_generation_is_offered_another_port(node: NodeProcesses) -> None:
    first = node.status()["store"]
    host, _, port = first.rpartition(":")
    with socket.create_server((host, int(port))):
        node.enter(Generation(2, ["a"], 1, first), ())
        assert node.status()["store"] not in ("", first)


def test_the_first_generation_meets_where_the_launch_says(run: RunDirectory) -> None:
    launch = Launch(3, ["a"], 1, IDLER)
    create_generation(run, Generation(2, ["a"], 1, ""))  # of an earlier launch
    assert make_node(run, launch).status()["store"] == ""
    create_generation(run, Generation(3, ["a"], 1, ""))
    assert make_node(run, launch).status()["store"].startswith("127.0.0.1:"), "an agent that was started again"
    assert make_node(run, launch, host="0.0.0.0").status()["store"] == "", "nobody can be told to dial that"


def test_whoever_coordinates_next_is_told_of_faults_that_nothing_came_of(run: RunDirectory) -> None:
    launch = Launch(1, ["a", "b"], 1, IDLER)
    supervisor = Supervisor(run, launch, 1, NodeLock(run, "b"))
    council = LeaderElection(run, launch, 1, b"secret", "127.0.0.1", lambda: None)
    member = supervisor._membership = Membership(run, launch, "b", council, supervisor._records, supervisor)
    supervisor._processes.generation = Generation(4, ["a", "b"], 1, "")
    links: Queue[Link] = Queue()
    listener = Listener("127.0.0.1", b"secret", links.put)

    def follow() -> Link:
        link = dial(f"127.0.0.1:{listener.port}", b"secret")
        assert link is not None
        member._follow(link, time.monotonic())
        return links.get(timeout=PATIENCE_SECONDS)

    member.report(RankFailure("rank 1 on b exited", 5.0))  # there is nobody to tell
    told = {"is": "fault", "text": "rank 1 on b exited", "generation": 4}
    first = follow()
    message = first.receive(10)
    assert message is not None
    assert told.items() <= message.items()
    first.close()  # it is gone before it did anything
    message = follow().receive(10)
    assert message is not None
    assert told.items() <= message.items()
    supervisor.enter(Generation(5, ["a"], 1, ""), ())
    last = follow()
    assert member._leader is not None
    member._leader.send({"is": "status"})
    assert last.receive(10) == {"is": "status"}, "in the next generation it is old"
    member.close()
    listener.close()


def test_an_agent_that_starts_anew_knows_the_newest_checkpoints(run: RunDirectory) -> None:
    """Also those that were told where rank 0 was before; not those of an earlier launch, after which the run stood."""
    launch = Launch(1, ["a", "b"], 1, IDLER)
    for number, nodes in enumerate((["b", "a"], ["a", "b"], ["b", "a"])):
        create_generation(run, Generation(number, nodes, 1, ""))
    told = (
        ("a", 0, "shared", 100.0),
        ("a", 1, "shared", 200.0),
        ("a", 1, "shared", 300.0),
        ("a", 0, "nvme", 50.0),
        ("b", 2, "peer", 400.0),
    )
    for node, generation, tier, moment in told:
        line = {"time": moment, "generation": generation, "event": "checkpoint_saved", "tier": tier}
        with open(run.events_path(node), "a", encoding="utf-8") as events:
            events.write(json.dumps(line) + "\n")
    endpoint = MetricsEndpoint("run", "b", "")
    records = NodeRecords(run, "b", 2, endpoint, lambda rank, line: None)
    face = NodePublisher(run, launch, "b", endpoint, records)

    def moments() -> dict[str, float]:
        families = {family.name: family for family in endpoint.collect()}
        found = families.get("craton_run_checkpoint_moment_seconds")
        return {sample.labels["tier"]: sample.value for sample in found.samples} if found else {}

    face.entered(range(1, 2))
    assert moments() == {}, "rank 0 is elsewhere, and tells of them"
    face.entered(range(1))
    assert moments() == {"shared": 300.0, "peer": 400.0}
    face.saved("shared", 500.0)
    assert moments()["shared"] == 500.0


def test_records_that_are_lost_are_counted_from_zero(run: RunDirectory) -> None:
    """A series that begins with its first loss shows no increase."""
    endpoint = MetricsEndpoint("run", "a", "")
    NodeRecords(run, "a", 1, endpoint, lambda rank, line: None)
    (family,) = endpoint.collect()
    assert [(sample.name, sample.value) for sample in family.samples] == [("craton_run_dropped_records_total", 0.0)]
