"""Folders and S3 behave the same: what was written comes back, and an object is there whole or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from s3 import S3Server

from craton.infrastructure import StorageError
from craton.infrastructure.errors import ObjectMissingError
from craton.infrastructure.storage import Store, open_store

MEBI = 2**20
LARGE = 11 * MEBI + 12_345  # three parts of an upload


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craton.infrastructure.storage.s3.PART_BYTES", 5 * MEBI)  # S3 takes no smaller ones
    monkeypatch.setattr("craton.infrastructure.storage.store.STREAM_BYTES", 2 * MEBI)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return open_store(f"{request.getfixturevalue('bucket')}/some/prefix")


def test_200_random_objects_come_back(store: Store) -> None:
    chance = random.Random(7)
    letters = "abc XYZ-_.=+%#~{}é"
    expected = {}
    for number in range(200):
        folders = [f"{chance.choice('abc')}{chance.randrange(3)}" for _ in range(chance.randrange(3))]
        name = "/".join([*folders, f"{number}{''.join(chance.choices(letters, k=8))}z"])
        expected[name] = chance.randbytes(chance.choice([0, 1, 100, 70_000]))
        store.put(name, expected[name])
    listed = store.list()
    assert [info.name for info in listed] == sorted(expected)
    assert {info.name: info.bytes for info in listed} == {name: len(content) for name, content in expected.items()}
    for name in chance.sample(sorted(expected), 60):
        content, info = expected[name], store.info(name)
        assert info is not None
        assert store.read(name) == content
        begin, end = sorted((chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)))
        assert bytes(store.read_range(info, begin, end)) == content[begin:end]


def test_a_large_object_goes_in_parts(store: Store) -> None:
    content = random.Random(1).randbytes(LARGE)
    buffer = bytearray(1_333_333)
    with store.create("large") as writer:
        for start in range(0, LARGE, len(buffer)):
            piece = content[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            writer.write(memoryview(buffer)[: len(piece)])  # the same buffer each time
    assert writer.bytes == LARGE
    assert store.read("large") == content
    info = store.info("large")
    assert info is not None
    assert store.read_range(info, 3 * MEBI, 10 * MEBI) == content[3 * MEBI : 10 * MEBI]
    assert b"".join(store.stream(info, 5)) == content[5:]


def fail_after(store: Store, name: str, content: bytes) -> None:
    with store.create(name) as writer:
        writer.write(content)
        raise KeyError


def test_an_error_while_writing_leaves_what_was_there(store: Store, s3_server: S3Server) -> None:
    store.put("a/one", "old")
    for name, content in (("a/one", bytes(LARGE)), ("a/two", b"little")):
        with pytest.raises(KeyError):
            fail_after(store, name, content)
    assert store.read("a/one") == b"old"
    assert [info.name for info in store.list()] == ["a/one"]
    if store.url.startswith("s3://"):
        assert s3_server.open_uploads(store.url.split("/")[2]) == []
    else:
        assert [path.name for path in Path(store.url).rglob("*") if path.is_file()] == ["one"]


def test_listing_deleting_and_tags(store: Store) -> None:
    assert store.list() == []
    assert store.folders() == []
    assert store.info("nothing") is None
    with pytest.raises(ObjectMissingError, match="nothing"):
        store.read("nothing")
    for name in ("step-1/a", "step-1/b/c", "step-10/a", "top"):
        store.put(name, name)
    first = store.info("top")
    store.put("top", "pot")
    store.put("empty", "")
    empty = store.info("empty")
    assert empty is not None
    assert list(store.stream(empty)) == []
    assert store.read("empty") == b""
    store.delete(["empty"])
    assert first is not None
    assert store.info("top") != first
    assert [info.name for info in store.list("step-1")] == ["step-1/a", "step-1/b/c"]
    assert store.folders() == ["step-1", "step-10"]
    assert store.folders("step-1") == ["b"]
    store.delete_tree("step-1")
    store.delete(["top", "never there"])
    assert [info.name for info in store.list()] == ["step-10/a"]
    store.check_writable()
    assert len(store.list()) == 1


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../b", "a//b", "a/"])
def test_a_name_stays_below_its_store(store: Store, name: str) -> None:
    with pytest.raises(StorageError, match="cannot name an object"):
        store.put(name, "x")


def test_an_empty_object_that_marks_a_folder_is_none(bucket: str, s3_server: S3Server) -> None:
    name = bucket.removeprefix("s3://")
    for key, content in (("run/", b""), ("run/a/", b""), ("run/a/x", b"1"), ("run/a-b", b"")):
        s3_server.replace(name, key, content)
    assert [info.name for info in open_store(f"{bucket}/run").list()] == ["a-b", "a/x"]


@pytest.mark.parametrize("place", ["s3://", "gs://bucket/a", "s3:///x", "s3://bucket/../other"])
def test_what_is_no_store(place: str) -> None:
    with pytest.raises(StorageError, match=r"s3://bucket"):
        open_store(place)


WRITER = """
import sys
from craton.infrastructure.storage import open_store
store, content = open_store(sys.argv[1]), bytes(range(256)) * 4096
store.put("before", "whole")
with store.create("object") as writer:
    for megabyte in range(40):
        writer.write(content)
        print(megabyte, flush=True)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_killed_writer_leaves_no_half_object(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = str(tmp_path / "store") if kind == "folder" else f"{request.getfixturevalue('bucket')}/store"
    for seed in range(3):
        point = random.Random(seed).randrange(2, 40)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, place],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == str(point):
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        store = open_store(place)
        assert [info.name for info in store.list()] == ["before"]
        assert store.read("before") == b"whole"
    store.put("object", "a later writer")
    assert [info.name for info in store.list()] == ["before", "object"]
    if kind == "folder":
        left = sorted(path.name for path in Path(place).iterdir())
        assert left == ["before", "object"], "what the killed ones left goes with the next writer"


def test_two_writers_of_one_object_do_not_disturb_each_other(store: Store) -> None:
    with store.create("same") as first:
        first.write(b"first")
        with store.create("same") as second:
            second.write(b"second")
        assert store.read("same") == b"second"
    assert store.read("same") == b"first"
