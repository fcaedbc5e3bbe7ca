"""Detect lost nodes of a start, by heartbeats in the run directory and this machine's own clock."""

from __future__ import annotations

import time

from craton.agent import Launch
from craton.telemetry import RunDirectory
from craton.telemetry.node import LOST_SECONDS, read_heartbeat

FIRST_SECONDS = 180.0  # from the start of the step to a node's first heartbeat, besides pulling an image
# Time limit for getting an image onto a node. Unpacking a large one took seven minutes (NVIDIA/pyxis#24), plus the pull
# from a registry by all nodes at once.
IMAGE_SECONDS = 1800.0
LEAVE_SECONDS = 5.0  # from an agent's last heartbeat to the end of its process


def first_seconds(has_image: bool) -> float:
    """Return the time limit for the first heartbeats."""
    return FIRST_SECONDS + (IMAGE_SECONDS if has_image else 0.0)


def give_up_seconds(launch: Launch, has_image: bool) -> float:
    """Return how long agents wait for missing nodes. With an image this exceeds the limit for the first heartbeats:
    the first agents must not fail the run while others still pull it."""
    return max(launch.give_up_seconds, 2 * first_seconds(True)) if has_image else launch.give_up_seconds


class SignsOfLife:
    """The heartbeats of a start's nodes, judged by this machine's own clock."""

    def __init__(self, run: RunDirectory, launch: Launch, generation: int, first_seconds: float) -> None:
        self._run, self._nodes, self._generation = run, list(launch.nodes), generation
        self._first_seconds = first_seconds
        self._began = time.monotonic()
        self._over_since: float | None = None
        self._seen: dict[str, tuple[float, float]] = {}  # node → its last heartbeat, and when it was first seen here

    def lost(self, now: float) -> list[str]:
        return [node for node in self._nodes if self._is_lost(node, now)]

    def have_begun(self) -> bool:
        """Whether any node has sent a heartbeat. If none has, no node is to blame: something that all need, such as an
        image, is missing."""
        beats = [read_heartbeat(self._run, node) for node in self._nodes]
        return any(beat is not None and beat.generation == self._generation for beat in beats)

    def is_over(self, now: float) -> bool:
        """Whether no agent has been working for a while."""
        beats = [read_heartbeat(self._run, node) for node in self._nodes]
        lost = self.lost(now)
        at_work = [
            node
            for node, beat in zip(self._nodes, beats, strict=True)
            if beat and beat.generation == self._generation and beat.state in ("running", "spare") and node not in lost
        ]
        if at_work:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = now
        return self._over_since is not None and now - self._over_since > LEAVE_SECONDS

    def _is_lost(self, node: str, now: float) -> bool:
        beat = read_heartbeat(self._run, node)
        if beat is None or beat.generation != self._generation:
            return now - self._began > self._first_seconds
        if beat.state not in ("running", "spare"):
            return False
        moment, since = self._seen.get(node, (0.0, now))
        if beat.moment != moment:
            self._seen[node] = (beat.moment, now)
            since = now
        return now - since > LOST_SECONDS
