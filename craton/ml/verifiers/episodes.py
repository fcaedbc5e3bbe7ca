"""Episodes of environments, as the supervisor keeps them: enough to replay one after its process was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from craton.ml.verifiers.members import PoolWorker


@dataclass(eq=False)
class EpisodeRecord:
    """The messages of an episode so far, the replies to them, and the process that holds the environment."""

    number: int
    messages: list[bytes] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)  # of the pool, one for each message
    replies: list[dict[str, Any]] = field(default_factory=list)
    position: int = 0  # messages that the present process has answered
    worker: PoolWorker | None = None
    is_running: bool = False  # counts against the number of workers; others wait for the model
    deaths: int = 0
    error: str = ""  # not empty: the episode is lost

    @property
    def is_waited_for(self) -> bool:
        return len(self.replies) < len(self.messages)

    @property
    def is_replaying(self) -> bool:
        return self.position < len(self.replies)

    def ask(self, task: int, message: bytes) -> None:
        self.tasks.append(task)
        self.messages.append(message)

    def lose_worker(self) -> None:
        self.worker = None
        self.position = 0
        self.deaths += 1
