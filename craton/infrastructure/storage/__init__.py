"""Storage tiers: throughput for the planner, and stores of named objects with atomic writes.

`open_store` opens a folder or an `s3://bucket/prefix` as a `Store`: an object is either complete or does not exist.
`copy_down` copies a finished folder. `mirror` returns the local cache folder of an `s3://` one, and `CachedFolder`
reads it file by file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.infrastructure.storage.cache import CachedFolder, cache_root, mirror
    from craton.infrastructure.storage.folder import GrowingFile, sync_folder
    from craton.infrastructure.storage.numbers import tiers_of
    from craton.infrastructure.storage.opening import copy_down, open_store
    from craton.infrastructure.storage.store import ObjectWriter, Store
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
