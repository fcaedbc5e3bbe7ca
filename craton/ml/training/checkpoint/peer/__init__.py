"""The peer tier: state in the memory of this node and another one, which outlives the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.training.checkpoint.peer.memory_tier import PEER, Note, PeerMemory, PeerSetup
    from craton.ml.training.checkpoint.peer.restore import PeerSave, find_saves, load_save
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
