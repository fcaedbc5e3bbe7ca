"""Process groups whose ranks meet in a store that only holders of the run's secret can reach.

torch's own TCPStore listens on all addresses and authenticates no one. `RunStore` talks to a `StoreServer` instead.
torch calls it from Python and from the C++ threads of a process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from craton.agent.store import StoreClient, StoreError, StoreServer, StoreTimeoutError

CONNECT_SECONDS = 60.0  # after this the store's keeper is considered dead
FIRST_RANK_SECONDS = 600.0  # how long the other ranks wait for rank 0 to serve the store

Result = TypeVar("Result")

# A process group keeps only the C++ half of a store alive. The Python half, which has the methods, must live as long.
_kept: list[RunStore] = []
_served: list[StoreServer] = []


class RunStore(dist.Store):
    """A `torch.distributed.Store` over a `StoreClient`. The method names are those that torch's trampoline calls."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client = client
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        _call(lambda: self._client.set([key], [_bytes(value)]))

    def get(self, key: str) -> bytes:
        return _call(lambda: self._client.get([key], self._limit_seconds()))[0]

    def add(self, key: str, value: int) -> int:
        return _call(lambda: self._client.add(key, value))

    def append(self, key: str, value: str | bytes) -> None:
        _call(lambda: self._client.append(key, _bytes(value)))

    def check(self, keys: list[str]) -> bool:
        return _call(lambda: self._client.check(keys))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return _call(lambda: self._client.compare_set(key, _bytes(expected_value), _bytes(desired_value)))

    def delete_key(self, key: str) -> bool:
        return _call(lambda: self._client.delete(key))

    def num_keys(self) -> int:
        return _call(self._client.count)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return _call(lambda: self._client.get(keys, self._limit_seconds()))

    def multi_set(self, keys: list[str], values: list[str] | list[bytes]) -> None:
        _call(lambda: self._client.set(keys, [_bytes(value) for value in values]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._limit_seconds() if timeout is None else timeout.total_seconds()
        _call(lambda: self._client.wait(keys, seconds))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RunStore:
        """Calls never block each other, so both can share one client."""
        return RunStore(self._client)

    def close(self) -> None:
        self._client.close()

    def _limit_seconds(self) -> float:
        """How long a call waits for a key: what `set_timeout` set, or torch's default."""
        return float(self.timeout.total_seconds())  # type: ignore[attr-defined]  # torch's stubs lack it

    # C++ looks these two up under their C++ names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


def join_group(
    backend: str,
    address: str,
    secret: bytes,
    prefix: str,
    rank: int,
    world: int,
    timeout: timedelta | None = None,
    connect_seconds: float = CONNECT_SECONDS,
) -> None:
    """Create the default process group of ranks that rendezvous under `prefix` in the store at `address`."""
    for kept in _kept:  # groups of earlier generations no longer exist
        kept.close()
    store = RunStore(_call(lambda: StoreClient(address, secret, connect_seconds)))
    dist.init_process_group(
        backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world, timeout=timeout
    )


def join_group_of_environment(
    backend: str, secret: bytes, rank: int, world: int, timeout: timedelta | None = None
) -> None:
    """Create the default process group of ranks without a keeper: rank 0 serves the store at MASTER_ADDR and
    MASTER_PORT. All ranks need the same secret."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        _served.append(StoreServer(host, secret, port).start())
    join_group(backend, f"{host}:{port}", secret, "ranks", rank, world, timeout, FIRST_RANK_SECONDS)


def leave_group() -> None:
    """Destroy the default process group, if there is one. Its C++ threads must not call a Python store after the
    interpreter has ended."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(work: Callable[[], Result]) -> Result:
    """Translate errors into those that torch raises for its own stores."""
    try:
        return work()
    except StoreTimeoutError as error:
        raise dist.DistStoreError(str(error)) from error
    except StoreError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
