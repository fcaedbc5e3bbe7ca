"""Process groups whose ranks meet in a store that only holders of the run's secret can reach.

torch's own TCPStore listens on all addresses and authenticates nobody. `RunStore` talks to a `StoreServer` instead.
torch calls it from Python and from the C++ threads of a process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from craton.agent.store import StoreClient, StoreError, StoreServer, StoreTimeoutError

CONNECT_SECONDS = 60.0  # a store that does not answer by then belongs to a keeper that is gone
FIRST_RANK_SECONDS = 600.0  # how long the other ranks wait for the first one to serve the store

Result = TypeVar("Result")

# A process group holds the C++ half of a store only. The Python half, which has the methods, must live as long.
_kept: list[RunStore] = []
_served: list[StoreServer] = []


class RunStore(dist.Store):
    """A `torch.distributed.Store` over a `StoreClient`. The names are those that torch's trampoline looks for."""

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
        """Calls never wait for each other, so both may use the same client."""
        return RunStore(self._client)

    def close(self) -> None:
        self._client.close()

    def _limit_seconds(self) -> float:
        """How long a call waits for a key: what `set_timeout` set, or torch's default."""
        return float(self.timeout.total_seconds())  # type: ignore[attr-defined]  # torch's stubs lack it

    # C++ asks for these two under the names they have there.
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
    """Make the default process group of ranks that meet under `prefix` in the store at `address`."""
    for kept in _kept:  # groups of earlier generations are gone
        kept.close()
    store = RunStore(_call(lambda: StoreClient(address, secret, connect_seconds)))
    dist.init_process_group(
        backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world, timeout=timeout
    )


def join_group_of_environment(
    backend: str, secret: bytes, rank: int, world: int, timeout: timedelta | None = None
) -> None:
    """Make the default process group of ranks without a keeper: the first one serves the store, at MASTER_ADDR and
    MASTER_PORT. All of them need the same secret."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        _served.append(StoreServer(host, secret, port).start())
    join_group(backend, f"{host}:{port}", secret, "ranks", rank, world, timeout, FIRST_RANK_SECONDS)


def leave_group() -> None:
    """End the default process group, if there is one. C++ threads of a group must not call a store of Python's when
    the interpreter has ended."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(work: Callable[[], Result]) -> Result:
    """With the errors that torch raises for its own stores."""
    try:
        return work()
    except StoreTimeoutError as error:
        raise dist.DistStoreError(str(error)) from error
    except StoreError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
