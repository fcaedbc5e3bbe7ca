"""Plain commands go on when a rank, an agent or the coordinator is killed, and give up when that does not help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from agent_gang import Gang, is_alive
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Launch, newest_generation
from craton.agent.processes import free_port
from craton.telemetry.files import read_lines
from craton.telemetry.node import read_heartbeat

# Rank 0 listens where the environment says, without a word to the kernel that it may share the port, and rank 1 comes
# to it; each then says where they met, and the result of the last generation is the same however many there were.
MEET = """
import json, socket
GENERATION = os.environ["CRATON_GENERATION"]
ADDRESS = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if RANK == 0:
    server = socket.socket()
    server.bind(ADDRESS)
    server.listen()
    connection, _ = server.accept()
else:
    while True:
        try:
            connection = socket.create_connection(ADDRESS)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
connection.sendall(bytes([RANK]))
other = connection.recv(1)[0]
say(f"met-{GENERATION}", json.dumps({"pid": os.getpid(), "port": ADDRESS[1], "other": other}))
wait_for(f"go-{GENERATION}")
if (HERE / f"break-{GENERATION}-{RANK}").exists():
    sys.exit(f"broken in generation {GENERATION}")
say("result", str(sum(range(RANK, 1000, 2))))
"""
NODES = ["a", "b"]


def start(gang: Gang, **settings: Any) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "craton.agent", str(gang.run.path), "--node"]
    with_port = {"master_port": free_port(), "failure_grace_seconds": 0.5}
    gang.launch(MEET, nodes=NODES, agent_command=command, **{**with_port, **settings})
    return [gang.start(0), gang.start(1)]


def met(gang: Gang, generation: int) -> dict[int, dict[str, int]]:
    """rank → who it is, once both have met in this generation."""
    return {rank: json.loads(gang.said(f"met-{generation}", rank)) for rank in (0, 1)}


def agent_pid(gang: Gang, node: str) -> int:
    beat = read_heartbeat(gang.run, node)
    assert beat is not None
    return beat.pid


def wait_for_end(gang: Gang) -> dict[str, str]:
    """How the agents of both nodes ended, whoever started them."""

    def ended() -> dict[str, str] | None:
        beats = {node: read_heartbeat(gang.run, node) for node in NODES}
        states = {node: beat.state for node, beat in beats.items() if beat is not None}
        return states if "running" not in states.values() else None

    states: dict[str, str] = wait_until(ended, "both agents have ended")
    return states


def assert_done(gang: Gang, generations: int) -> None:
    assert wait_for_end(gang) == {"a": "done", "b": "done"}
    assert gang.run.has("DONE")
    assert not gang.run.has("FATAL")
    assert [gang.said("result", rank) for rank in (0, 1)] == ["249500", "250000"]
    newest = newest_generation(gang.run)
    assert newest is not None
    assert newest.number == generations
    assert_books_are_whole(gang)


def assert_books_are_whole(gang: Gang) -> None:
    """The ledger of each rank's place sums to the time from its first agent's beginning to its last one's end, but for
    the moments between an event and the entry beside it, which are longer on a busy machine."""
    for node in NODES:
        moments = {line["event"]: line["time"] for line in reversed(gang.events(node))}
        end = max(line["time"] for line in gang.events(node) if line["event"] == "agent_ended")
        lines, _ = read_lines(gang.run.ledger_path(node))
        booked = sum(sum(line["seconds"].values()) for line in lines)
        assert booked == pytest.approx(end - moments["agent_started"], rel=0.01, abs=0.2)


def test_after_a_killed_agent_and_a_killed_rank_both_ranks_begin_again(gang: Gang) -> None:
    agents = start(gang)
    first = met(gang, 1)
    agents[1].kill()
    agents[1].wait()
    second = met(gang, 2)
    assert not any(is_alive(rank["pid"]) for rank in first.values())
    os.kill(second[1]["pid"], signal.SIGKILL)
    third = met(gang, 3)
    assert not any(is_alive(rank["pid"]) for rank in second.values())
    ports = [{rank["port"] for rank in ranks.values()} for ranks in (first, second, third)]
    assert [len(each) for each in ports] == [1, 1, 1]
    assert len(set.union(*ports)) == 3, "every generation meets at a port of its own"
    gang.tell("go-3")
    assert agents[0].wait(PATIENCE_SECONDS) == 0
    assert_done(gang, generations=3)
    reasons = [line["reason"] for line in gang.events("a") if line["event"] == "generation_started"]
    assert reasons[0] == "start"
    assert "b is lost: its agent is gone" in reasons[1]
    assert "rank 1 on b was killed by SIGKILL" in reasons[2]
    lines, _ = read_lines(gang.run.ledger_path("b"))
    assert {"detect", "regroup"} <= {kind for line in lines for kind in line["seconds"]}


def test_the_second_node_takes_over_when_the_first_agent_is_killed(gang: Gang) -> None:
    agents = start(gang)
    met(gang, 1)
    agents[0].kill()
    agents[0].wait()
    met(gang, 2)
    newest = newest_generation(gang.run)
    assert newest is not None
    assert (newest.by, newest.nodes) == ("b", ["a", "b"])
    assert agent_pid(gang, "a") != agents[0].pid
    gang.tell("go-2")
    assert agents[1].wait(PATIENCE_SECONDS) == 0
    assert_done(gang, generations=2)
    assert "agent_restarted" in gang.event_names("b")


def test_a_stopped_coordinator_is_a_lost_node_and_cannot_come_back(gang: Gang) -> None:
    agents = start(gang)
    first = met(gang, 1)
    agents[0].send_signal(signal.SIGSTOP)
    met(gang, 2)
    agents[0].send_signal(signal.SIGCONT)
    assert agents[0].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert not any(is_alive(rank["pid"]) for rank in first.values()), "its ranks ended with it"
    newest = newest_generation(gang.run)
    assert newest is not None
    assert (newest.number, newest.by, newest.nodes) == (2, "b", ["a", "b"])
    gang.tell("go-2")
    assert agents[1].wait(PATIENCE_SECONDS) == 0
    assert_done(gang, generations=2)
    (fenced,) = [line for line in gang.events("b") if line["event"] == "agent_fenced"]
    assert f"the agent of a (process {agents[0].pid}) is stopped by a signal" in fenced["message"]


@pytest.mark.slow
def test_a_stopped_agent_that_cannot_be_killed_from_here_comes_back_as_a_spare(gang: Gang) -> None:
    gang.launch(MEET, nodes=["a", "b", "c"], num_nodes=2, master_port=free_port(), failure_grace_seconds=0.5)
    agents = {node: gang.start(index) for index, node in enumerate("abc")}
    first = met(gang, 1)
    before = newest_generation(gang.run)
    assert before is not None
    stopped = next(node for node in before.nodes if node != before.by)
    agents[stopped].send_signal(signal.SIGSTOP)
    second = met(gang, 2)
    agents[stopped].send_signal(signal.SIGCONT)

    def is_spare() -> bool:
        beat = read_heartbeat(gang.run, stopped)
        return beat is not None and beat.state == "spare"

    wait_until(is_spare, "it has no part any more")
    wait_until(lambda: not any(is_alive(rank["pid"]) for rank in first.values()), "its rank has ended")
    assert all(is_alive(rank["pid"]) for rank in second.values())
    newest = newest_generation(gang.run)
    assert newest is not None
    assert newest.number == 2
    assert stopped not in newest.nodes
    gang.tell("go-2")
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents.values()] == [0, 0, 0]
    assert gang.run.has("DONE")


def test_a_command_that_breaks_again_and_again_ends_with_what_broke(gang: Gang) -> None:
    agents = start(gang, tries=2)
    met(gang, 1)
    agents[1].kill()
    agents[1].wait()
    for generation in (2, 3):
        met(gang, generation)
        gang.tell(f"break-{generation}-1")
        gang.tell(f"go-{generation}")
    assert agents[0].wait(PATIENCE_SECONDS) == 1
    assert wait_for_end(gang) == {"a": "failed", "b": "failed"}
    fatal = gang.run.marker_text("FATAL")
    assert fatal.startswith("rank 1 on b exited with code 1 (generation 3): broken in generation 3\n")
    assert "this was failure 3 in a row" in fatal
    assert not gang.run.has("DONE")
    assert_books_are_whole(gang)


@pytest.mark.slow
def test_a_rank_of_the_first_generation_that_dies_late_is_started_again(gang: Gang) -> None:
    agents = start(gang)
    first = met(gang, 1)
    time.sleep(Launch.early_seconds)  # the agents began before the ranks
    os.kill(first[0]["pid"], signal.SIGKILL)
    met(gang, 2)
    gang.tell("go-2")
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [0, 0]
    assert_done(gang, generations=2)
