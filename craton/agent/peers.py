"""Other nodes' heartbeats, as this node's agent sees them.

A peer is silent when its heartbeat has not changed for a while of *this* machine's clock, so clocks that disagree
cannot make a living node look dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from craton.telemetry import Heartbeat, RunDirectory, read_heartbeat

SILENT_SECONDS = 30.0  # three times what `ps` calls lost: this ends a run, and shared file systems stall for seconds


class Peers:
    def __init__(
        self, run: RunDirectory, nodes: Sequence[str], generation: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._generation, self._now = run, generation, now
        self._seen: dict[str, tuple[Heartbeat | None, float]] = dict.fromkeys(nodes, (None, now()))

    def look(self) -> None:
        """Reads the heartbeat of every peer; one of another generation counts as none."""
        for node, (before, _) in self._seen.items():
            beat = read_heartbeat(self._run, node)
            if beat is not None and beat.generation == self._generation and beat != before:
                self._seen[node] = (beat, self._now())

    def silent(self) -> list[str]:
        """Peers that were running and then stopped showing it."""
        return [
            node
            for node, (beat, since) in self._seen.items()
            if beat is not None and beat.state == "running" and self._now() - since > SILENT_SECONDS
        ]

    def unfinished(self) -> list[str]:
        """Peers that have not said that their ranks ended well."""
        return [node for node, (beat, _) in self._seen.items() if beat is None or beat.state not in ("done", "stopped")]

    def heard_of(self, nodes: Sequence[str]) -> bool:
        """Whether all of these have shown a heartbeat in this generation."""
        return all(self._seen[node][0] is not None for node in nodes)
