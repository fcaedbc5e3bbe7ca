"""Keepers as processes of their own, as an agent forks them; nothing of them is left after a test."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from craton.agent.memory import HEADER_BYTES, Keeper, KeeperClient, OwnSlot

SECRET = b"a secret of this run"


class KeeperProcess:
    """A keeper that can be killed."""

    def __init__(self, node: str, secret: bytes = SECRET, folder: str | None = None) -> None:
        self.node, self.name = node, f"craton-test-{secrets.token_hex(8)}"
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.bind(f"\0{self.name}")
        control.listen()
        peers = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{peers.getsockname()[1]}"
        context = multiprocessing.get_context("fork")
        self.process: BaseProcess = context.Process(
            target=_serve, args=(node, secret, control, peers, folder), daemon=True
        )
        self.process.start()
        control.close()
        peers.close()

    def client(self) -> KeeperClient:
        return KeeperClient(self.name)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Keepers(ExitStack):
    """Some of them, all killed at the end."""

    def start(self, node: str, secret: bytes = SECRET, folder: str | None = None) -> KeeperProcess:
        keeper = KeeperProcess(node, secret, folder)
        self.callback(keeper.kill)
        return keeper


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    """To start some with."""
    with Keepers() as made:
        yield made


def _serve(node: str, secret: bytes, control: socket.socket, peers: socket.socket, folder: str | None) -> None:
    Keeper(node, secret, control, peers, folder).serve_forever()


def manifest_of(step: int, num_bytes: int, rank: int = 0, generation: int = 1, **more: Any) -> dict[str, Any]:
    course = [generation, 0]
    fields = {"rank": rank, "generation": generation, "step": step, "course": course, "base": 0, "bytes": num_bytes}
    return {**fields, "save": f"{generation}-{step}", **more}


def fill(slot: OwnSlot, data: bytes, whole: bool = True) -> None:
    """As a rank does: the header first."""
    with mmap.mmap(slot.descriptor, HEADER_BYTES + len(data)) as memory:
        memory[:8] = bytes(8)
        end = len(data) if whole else len(data) // 2
        memory[HEADER_BYTES : HEADER_BYTES + end] = data[:end]


def read(client: KeeperClient, slot: int, num_bytes: int) -> bytes:
    descriptor = client.open(slot)
    try:
        return os.pread(descriptor, num_bytes, HEADER_BYTES)
    finally:
        os.close(descriptor)
