"""Leader election among the agents of a run: which agent coordinates, and the links to and from it.

An agent looks for a coordinator and follows it. If there is none, the first reachable agent becomes the coordinator:
the first node at once, any other after a short time in which earlier nodes may return. A coordinator keeps looking; if
it finds an earlier node that coordinates too (a network partition has healed), it follows that one. Two coordinators at
the same time do no harm: only one can create the next generation.

Threads only read and dial; they put their results into one queue, which the agent's loop empties.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from craton.agent.coordination.wire import Link, Listener, Message, dial
from craton.agent.launch import Launch
from craton.telemetry import RunDirectory
from craton.telemetry.node import read_heartbeat

FIRST_SECONDS = 20.0  # how long earlier nodes have to appear when a run begins
TAKEOVER_SECONDS = 0.5  # and to return when there was a coordinator
LOOK_SECONDS = 0.1
ANSWER_SECONDS = 3.0  # without an answer, an agent asks the next one
AGAIN_SECONDS = 2.0  # between two searches of a coordinator


@dataclass(frozen=True)
class Heard:
    """A message over a link; None: the link is closed."""

    link: Link
    message: Message | None


@dataclass(frozen=True)
class Followed:
    """A link to the coordinator was found."""

    link: Link


@dataclass(frozen=True)
class Claimed:
    """No other agent coordinates: this one does."""


News = Heard | Followed | Claimed


class LeaderElection:
    """Finds or becomes the coordinator; threads call `wake` when there is news."""

    def __init__(
        self, run: RunDirectory, launch: Launch, node: int, secret: bytes, host: str, wake: Callable[[], None]
    ) -> None:
        self._run, self._launch, self._secret, self._wake = run, launch, secret, wake
        self._index, self._node = node, launch.nodes[node]
        self._news: SimpleQueue[News] = SimpleQueue()
        self._listener = Listener(host, secret, self._welcome)
        self.address = f"{host}:{self._listener.port}"
        self.coordinates = False  # set by the agent's loop
        self._looking = threading.Event()
        self._closed = False
        self._has_followed = False
        self._seeker = threading.Thread(target=self._seek, name="election", daemon=True)
        self._seeker.start()

    def look(self) -> None:
        """Start looking for a coordinator."""
        self._looking.set()

    def take(self) -> News | None:
        try:
            return self._news.get_nowait()
        except Empty:
            return None

    def close(self) -> None:
        self._closed = True
        self._looking.set()
        self._listener.close()

    def _post(self, news: News) -> None:
        self._news.put(news)
        self._wake()

    def _welcome(self, link: Link) -> None:
        """Serve an agent that dialed: it first asks who coordinates, and stays if this one does."""
        message = link.receive()
        if message is None or message.get("is") != "who":
            link.close()
            return
        link.node = str(message.get("node", ""))
        coordinates = self.coordinates  # once: this agent may claim it before the answer is sent, and the other leaves
        if link.send({"is": "answer", "coordinates": coordinates}) and coordinates:
            self._read(link)
        else:
            link.close()

    def _read(self, link: Link) -> None:
        while (message := link.receive()) is not None:
            self._post(Heard(link, message))
        self._post(Heard(link, None))

    def _seek(self) -> None:
        while not self._closed:
            if not self.coordinates:
                self._looking.wait()
            began = time.monotonic()
            while not self._closed:
                coordinator, earlier_lives = self._ask_all_agents()
                if coordinator is not None:
                    self._looking.clear()
                    self._has_followed = True
                    self._post(Followed(coordinator))
                    self._read(coordinator)
                    break
                if self.coordinates:
                    time.sleep(AGAIN_SECONDS)
                    continue
                patience = TAKEOVER_SECONDS if self._has_followed else FIRST_SECONDS
                if not earlier_lives and (self._index == 0 or time.monotonic() - began > patience):
                    self._looking.clear()
                    self.coordinates = True
                    self._post(Claimed())
                    break
                time.sleep(LOOK_SECONDS)

    def _ask_all_agents(self) -> tuple[Link | None, bool]:
        """Return (link to a coordinator, whether an agent of an earlier node answers)."""
        earlier_lives = False
        for index, node in enumerate(self._launch.nodes):
            if index == self._index or self._closed or (self.coordinates and index > self._index):
                continue
            beat = read_heartbeat(self._run, node)
            if beat is None or beat.generation != self._launch.generation or not beat.address:
                continue
            if beat.state not in ("running", "spare") or beat.is_stopped_here:  # a stopped agent does not answer
                continue
            if (link := dial(beat.address, self._secret, 1.0)) is None:
                continue
            link.node = node
            answer = link.receive(ANSWER_SECONDS) if link.send({"is": "who", "node": self._node}) else None
            if answer is not None and answer.get("coordinates"):
                return link, True
            link.close()
            earlier_lives = earlier_lives or (answer is not None and index < self._index)
        return None, earlier_lives
