"""Which agent coordinates: found by all others, replaced when it is gone, and in the end only one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import Launch
from craton.agent.coordination import Claimed, Followed, Heard, LeaderElection, Link, leader_election, run_secret
from craton.agent.coordination.leader_election import News
from craton.agent.coordination.wire import dial
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, NodeState, write_heartbeat

NODES = ["a", "b", "c"]


class Agents:
    """Councils of the nodes of one run, each with the heartbeat that an agent would write."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory.create(folder, "run")
        self.launch = Launch(1, NODES, 1, ["x"])
        self.secret = run_secret(self.run)
        self.councils: dict[str, LeaderElection] = {}
        self.news: dict[str, list[News]] = {node: [] for node in NODES}
        self.woken = threading.Event()

    def start(self, node: str, looks: bool = True) -> LeaderElection:
        index = NODES.index(node)
        made = LeaderElection(self.run, self.launch, index, self.secret, "127.0.0.1", self.woken.set)
        self.councils[node] = made
        self.news[node] = []
        self.beat(node)
        if looks:
            made.look()
        return made

    def beat(self, node: str, state: NodeState = "running", generation: int = 1, address: str = "") -> None:
        address = address or self.councils[node].address
        write_heartbeat(self.run, node, Heartbeat(generation, state, os.getpid(), 0, address))

    def wait(self, node: str, what: type[News], where: Callable[[News], bool] = lambda news: True) -> News:
        """The first news of this kind."""

        def found() -> News | None:
            while (news := self.councils[node].take()) is not None:
                self.news[node].append(news)
            return next((news for news in self.news[node] if isinstance(news, what) and where(news)), None)

        news: News = wait_until(found, f"{node} has news of {what.__name__}")
        return news

    def leader_of(self, node: str) -> Link:
        """The link over which a node follows."""
        news = self.wait(node, Followed)
        assert isinstance(news, Followed)
        return news.link

    def has_claimed(self, node: str) -> bool:
        while (news := self.councils[node].take()) is not None:
            self.news[node].append(news)
        return any(isinstance(news, Claimed) for news in self.news[node])


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(leader_election, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(leader_election, "LOOK_SECONDS", 0.02)
    made = Agents(tmp_path)
    yield made
    for each in made.councils.values():
        each.close()


def test_the_first_node_coordinates_and_the_others_follow(agents: Agents) -> None:
    for node in ("c", "b"):
        agents.start(node)
    agents.start("a")
    agents.wait("a", Claimed)
    for node in ("b", "c"):
        link = agents.leader_of(node)
        assert link.node == "a"
        assert link.send({"is": "status", "from": node})
        heard = agents.wait("a", Heard, lambda news: isinstance(news, Heard) and news.link.node == node)  # noqa: B023
        assert isinstance(heard, Heard)
        assert heard.message == {"is": "status", "from": node}
        heard.link.send({"is": "beat"})
        answer = agents.wait(node, Heard)
        assert isinstance(answer, Heard)
        assert answer.message == {"is": "beat"}
    assert not agents.has_claimed("b")
    assert not agents.has_claimed("c")


def test_an_agent_that_was_sent_away_is_not_heard(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node claims to coordinate while it answers that it does not: the other agent closes the connection."""
    first = agents.start("a", looks=False)
    send = Link.send

    def send_and_claim(link: Link, message: dict[str, object]) -> bool:
        if message.get("is") == "answer":
            first.coordinates = True
        return send(link, message)

    monkeypatch.setattr(Link, "send", send_and_claim)
    link = dial(first.address, agents.secret, PATIENCE_SECONDS)
    assert link is not None
    link.send({"is": "who", "node": "b"})
    assert link.receive(PATIENCE_SECONDS) == {"is": "answer", "coordinates": False}
    assert link.receive(PATIENCE_SECONDS) is None, "it is closed"
    assert first.take() is None


def test_a_later_node_coordinates_when_the_first_never_comes(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "FIRST_SECONDS", 0.3)
    agents.start("c")
    agents.start("b")
    agents.wait("b", Claimed)
    assert agents.leader_of("c").node == "b"
    agents.start("a")
    assert agents.leader_of("a").node == "b", "who comes late follows"


def test_the_next_takes_over_when_the_coordinator_is_gone(agents: Agents) -> None:
    agents.start("a")
    agents.wait("a", Claimed)
    links = {}
    for node in ("b", "c"):
        agents.start(node)
        links[node] = agents.leader_of(node)
        links[node].send({"is": "status"})
        agents.wait("a", Heard, lambda news: isinstance(news, Heard) and news.link.node == node)  # noqa: B023
    agents.councils["a"].close()
    for news in agents.news["a"]:
        if isinstance(news, Heard):
            news.link.close()
    for node in ("b", "c"):
        agents.wait(node, Heard, lambda news: isinstance(news, Heard) and news.message is None)
        agents.news[node].clear()
        agents.councils[node].look()
    agents.wait("b", Claimed)
    assert agents.leader_of("c").node == "b"
    assert not agents.has_claimed("c")
    agents.start("a")
    assert agents.leader_of("a").node == "b"


def test_of_two_that_coordinate_the_later_follows_the_earlier(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """They did not see each other while the network was cut: no heartbeat, no answer."""
    monkeypatch.setattr(leader_election, "FIRST_SECONDS", 0.1)
    agents.start("a")
    agents.beat("a", address="127.0.0.1:1")
    agents.start("b")
    agents.beat("b", address="127.0.0.1:1")
    agents.wait("a", Claimed)
    agents.wait("b", Claimed)
    agents.beat("a")
    agents.beat("b")
    assert agents.leader_of("b").node == "a"
    assert not [news for news in agents.news["a"] if isinstance(news, Followed)]


@pytest.mark.parametrize(("state", "generation"), [("running", 0), ("failed", 1), ("done", 1)])
def test_agents_of_the_past_are_not_asked(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, state: NodeState, generation: int
) -> None:
    monkeypatch.setattr(leader_election, "FIRST_SECONDS", 0.1)
    agents.start("a", looks=False)
    agents.beat("a", state, generation)
    agents.start("b")
    agents.wait("b", Claimed)


def test_an_earlier_agent_that_lives_is_left_the_first_say(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "FIRST_SECONDS", 0.1)
    first = agents.start("a", looks=False)  # it has not looked around yet
    agents.start("b")
    agents.start("c")
    threading.Event().wait(0.5)
    assert not agents.has_claimed("b")
    assert not agents.has_claimed("c")
    first.look()
    assert agents.leader_of("b").node == agents.leader_of("c").node == "a"


def test_an_agent_that_answers_nothing_is_passed_over(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shook hands and was stopped: whoever asked it goes on to the next."""
    monkeypatch.setattr(leader_election, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(leader_election, "FIRST_SECONDS", 0.1)
    mute = agents.start("a", looks=False)
    monkeypatch.setattr(mute._listener, "_welcome", lambda link: threading.Event().wait(5.0))
    agents.start("b")
    agents.wait("b", Claimed)
