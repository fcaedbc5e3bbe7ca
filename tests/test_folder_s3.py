"""The S3 server of the GPU tests answers as moto's does, as far as a store can tell."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from folder_s3 import FolderS3
from s3 import S3Server, aws_variables
from waiting import wait_until

from craton.infrastructure.errors import ObjectMissingError, StorageError
from craton.infrastructure.storage import open_store, s3

PART_BYTES = 5 * 2**20  # the smallest that S3 takes


@pytest.fixture
def folder_server(tmp_path: Path) -> Iterator[FolderS3]:
    server = FolderS3(tmp_path, processes=2)
    yield server
    server.stop()


def exchange(url: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a store hears from this server, without tags and times."""
    for name, value in aws_variables(url).items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{bucket}/prefix/run")
    store.check_writable()
    large = os.urandom(1024) * (11 * 1024)  # 11 MiB: three parts
    store.put("step-1/a & b", b"small")
    store.put("step-1", b"an object called like a folder")
    store.put("step-2/empty", b"")
    with store.create("step-2/large") as writer:
        writer.write(large)
    info = store.info("step-2/large")
    assert info is not None
    ranges = [(0, 10), (PART_BYTES - 5, PART_BYTES + 5), (info.bytes - 7, info.bytes)]
    heard: list[object] = [bytes(store.read_range(info, *span)) == large[slice(*span)] for span in ranges]
    heard += [store.read("step-2/large") == large, store.read("step-1/a & b")]
    with suppress(InterruptedError), store.create("step-3/abandoned") as writer:
        writer.write(large)
        raise InterruptedError
    heard += [[(item.name, item.bytes) for item in store.list(prefix)] for prefix in ("", "step-1", "step-9")]
    heard += [store.folders(), store.folders("step-9"), store.exists("step-2/empty"), store.info("nothing")]
    store.put("step-2/large", b"another version")
    for call in (lambda: store.read("nothing"), lambda: store.read_range(info, 0, 10)):
        with pytest.raises(StorageError) as raised:
            call()
        heard.append(isinstance(raised.value, ObjectMissingError))
    store.delete(["step-1/a & b", "nothing"])
    store.delete_tree("step-2")
    heard.append([item.name for item in store.list()])
    with pytest.raises(StorageError):
        open_store("s3://no-such-bucket/prefix").put("a", b"b")
    return heard


def test_a_store_hears_the_same_from_both_servers(
    folder_server: FolderS3, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", PART_BYTES)
    for server in (folder_server, s3_server):
        server.make_bucket("compared")
    found = exchange(folder_server.url, "compared", monkeypatch)
    assert found == exchange(s3_server.url, "compared", monkeypatch)
    assert found[:4] == [True] * 4


def test_nothing_listens_once_it_is_stopped(tmp_path: Path) -> None:
    server = FolderS3(tmp_path, processes=3)
    server.make_bucket("made")
    server.stop()

    def is_refused() -> bool:
        with suppress(ConnectionRefusedError, ConnectionResetError), socket.create_connection(address):
            return False
        return True

    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    wait_until(is_refused, "its processes are gone")
