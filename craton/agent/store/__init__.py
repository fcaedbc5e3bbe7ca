"""The rendezvous store of a run: keys and values that only holders of the run's secret can read or write.

`StoreServer` keeps them in memory, `StoreClient` accesses them. Neither needs torch; `craton.ml.store` wraps a client
as a `torch.distributed.Store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.agent.store.client import StoreClient
    from craton.agent.store.server import StoreServer
    from craton.agent.store.wire import StoreError, StoreTimeoutError
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
