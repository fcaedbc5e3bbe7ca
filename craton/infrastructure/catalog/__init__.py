"""Tables of GPUs, instances and storage services with sources and dates, and lookup by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.infrastructure.catalog.facts import KEYS, CatalogEntry, load_catalog
    from craton.infrastructure.catalog.lookup import entry, gpu, gpus, instance, instances
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
