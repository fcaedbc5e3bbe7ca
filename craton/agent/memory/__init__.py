"""State in shared memory that outlives ranks: the keeper process, its slots, and replicas on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.memory.keeper import Keeper
    from craton.agent.memory.slots import BLOCK_BYTES, HEADER_BYTES, Holding, KeeperClient, OwnSlot
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
