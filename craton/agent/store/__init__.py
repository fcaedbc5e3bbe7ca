"""The rendezvous store of a run: keys and values that only holders of the run's secret can read or write.

`StoreServer` keeps them in memory, `StoreClient` reaches them. Neither needs torch; `craton.ml.store` makes a
`torch.distributed.Store` of a client.
"""

from craton.agent.store.client import StoreClient
from craton.agent.store.server import StoreServer
from craton.agent.store.wire import StoreError, StoreTimeoutError

__all__ = ["StoreClient", "StoreError", "StoreServer", "StoreTimeoutError"]
