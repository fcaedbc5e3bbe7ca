"""An agent's membership in the run: it follows the coordinator, or coordinates itself.

Decisions reach the node through a few calls (`NodeItself`). The node sends the coordinator a status several times a
second, and a fault at once. A fault is sent again to the next coordinator until a new generation begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any, Protocol

from craton.agent.coordination import (
    SILENT_SECONDS,
    Action,
    Claimed,
    Coordinator,
    Fail,
    Finish,
    Followed,
    Heard,
    LeaderElection,
    Link,
    Message,
    Notice,
    RankFailure,
    Release,
    StartGeneration,
    read_avoided,
)
from craton.agent.errors import LaunchError
from craton.agent.generation import Generation, create_generation, newest_generation, next_number
from craton.agent.launch import Launch, read_launch
from craton.agent.processes import open_log
from craton.agent.records import NodeRecords
from craton.formatting import whole_duration
from craton.telemetry import Marker, RunDirectory, read_json
from craton.telemetry.files import read_regular_text
from craton.telemetry.node import Heartbeat, process_start, read_heartbeat
from craton.telemetry.rank import STEADY

STATUS_SECONDS = 0.15  # between two status messages to the coordinator
ALIVE_SECONDS = 3.0  # a heartbeat that has not changed for this long counts as stopped
UNHURRIED_SECONDS = 10.0  # before an agent is restarted that the run does not wait for
RESTART_SECONDS = 3.0  # between two starts of another node's agent
HELD_STOP_OPTION = "--held-stop"  # for an agent that is restarted while a stopping run holds its state
FENCE_SECONDS = 30.0  # a live agent that is silent for this long is killed; one stopped by a signal, earlier


class NodeItself(Protocol):
    """This agent's own node, as membership sees it."""

    @property
    def generation(self) -> Generation | None: ...

    @property
    def holds_stop(self) -> bool: ...

    def status(self) -> dict[str, Any]: ...

    def enter(self, generation: Generation, end: tuple[int, ...]) -> None: ...

    def wait_for_nodes(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def mark(self, marker: Marker, text: str = "") -> None: ...

    def has(self, marker: Marker) -> bool: ...

    def warn(self, event: str, text: str) -> None: ...


class Membership:
    def __init__(
        self,
        run: RunDirectory,
        launch: Launch,
        node: str,
        election: LeaderElection,
        records: NodeRecords,
        itself: NodeItself,
    ) -> None:
        self._run, self._launch, self._node, self._election = run, launch, node, election
        self._records, self._node_itself = records, itself
        self._coordinator: Coordinator | None = None  # when this agent coordinates
        self._unwritten: StartGeneration | None = None  # a generation that is not on disk yet
        self._links: dict[str, Link] = {}  # node → link, when this agent coordinates
        self._leader: Link | None = None  # otherwise the link to the coordinator
        self._leader_heard = 0.0
        self._open_faults: list[RankFailure] = []  # since the current generation began
        self._next_status = 0.0
        self._agents_started: dict[str, float] = {}
        self._agents_seen: dict[str, float] = {}
        self._fenced: set[tuple[int, str]] = set()  # pid and start time of agents that were killed
        self._resize_seen = 0.0
        self._seen_beats: dict[str, tuple[float, float]] = {}  # node → its last heartbeat, and when it changed here
        self.is_released = self.is_finished = False  # this node is no longer needed; the run is done
        self.is_held = False  # no first generation yet: members of the run are not ready
        election.look()

    @property
    def coordinates(self) -> bool:
        return self._coordinator is not None

    def entered(self) -> None:
        """Clear open faults: the node has entered a new generation."""
        self._open_faults = []
        self._next_status = 0.0  # send the next status at once: this node's addresses have changed

    def close(self) -> None:
        self._election.close()

    def confer(self, now: float, is_ending: bool) -> None:
        """Receive messages of other agents, send this node's status, and carry out the coordinator's decisions."""
        while (news := self._election.take()) is not None:
            if isinstance(news, Claimed):
                self._coordinate(now)
            elif isinstance(news, Followed):
                self._follow(news.link, now)
            else:
                self._hear(news, now)
        if self._leader is not None and now - self._leader_heard > SILENT_SECONDS:
            self._leader.close()
        if now >= self._next_status:
            self._next_status = now + STATUS_SECONDS
            status = self._node_itself.status()
            if self._leader is not None:
                self._leader.send({"is": "status", "node": self._node, **status})
            if self._coordinator is not None:
                self._coordinator.heard(self._node, status, now)
        if self._unwritten is not None and not is_ending:
            self._act(self._unwritten)
        if self._coordinator is not None and self._unwritten is None and not is_ending:
            self._coordinator.is_held = self.is_held
            for action in self._coordinator.tick(now, STEADY.now()):
                if self._coordinator is not None:
                    self._act(action)
        if self._coordinator is not None and not is_ending:
            self._restart_agents(now)

    def _coordinate(self, now: float) -> None:
        current = newest_generation(self._run)
        if current is not None and current.number < self._launch.generation:
            current = None  # of an earlier launch
        number = max(next_number(self._run), self._launch.generation)
        self._coordinator = Coordinator(self._launch, self._node, current, number, now)
        self._records.event("coordinates", takes_over=current is not None)
        for fault in self._open_faults:
            self._coordinator.fault(fault)
        present = self._node_itself.generation
        if current is not None and _missed(current, self._node, present.number if present else -1):
            self._node_itself.enter(current, ())  # its coordinator is gone and has announced it to no node

    def _is_superseded(self) -> bool:
        """Whether another agent coordinates that this one cannot reach (a network partition): it has created a newer
        generation, or created the current one and its heartbeat in the run directory still changes."""
        assert self._coordinator is not None
        newest, current = newest_generation(self._run), self._coordinator.current
        if newest is None or newest.number < self._launch.generation:
            return False
        if current is None or newest.number > current.number:
            return True
        return (
            newest.by not in (self._node, "") and newest.by not in self._coordinator.members and self._lives(newest.by)
        )

    def _lives(self, node: str) -> bool:
        """Whether a node's heartbeat still changes, by this machine's clock."""
        beat, now = read_heartbeat(self._run, node), time.monotonic()
        if beat is None or beat.state not in ("running", "spare") or beat.is_stopped_here:
            return False
        if beat.host == socket.gethostname() and process_start(beat.pid) != beat.started:
            return False
        beat_before, since = self._seen_beats.get(node, (0.0, now))
        if beat.moment != beat_before:
            self._seen_beats[node] = (beat.moment, now)
            since = now
        return now - since < ALIVE_SECONDS

    def _follow(self, link: Link, now: float) -> None:
        self._step_down()
        self._leader, self._leader_heard = link, now
        for fault in self._open_faults:
            link.send(_fault_message(fault))

    def _step_down(self) -> None:
        self._election.coordinates = False
        self._coordinator = self._unwritten = None
        for link in self._links.values():
            link.close()
        self._links = {}

    def _hear(self, news: Heard, now: float) -> None:
        link, message = news.link, news.message
        if link is self._leader:
            self._leader_heard = now
            if message is None:
                self._leader = None
                self._election.look()
            else:
                self._obey(message)
        elif self._coordinator is None:
            link.close()
        elif message is None:
            if self._links.get(link.node) is link:
                del self._links[link.node]
                self._coordinator.left(link.node, now)
        else:
            self._links[link.node] = link
            self._hear_member(link, message, now)

    def _hear_member(self, link: Link, message: Message, now: float) -> None:
        assert self._coordinator is not None
        if message["is"] == "status":
            self._coordinator.heard(link.node, message, now)
            current = self._coordinator.current
            is_known = current is not None and self._unwritten is None  # an unwritten generation may never start
            if is_known and current is not None and _missed(current, link.node, int(message.get("generation", -1))):
                link.send({"is": "generation", "generation": current.to_message(), "end": []})
            link.send({"is": "beat"})
        elif message["is"] == "fault":
            fields = {name: value for name, value in message.items() if name not in ("is", "age")}
            moment = STEADY.now() - max(0.0, float(message["age"]))  # clocks of machines differ, ages do not
            self._coordinator.fault(RankFailure(**{**fields, "time": moment, "ranks": tuple(fields.get("ranks", ()))}))

    def _obey(self, message: Message) -> None:
        if message["is"] == "generation":
            self._node_itself.enter(Generation.from_message(message["generation"]), tuple(message["end"]))
        elif message["is"] == "waiting":
            self._node_itself.wait_for_nodes()
        elif message["is"] == "release":
            self.is_released = True
        elif message["is"] == "finish":
            self.is_finished = True

    def report(self, fault: RankFailure) -> None:
        """Report a fault to the coordinator, and to the next one until a new generation begins."""
        print(f"craton agent: {fault.text.splitlines()[0]}", file=sys.stderr, flush=True)
        if fault.generation is None and (present := self._node_itself.generation) is not None:
            fault = replace(fault, generation=present.number)
        self._open_faults.append(fault)
        status = self._node_itself.status()  # first: this node's keeper may be gone since
        if self._coordinator is not None:
            self._coordinator.heard(self._node, status, time.monotonic())
            self._coordinator.fault(fault)
        elif self._leader is not None:
            self._leader.send({"is": "status", "node": self._node, **status})
            self._leader.send(_fault_message(fault))

    def _act(self, action: Action) -> None:
        if isinstance(action, StartGeneration | Fail) and self._is_superseded():
            self._records.event("coordinates_no_more", message="another agent coordinates but cannot be reached")
            self._step_down()
            self._election.look()
        elif isinstance(action, StartGeneration):
            self._begin_generation(action)
        elif isinstance(action, Fail):
            self._node_itself.fail(action.text)
        elif isinstance(action, Finish):
            if not self._node_itself.has("STOP"):
                self._node_itself.mark("DONE")
            self._tell_all({"is": "finish"})
            self.is_finished = True
        elif isinstance(action, Release):
            for node in action.nodes:
                if node in self._links:
                    self._links[node].send({"is": "release"})
            self._records.event("nodes_released", nodes=list(action.nodes))
        elif isinstance(action, Notice):
            self._node_itself.warn(action.event, action.text)
            self._node_itself.wait_for_nodes()
            self._tell_all({"is": "waiting"})

    def _begin_generation(self, action: StartGeneration) -> None:
        generation = _labelled(action.generation)
        try:
            is_created = create_generation(self._run, generation)
        except OSError as error:
            if self._unwritten is None:
                self._node_itself.warn(
                    "generation_unwritten",
                    f"cannot write generation {generation.number} ({error.strerror}); the run waits and retries",
                )
            self._unwritten = action
            return
        self._unwritten = None
        if not is_created:  # another agent coordinates
            self._records.event("coordinates_no_more", generation=generation.number)
            self._step_down()
            self._election.look()
            return
        self._records.generation = generation.number
        self._records.event(
            "generation_started",
            reason=generation.reason.splitlines()[0],
            nodes=generation.nodes,
            world=generation.world,
            reached=generation.reached,
            planned=generation.is_planned,
        )
        if generation.layout is not None:
            self._use_plan(len(generation.nodes))
        self._tell_all({"is": "generation", "generation": generation.to_message(), "end": list(action.end)})
        self._node_itself.enter(generation, action.end)

    def _use_plan(self, size: int) -> None:
        """Compare measurements with the plan of this size from now on."""
        source = self._run.path / "plans" / f"{size}.json"
        with contextlib.suppress(OSError):
            text = read_regular_text(source)
            fresh = self._run.plan_path.with_name(".plan.json.new")
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, self._run.plan_path)

    def _tell_all(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    def _restart_agents(self, now: float) -> None:
        """If all nodes are on this machine: restart agents that were killed, and kill agents that are stopped. No
        scheduler does it here, and ranks and keeper of a lost node must not live on."""
        if self._coordinator is None:  # this agent has just stepped down
            return
        if not self._launch.agent_command or self._run.has("FATAL"):
            return
        is_stopping = self._run.has("STOP")
        if is_stopping and not self._node_itself.holds_stop:
            return
        members = self._coordinator.members
        is_short = sum(member.is_ready for member in members.values()) < self._launch.working_nodes
        for index, node in enumerate(self._launch.nodes):
            if node in members:
                self._agents_seen[node] = now
                continue
            beat = read_heartbeat(self._run, node)
            if beat is None or beat.generation != self._launch.generation or beat.state not in ("running", "spare"):
                continue
            silent_seconds = now - self._agents_seen.setdefault(node, now)
            if beat.is_alive_here:
                self._fence(node, beat, silent_seconds)
                continue
            if not is_short and silent_seconds < UNHURRIED_SECONDS:
                continue  # a spare has replaced it: a restart now would only slow down the others
            if (self._run.path / "heartbeat" / f".{node}.lost").exists():
                continue
            if now - self._agents_started.get(node, -1e9) < RESTART_SECONDS:
                continue
            self._agents_started[node] = now
            self._node_itself.warn("agent_restarted", f"the agent of {node} is gone; restarting it")
            try:
                with open_log(self._run.path / "logs" / f"agent-{node}.log") as log:
                    subprocess.Popen(
                        [*self._launch.agent_command, str(index), *([HELD_STOP_OPTION] if is_stopping else [])],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                self._node_itself.warn("agent_not_started", f"cannot start the agent of {node}: {error}")

    def _fence(self, node: str, beat: Heartbeat, silent_seconds: float) -> None:
        """Kill a live agent of this machine that has left the run, and with it every process that it started. Its
        heartbeat is the second evidence: an agent that still beats is only slow to find this coordinator."""
        is_stopped = beat.is_stopped_here and beat.age_seconds() > SILENT_SECONDS
        is_silent = min(silent_seconds, beat.age_seconds()) > FENCE_SECONDS
        if not (is_stopped or is_silent) or (beat.pid, beat.started) in self._fenced:
            return
        self._fenced.add((beat.pid, beat.started))
        why = "is stopped by a signal" if is_stopped else f"has been silent for {whole_duration(beat.age_seconds())}"
        text = f"the agent of {node} (process {beat.pid}) {why}; killing it with its ranks and keeper"
        self._node_itself.warn("agent_fenced", text)
        try:
            os.kill(beat.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended by itself
        except PermissionError as error:
            self._node_itself.warn("agent_not_fenced", f"cannot kill the agent of {node}: {error}")

    def look_for_wishes(self) -> None:
        """Read the requests of `craton resize` and `craton heal`."""
        if self._coordinator is None:
            return
        self._coordinator.avoid(frozenset(read_avoided(self._run)))
        wish = read_json(self._run.resize_path)
        if not wish or float(wish.get("time", 0.0)) == self._resize_seen:
            return
        self._resize_seen = float(wish["time"])
        with contextlib.suppress(LaunchError):
            self._coordinator.launch = read_launch(self._run)
        self._coordinator.resize(int(wish["nodes"]), wish.get("layout"))


def _missed(current: Generation, node: str, number: int) -> bool:
    """Whether a node that is in generation `number` (-1: none) must be sent the current one. An agent that belongs to
    the current one and is in none was restarted: it has lost its ranks, and joins the next generation."""
    return number < current.number and (number >= 0 or node not in current.nodes)


def _labelled(generation: Generation) -> Generation:
    """Return the generation with wall-clock times; their difference stays the same."""
    broke_at = STEADY.to_wall(generation.broke_at) if generation.broke_at else 0.0
    return replace(generation, time=STEADY.to_wall(generation.time), broke_at=broke_at)


def _fault_message(fault: RankFailure) -> Message:
    """Return a fault as a message. It carries an age instead of a time: clocks of machines differ."""
    return {"is": "fault", **asdict(fault), "age": STEADY.now() - fault.time}
