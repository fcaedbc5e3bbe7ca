"""Peak memory of one GPU during a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.memory.peak import Memory, memory, memory_bytes, memory_bytes_of
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
