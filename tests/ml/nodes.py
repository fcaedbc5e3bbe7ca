"""Which rank is on which node, for tests that start keepers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from keepers import KeeperProcess

from craton.ml.training.checkpoint.peer import PeerSetup

EVERY_STEP = 1


@dataclass(frozen=True)
class Nodes:
    """Which rank is on which node, in one generation."""

    names: tuple[str, ...]  # of every rank's node
    keepers: dict[str, str]  # node → the keeper's name
    addresses: dict[str, str]  # node → host:port
    generation: int = 1

    def setup(self, every_steps: int | None = EVERY_STEP, every_seconds: float | None = None) -> PeerSetup:
        node = self.names[int(os.environ["RANK"])]
        return PeerSetup(
            self.keepers[node], node, self.names, self.addresses, self.generation, every_steps, every_seconds
        )


def nodes_of(keepers: list[KeeperProcess], ranks_each: int, generation: int = 1) -> Nodes:
    names = tuple(keeper.node for keeper in keepers for _ in range(ranks_each))
    return Nodes(
        names,
        {keeper.node: keeper.name for keeper in keepers},
        {keeper.node: keeper.address for keeper in keepers},
        generation,
    )
