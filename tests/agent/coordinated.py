"""A coordinator, and agents that are only what they say."""

from __future__ import annotations

from typing import Any

from craton.agent import Generation, Launch
from craton.agent.coordination import Action, Coordinator, RankFailure, StartGeneration

EPOCH = 1_000_000.0  # the clock of the world is this much ahead of the monotonic one
Status = dict[str, Any]


class Agents:
    """A coordinator and the nodes that speak to it."""

    def __init__(self, current: Generation | None = None, me: str = "a", **launch: Any) -> None:
        settings: dict[str, Any] = {"generation": 1, "nodes": ["a", "b"], "ranks_per_node": 1, "command": ["x"]}
        self.launch = Launch(**{**settings, **launch})
        self.now = 100.0
        self.coordinator = Coordinator(self.launch, me, current, (current.number if current else 0) + 1, self.now)
        self.there: dict[str, Status] = {}  # what every agent that is there says
        self.starts: list[StartGeneration] = []
        self.others: list[Action] = []  # what was decided beside new generations

    @property
    def current(self) -> Generation:
        assert self.coordinator.current is not None
        return self.coordinator.current

    def join(self, *nodes: str, **status: Any) -> None:
        for node in nodes:
            self.there[node] = {"ready": True, "generation": -1, "store": f"{node}:1", "keeper": f"{node}:2", **status}

    def lose(self, node: str) -> None:
        del self.there[node]
        self.coordinator.left(node, self.now)

    def work(self, step: int, kind: str = "productive", age: float = 0.0, seconds: float = 0.1) -> None:
        """The ranks of the present generation do this."""
        for node in self.there:
            ranks = dict.fromkeys(self.current.ranks_of(node), (kind, step, age, seconds, False, self.current.number))
            self.there[node] |= {"ranks": ranks, "generation": self.current.number}

    def rank_does(self, rank: int, kind: str, age: float, is_stopped: bool = False) -> None:
        node = self.current.nodes[rank // self.current.ranks_per_node]
        before = self.there[node]["ranks"][rank]
        self.there[node]["ranks"][rank] = (kind, before[1], age, before[3], is_stopped, before[5])

    def tick(self, seconds: float = 0.25) -> list[Action]:
        """Everybody says how it is, and time goes on."""
        self.now += seconds
        for node, status in self.there.items():
            self.coordinator.heard(node, status, self.now)
        actions = self.coordinator.tick(self.now, EPOCH + self.now)
        self.starts += [action for action in actions if isinstance(action, StartGeneration)]
        self.others += [action for action in actions if not isinstance(action, StartGeneration)]
        return actions

    def pass_time(self, seconds: float) -> list[Action]:
        """What is decided in that time."""
        end, actions = self.now + seconds, []
        while self.now < end:
            actions += self.tick(min(0.25, max(end - self.now, 1e-6)))
        return actions

    def started(self) -> StartGeneration:
        """The generation that the next tick begins."""
        (start,) = self.tick()
        assert isinstance(start, StartGeneration)
        return start

    def fail(self, text: str = "rank 1 exited", **fields: Any) -> None:
        self.coordinator.fault(RankFailure(text, EPOCH + self.now, **fields))


def two_at_work() -> Agents:
    """Two nodes that have begun and work at step 10."""
    agents = Agents()
    agents.join("a", "b")
    assert agents.started().generation.nodes == ["a", "b"]
    agents.work(10)
    assert agents.tick() == []
    return agents
